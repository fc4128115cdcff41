#include "nn/models/llama.h"

#include "autograd/ops/elementwise.h"
#include "autograd/ops/rotary.h"
#include "core/format.h"
#include "nn/init.h"

namespace potluck::nn {
namespace {

const LlamaConfig& checked(const LlamaConfig& config) {
    check_heads("llama", config.width, config.heads, config.kv_heads.value_or(config.heads));
    if (config.vocabulary < 1 || config.context < 1 || config.layers < 1 || config.hidden < 1) {
        throw Error("llama",
                    fmt::format("vocabulary {}, context {}, layers {} and hidden {} must be at least 1.",
                                config.vocabulary, config.context, config.layers, config.hidden));
    }
    if (config.width / config.heads % 2 != 0) {
        throw Error("llama",
                    fmt::format("a width of {} makes {} heads of {}. Rotary embedding needs an even size.",
                                config.width, config.heads, config.width / config.heads));
    }
    return config;
}

}  // namespace

LlamaBlock::LlamaBlock(const LlamaConfig& config, const RotaryTable& rotary)
    : self_attn({.width = config.width,
                 .heads = config.heads,
                 .kv_heads = config.kv_heads,
                 .causal = true,
                 .rotary = rotary,
                 .initialize = false}),
      mlp(config.width, config.hidden, false),
      input_layernorm(config.width, config.rms_norm_epsilon),
      post_attention_layernorm(config.width, config.rms_norm_epsilon) {}

void LlamaBlock::members(Members& m) {
    m("self_attn", self_attn)("mlp", mlp);
    m("input_layernorm", input_layernorm)("post_attention_layernorm", post_attention_layernorm);
}

Tensor LlamaBlock::forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) {
    const auto [attended, normalised] =
        post_attention_layernorm.add_and_norm(x, self_attn.forward(input_layernorm(x), cache, layer));
    return attended + mlp(normalised);
}

Llama::Transformer::Transformer(const LlamaConfig& config)
    : embed_tokens(config.vocabulary, config.width, 0.0), norm(config.width, config.rms_norm_epsilon) {
    const auto [cosine, sine] = rotary_tables(config.context, config.width / config.heads, config.rope_theta);
    for (std::int64_t i = 0; i < config.layers; ++i) layers.emplace_back(config, RotaryTable{cosine, sine});
}

Llama::Llama(const LlamaConfig& config)
    : LanguageModel({checked(config).vocabulary, config.context, config.width}),
      model(config),
      lm_head(config.tie_embeddings
                  ? Linear(model.embed_tokens.weight)
                  : Linear(config.width, config.vocabulary, {.bias = false, .initialize = false})),
      config_(config) {
    for (const Tensor& tensor : parameters()) {
        if (tensor.ndim() >= 2) init::normal(tensor, 0.0, 0.02);
    }
}

Tensor Llama::embed(const Tensor& ids, std::int64_t start) {
    check_ids("llama", ids, start, config_.context);
    return model.embed_tokens(ids);
}

std::int64_t Llama::lookup_count() const {
    return config_.tie_embeddings ? 0 : model.embed_tokens.weight.count();
}

}  // namespace potluck::nn
