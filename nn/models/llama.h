#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/options.h"
#include "nn/layers/attention.h"
#include "nn/layers/embedding.h"
#include "nn/layers/linear.h"
#include "nn/layers/mlp.h"
#include "nn/layers/norm.h"
#include "nn/models/language_model.h"

namespace potluck::nn {

/// The dimensions of a Llama. The defaults give a small model; Llama 2 7B has vocabulary 32000, context 4096, width
/// 4096, hidden 11008, heads 32 and layers 32.
struct LlamaConfig {
    std::int64_t vocabulary = 32000;
    std::int64_t context = 1024;  // the longest text, in tokens
    std::int64_t width = 512;
    std::int64_t hidden = 1376;  // units of the gated MLP
    std::int64_t heads = 8;
    std::optional<std::int64_t> kv_heads = {};  // none: as many as heads
    std::int64_t layers = 8;
    double rope_theta = 10000.0;  // base of the rotary angles
    double rms_norm_epsilon = 1e-6;
    bool tie_embeddings = false;  // the output layer shares the embedding's weight
};

/// x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
///
/// Products of the same input (q, k and v; gate and up) are a product each, so that their weights are parameters like all
/// others. As one product they give the same bits and cost a CPU as much: tests/bench/bench_fused_products.cpp measured
/// whole training steps of a Llama at 1448, 274, 206 and 28 ms of two threads' time with a product each, at 1435, 271, 204
/// and 28 ms with one product forward, and at 1484, 305, 215 and 30 ms with one product forward and two backward
/// (1024 x 1024, 768 x 512, 256 x 768 and 768 x 128 rows x width).
class LlamaBlock : public Block {
public:
    Attention self_attn;
    SwiGLU mlp;
    RMSNorm input_layernorm, post_attention_layernorm;

    LlamaBlock(const LlamaConfig& config, const RotaryTable& rotary);
    void members(Members& m) override;
    using Block::forward;
    Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) override;
    std::int64_t kv_heads() const override { return self_attn.kv_heads(); }
    std::int64_t head_size() const override { return self_attn.head_size(); }
    void set_recompute_parts(bool recompute) override {
        self_attn.set_recompute(recompute);
        mlp.set_recompute(recompute);
    }
};

/// Llama (Touvron et al., 2023) with grouped-query attention and the names and shapes of Hugging Face's
/// LlamaForCausalLM. Weights are initialised from a normal distribution with standard deviation 0.02.
class Llama : public LanguageModel {
public:
    struct Transformer : Module {
        Embedding embed_tokens;
        std::vector<LlamaBlock> layers;
        RMSNorm norm;

        explicit Transformer(const LlamaConfig& config);
        void members(Members& m) override { m("embed_tokens", embed_tokens)("layers", layers)("norm", norm); }
        std::string describe() const override { return "Transformer"; }
    };

    Transformer model;
    Linear lm_head;

    /// Throws Error for sizes below 1, a width that is not a multiple of heads, heads that are not a multiple of
    /// kv_heads, or an odd head size.
    explicit Llama(const LlamaConfig& config);
    template <std::size_t N>
    explicit Llama(MistypedOptions<N>, Refused<"no such option: see LlamaConfig", N> = {});

    void members(Members& m) override { m("model", model)("lm_head", lm_head); }
    Tensor embed(const Tensor& ids, std::int64_t start) override;
    std::int64_t layers() const override { return static_cast<std::int64_t>(model.layers.size()); }
    Block& layer(std::int64_t index) override { return checked_block("llama", model.layers, index); }
    Tensor finish(const Tensor& x) override { return model.norm(x); }
    Tensor head(const Tensor& features) override { return lm_head(features); }
    const LlamaConfig& config() const { return config_; }

private:
    std::int64_t lookup_count() const override;

    LlamaConfig config_;
};

}  // namespace potluck::nn
