#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/options.h"
#include "nn/branch.h"
#include "nn/layers/attention.h"
#include "nn/layers/dropout.h"
#include "nn/layers/embedding.h"
#include "nn/layers/linear.h"
#include "nn/layers/norm.h"
#include "nn/models/language_model.h"

namespace potluck::nn {

/// The dimensions of a GPT-2. The defaults are those of the published model with 124 million parameters, except for
/// dropout, which was 0.1.
struct GPT2Config {
    std::int64_t vocabulary = 50257;
    std::int64_t context = 1024;  // the longest text, in tokens
    std::int64_t width = 768;
    std::int64_t heads = 12;
    std::int64_t layers = 12;
    double dropout = 0.0;  // of embeddings, attention weights and both residual branches of a block
    double layer_norm_epsilon = 1e-5;
    bool tie_embeddings = true;  // the output layer shares the embedding's weight
};

/// x weight + bias, plus branch(x) if a branch is assigned, with weight (in, out): the layout in which GPT-2's weights
/// are published (a "Conv1D").
class Conv1D : public Module {
public:
    Tensor weight, bias;
    Branch branch;  // empty unless assigned: see Branch

    Conv1D(std::int64_t in, std::int64_t out);  // zeros: GPT2 initialises them
    void members(Members& m) override { m("weight", weight)("bias", bias)("branch", branch); }
    Tensor forward(const Tensor& x) override;
    std::string describe() const override;
};

/// The causal attention of GPT-2: one projection computes queries, keys and values.
class GPT2Attention : public Module {
public:
    Conv1D c_attn, c_proj;

    explicit GPT2Attention(const GPT2Config& config);
    void members(Members& m) override { m("c_attn", c_attn)("c_proj", c_proj); }
    Tensor forward(const Tensor& x) override { return forward(x, nullptr, 0); }
    Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer);
    /// Number of heads, as given by the weights.
    std::int64_t heads() const { return c_attn.weight.size(1) / (3 * head_size_); }
    std::int64_t head_size() const { return head_size_; }
    void set_recompute(bool recompute) { recompute_ = recompute; }

private:
    /// From queries, keys and values to the output.
    Tensor attend(const Tensor& qkv, KeyValueCache* cache, std::int64_t layer);

    std::int64_t head_size_;
    double dropout_;
    bool recompute_ = false;
};

class GPT2MLP : public Module {
public:
    Conv1D c_fc, c_proj;

    explicit GPT2MLP(const GPT2Config& config);
    void members(Members& m) override { m("c_fc", c_fc)("c_proj", c_proj); }
    Tensor forward(const Tensor& x) override;
    void set_recompute(bool recompute) { recompute_ = recompute; }

private:
    bool recompute_ = false;
};

/// x + attn(ln_1(x)), then x + mlp(ln_2(x)).
class GPT2Block : public Block {
public:
    LayerNorm ln_1, ln_2;
    GPT2Attention attn;
    GPT2MLP mlp;
    Dropout dropout;

    explicit GPT2Block(const GPT2Config& config);
    void members(Members& m) override {
        m("ln_1", ln_1)("attn", attn)("ln_2", ln_2)("mlp", mlp)("dropout", dropout);
    }
    using Block::forward;
    Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) override;
    std::int64_t kv_heads() const override { return attn.heads(); }
    std::int64_t head_size() const override { return attn.head_size(); }
    void set_recompute_parts(bool recompute) override {
        attn.set_recompute(recompute);
        mlp.set_recompute(recompute);
    }
};

/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) with the names and shapes of
/// Hugging Face's GPT2LMHeadModel. Initialised as published: normal with standard deviation 0.02, divided by sqrt(2 *
/// layers) for the projections that add to the residual; biases 0.
class GPT2 : public LanguageModel {
public:
    struct Transformer : Module {
        Embedding wte, wpe;
        Dropout dropout;
        std::vector<GPT2Block> h;
        LayerNorm ln_f;

        explicit Transformer(const GPT2Config& config);
        void members(Members& m) override {
            m("wte", wte)("wpe", wpe)("dropout", dropout)("h", h)("ln_f", ln_f);
        }
        std::string describe() const override { return "Transformer"; }
    };

    Transformer transformer;
    Linear lm_head;

    /// Throws Error for sizes below 1, a width that is not a multiple of heads, or dropout outside [0, 1].
    explicit GPT2(const GPT2Config& config);
    template <std::size_t N>
    explicit GPT2(MistypedOptions<N>, Refused<"no such option: see GPT2Config", N> = {});

    void members(Members& m) override { m("transformer", transformer)("lm_head", lm_head); }
    Tensor embed(const Tensor& ids, std::int64_t start) override;
    std::int64_t layers() const override { return static_cast<std::int64_t>(transformer.h.size()); }
    Block& layer(std::int64_t index) override { return checked_block("gpt2", transformer.h, index); }
    Tensor finish(const Tensor& x) override { return transformer.ln_f(x); }
    Tensor head(const Tensor& features) override { return lm_head(features); }
    const GPT2Config& config() const { return config_; }

private:
    std::int64_t lookup_count() const override;

    GPT2Config config_;
};

}  // namespace potluck::nn
