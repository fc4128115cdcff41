#include "nn/models/gpt2.h"

#include <cmath>
#include <tuple>

#include "autograd/autocast.h"
#include "autograd/ops/activation.h"
#include "autograd/ops/attention.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/matmul.h"
#include "autograd/ops/view.h"
#include "core/format.h"
#include "nn/init.h"
#include "nn/recompute.h"

namespace potluck::nn {
namespace {

const GPT2Config& checked(const GPT2Config& config) {
    check_heads("gpt2", config.width, config.heads, config.heads);
    if (config.vocabulary < 1 || config.context < 1 || config.layers < 1) {
        throw Error("gpt2", fmt::format("vocabulary {}, context {} and layers {} must be at least 1.",
                                        config.vocabulary, config.context, config.layers));
    }
    if (!(config.dropout >= 0.0 && config.dropout <= 1.0)) {
        throw Error("gpt2", fmt::format("dropout is {}. A probability lies in [0, 1].", config.dropout));
    }
    return config;
}

}  // namespace

Conv1D::Conv1D(std::int64_t in, std::int64_t out)
    : weight(parameter(zeros({in, out}))), bias(parameter(zeros({out}))) {}

Tensor Conv1D::forward(const Tensor& x) {
    return branch.add_to(linear(x, weight, bias, WeightLayout::in_out), x, is_training());
}

std::string Conv1D::describe() const { return fmt::format("Conv1D({}, {})", weight.size(0), weight.size(1)); }

GPT2Attention::GPT2Attention(const GPT2Config& config)
    : c_attn(config.width, 3 * config.width),
      c_proj(config.width, config.width),
      head_size_(config.width / config.heads),
      dropout_(config.dropout) {}

Tensor GPT2Attention::forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) {
    const RandomSiteScope site(random_site());
    const Tensor qkv = c_attn(x);  // (batch, time, 3 * heads * head_size)
    if (!recompute_ || cache != nullptr) return attend(qkv, cache, layer);
    return recompute_in(*this, [this](const std::vector<Tensor>& in) { return attend(in[0], nullptr, 0); },
                        {qkv});
}

Tensor GPT2Attention::attend(const Tensor& qkv, KeyValueCache* cache, std::int64_t layer) {
    const std::vector<Tensor> parts = split(qkv, heads() * head_size_, -1);
    const Tensor q = split_heads(parts[0], heads());  // (batch, heads, time, head_size)
    Tensor k = split_heads(parts[1], heads());
    Tensor v = split_heads(parts[2], heads());
    if (cache != nullptr) std::tie(k, v) = cache->append(layer, k, v);
    const Tensor y =
        scaled_dot_product_attention(q, k, v, {.causal = true, .dropout = is_training() ? dropout_ : 0.0});
    return c_proj(merge_heads(y));
}

GPT2MLP::GPT2MLP(const GPT2Config& config)
    : c_fc(config.width, 4 * config.width), c_proj(4 * config.width, config.width) {}

Tensor GPT2MLP::forward(const Tensor& x) {
    if (recompute_)
        return recompute_in(
            *this,
            [this](const std::vector<Tensor>& before) { return c_proj(gelu(before[0], GeluKind::tanh)); },
            {c_fc(x)});
    if (c_fc.branch) return c_proj(gelu(c_fc(x), GeluKind::tanh));
    return c_proj(linear_gelu(x, c_fc.weight, c_fc.bias, WeightLayout::in_out));
}

GPT2Block::GPT2Block(const GPT2Config& config)
    : ln_1(config.width, config.layer_norm_epsilon),
      ln_2(config.width, config.layer_norm_epsilon),
      attn(config),
      mlp(config),
      dropout(config.dropout) {}

Tensor GPT2Block::forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) {
    const auto [attended, normalised] = ln_2.add_and_norm(x, dropout(attn.forward(ln_1(x), cache, layer)));
    return attended + dropout(mlp(normalised));
}

GPT2::Transformer::Transformer(const GPT2Config& config)
    : wte(config.vocabulary, config.width, 0.0),
      wpe(config.context, config.width, 0.0),
      dropout(config.dropout),
      ln_f(config.width, config.layer_norm_epsilon) {
    for (std::int64_t i = 0; i < config.layers; ++i) h.emplace_back(config);
}

GPT2::GPT2(const GPT2Config& config)
    : LanguageModel({checked(config).vocabulary, config.context, config.width}),
      transformer(config),
      lm_head(config.tie_embeddings
                  ? Linear(transformer.wte.weight)
                  : Linear(config.width, config.vocabulary, {.bias = false, .initialize = false})),
      config_(config) {
    const double residual_deviation = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
    for (const auto& [name, tensor] : named_parameters()) {
        if (tensor.ndim() < 2) continue;
        init::normal(tensor, 0.0, name.ends_with("c_proj.weight") ? residual_deviation : 0.02);
    }
}

Tensor GPT2::embed(const Tensor& ids, std::int64_t start) {
    check_ids("gpt2", ids, start, config_.context);
    const Tensor positions = transformer.wpe.weight.narrow(0, start, ids.size(1));  // (time, width)
    return transformer.dropout(autocast(transformer.wte(ids) + positions));
}

std::int64_t GPT2::lookup_count() const {
    return transformer.wpe.weight.count() + (config_.tie_embeddings ? 0 : transformer.wte.weight.count());
}

}  // namespace potluck::nn
