#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "nn/layers/attention.h"
#include "nn/module.h"

namespace potluck::nn {

/// What a stack of blocks computes again in backward instead of keeping it (see autograd/recompute.h): less memory for more
/// time. Loss and gradients are the same bits.
struct RecomputePolicy {
    enum class What : std::uint8_t {
        nothing,
        attention_and_activation,  // within each block what is large and cheap: attention weights' results, gelu or swiglu
        blocks                     // whole blocks, of which only the inputs are kept
    };

    What what = What::nothing;
    std::int64_t together =
        1;  // with `blocks`: consecutive blocks that are one region, so that one input is kept of them
};

/// One layer of a stack: (batch, time, width) to (batch, time, width).
class Block : public Module {
public:
    Tensor forward(const Tensor& x) override { return forward(x, nullptr, 0); }
    /// With a cache, x contains the tokens that follow those in the cache for `layer`.
    virtual Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) = 0;
    /// Number and size of the key-value heads that a cache stores for this block. They follow from the weights: a block
    /// with a part of the heads needs a cache for that part.
    virtual std::int64_t kv_heads() const = 0;
    virtual std::int64_t head_size() const = 0;
    /// Whether attention and activation are computed again in backward: RecomputePolicy::What::attention_and_activation.
    virtual void set_recompute_parts(bool recompute) = 0;
};

/// A model that predicts the next token of a text: ids (batch, time) i64 to logits (batch, time, vocabulary). It is a
/// stack: head(finish(layer n-1(.. layer 0(embed(ids))))). Code that runs a part of it, or runs it differently, calls
/// these functions.
class LanguageModel : public Module {
public:
    Tensor forward(const Tensor& ids) override { return head(features(ids, nullptr)); }
    /// `ids` are only the tokens that follow those in the cache; returns their logits. Use it inside a NoGrad block.
    Tensor forward(const Tensor& ids, KeyValueCache& cache) { return head(features(ids, &cache)); }
    /// The vectors (batch, time, width) that head() turns into logits. With a cache, ids are the tokens that follow.
    Tensor features(const Tensor& ids, KeyValueCache* cache);

    /// ids (batch, time) to (batch, time, width); the first token is at position `start` of its text.
    virtual Tensor embed(const Tensor& ids, std::int64_t start) = 0;
    /// Number of blocks.
    virtual std::int64_t layers() const = 0;
    /// Block `index`, from 0 on. Throws Error when there is none.
    virtual Block& layer(std::int64_t index) = 0;
    /// The layers between the last block and the head: (batch, time, width) to the same shape.
    virtual Tensor finish(const Tensor& x) = 0;
    /// (.., width) to logits (.., vocabulary).
    virtual Tensor head(const Tensor& features) = 0;

    /// A cache for `batch` texts of at most context() tokens, in the model's dtype and on its device.
    KeyValueCache make_cache(std::int64_t batch);

    /// What backward computes again from now on. Throws Error when fewer than 1 block are to be together.
    void set_recompute(const RecomputePolicy& policy);
    const RecomputePolicy& recompute_policy() const { return recompute_; }

    /// The longest text that the model can process, in tokens.
    std::int64_t context() const { return sizes_.context; }
    std::int64_t vocabulary() const { return sizes_.vocabulary; }
    /// Floating-point operations of forward and backward per token of a text of `time` tokens: 6 per weight of a matrix
    /// product, plus 12 * layers * width * time for attention (Chowdhery et al., "PaLM", 2022, appendix B).
    double flops_per_token(std::int64_t time) const;

protected:
    struct Sizes {
        std::int64_t vocabulary, context, width;
    };
    explicit LanguageModel(const Sizes& sizes) : sizes_(sizes) {}

    /// Parameters that are only looked up, such as an embedding that is not the output layer too: no matrix product has
    /// them.
    virtual std::int64_t lookup_count() const = 0;

private:
    Sizes sizes_;
    RecomputePolicy recompute_;
};

/// Block `index` of a list of blocks. Throws Error(op, ...) when there is none.
template <std::derived_from<Block> B>
B& checked_block(std::string_view op, std::vector<B>& blocks, std::int64_t index) {
    if (index < 0 || index >= static_cast<std::int64_t>(blocks.size())) {
        throw Error(op, "there is no layer " + std::to_string(index) + " among " +
                            std::to_string(blocks.size()) + ".");
    }
    return blocks[static_cast<std::size_t>(index)];
}

/// Throws Error(op, ...) unless ids are (batch, time) integers and all their positions, from `start` on, are within the
/// context.
void check_ids(std::string_view op, const Tensor& ids, std::int64_t start, std::int64_t context);

}  // namespace potluck::nn
