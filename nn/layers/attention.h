#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/options.h"
#include "core/tensor.h"
#include "nn/layers/linear.h"
#include "nn/module.h"

namespace potluck::nn {

/// (batch, time, heads * size) to (batch, heads, time, size), without a copy.
Tensor split_heads(const Tensor& x, std::int64_t heads);
/// (batch, heads, time, size) back to (batch, time, heads * size).
Tensor merge_heads(const Tensor& x);
/// Throws Error(op, ...) that names both numbers unless width is a multiple of heads and heads a multiple of kv_heads.
void check_heads(std::string_view op, std::int64_t width, std::int64_t heads, std::int64_t kv_heads);

/// The keys and values of the tokens that a model has already processed, so that later tokens need not recompute them.
/// A prompt may be processed in chunks of any size, then token by token; the result equals one pass over all tokens.
/// For inference: use it inside a NoGrad block.
class KeyValueCache {
public:
    /// Allocates memory for `capacity` tokens of `batch` texts in each of `layers` layers.
    KeyValueCache(std::int64_t layers, std::int64_t batch, std::int64_t kv_heads, std::int64_t capacity,
                  std::int64_t head_size, TensorOptions options = {});

    /// Number of tokens that all layers have processed: the position of the next token.
    std::int64_t length() const { return length_; }
    std::int64_t capacity() const { return capacity_; }
    /// Appends the keys and values of new tokens, each (batch, kv_heads, time, head_size), to those of `layer`, and
    /// returns all of them. Throws Error when they exceed the capacity, or while gradients are being recorded.
    std::pair<Tensor, Tensor> append(std::int64_t layer, const Tensor& keys, const Tensor& values);
    /// Marks `time` more tokens as processed. The model calls it when all layers are done.
    void advance(std::int64_t time) { length_ += time; }
    /// Empties the cache.
    void clear() { length_ = 0; }

private:
    std::vector<Tensor> keys_, values_;  // one per layer: (batch, kv_heads, capacity, head_size)
    std::int64_t capacity_;
    std::int64_t length_ = 0;
};

/// Cosine and sine tables for rotary embedding (see rotary_tables()), shared by the layers of a model.
struct RotaryTable {
    Tensor cosine = {}, sine = {};  // (positions, head_size / 2); undefined: no rotary embedding
};

struct AttentionConfig {
    std::int64_t width = 0;  // of the input and of the output
    std::int64_t heads = 1;  // query heads
    std::optional<std::int64_t> kv_heads =
        {};                      // heads of keys and values, each shared by a group of query heads
    std::int64_t head_size = 0;  // 0: width / heads
    bool causal = false;         // true: a token sees only itself and earlier tokens
    bool bias = false;           // in the four projections
    double dropout = 0.0;        // of the attention weights, in training
    RotaryTable rotary = {};
    bool initialize = true;  // false leaves zeros, for a model that initialises its parameters itself
};

/// Multi-head self-attention: (batch, time, width) to (batch, time, width). Grouped-query attention (Ainslie et al.,
/// "GQA", 2023) when kv_heads < heads; parameters have Llama's names.
class Attention : public Module {
public:
    Linear q_proj, k_proj, v_proj, o_proj;

    /// Throws Error unless width is a multiple of heads and heads a multiple of kv_heads.
    explicit Attention(AttentionConfig config);
    template <std::size_t N>
    explicit Attention(MistypedOptions<N>, Refused<"no such option: see AttentionConfig", N> = {});

    void members(Members& m) override;
    Tensor forward(const Tensor& x) override { return forward(x, nullptr, 0); }
    /// With a cache, x contains the tokens that follow those in the cache for `layer`.
    Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer);
    std::string describe() const override;
    /// Query heads, and key-value heads, as given by the weights. So the same code serves a layer with a part of the
    /// heads.
    std::int64_t heads() const { return q_proj.weight.size(0) / config_.head_size; }
    std::int64_t kv_heads() const { return k_proj.weight.size(0) / config_.head_size; }
    std::int64_t head_size() const { return config_.head_size; }
    /// Whether backward computes the attention again instead of keeping its result.
    void set_recompute(bool recompute) { recompute_ = recompute; }

private:
    struct Completed {};
    Attention(AttentionConfig config, Completed);
    /// From queries, keys and values, (batch, time, heads * head_size) each, to the output.
    Tensor attend(const std::vector<Tensor>& projected, KeyValueCache* cache, std::int64_t layer);

    AttentionConfig config_;  // with all defaults filled in
    bool recompute_ = false;
};

}  // namespace potluck::nn
