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
/// Throws Error(op, ...) that names both numbers unless heads divide width and kv_heads divide heads.
void check_heads(std::string_view op, std::int64_t width, std::int64_t heads, std::int64_t kv_heads);

/// The keys and values of the tokens that a model has already seen, so that further tokens need not compute them again.
/// A prompt may go through in chunks of any size, then token after token; the result is that of one pass over all.
/// For inference: use it inside a NoGrad block.
class KeyValueCache {
public:
    /// Room for `capacity` tokens of `batch` texts in each of `layers` layers.
    KeyValueCache(std::int64_t layers, std::int64_t batch, std::int64_t kv_heads, std::int64_t capacity,
                  std::int64_t head_size, TensorOptions options = {});

    /// Tokens that all layers have seen: the position of the next token.
    std::int64_t length() const { return length_; }
    std::int64_t capacity() const { return capacity_; }
    /// Stores the keys and values of new tokens, each (batch, kv_heads, time, head_size), behind those that `layer` has,
    /// and returns all of them. Throws Error when they do not fit, or while gradients are being recorded.
    std::pair<Tensor, Tensor> append(std::int64_t layer, const Tensor& keys, const Tensor& values);
    /// Counts `time` tokens as seen. The model calls it when all layers are through.
    void advance(std::int64_t time) { length_ += time; }
    /// Forgets everything.
    void clear() { length_ = 0; }

private:
    std::vector<Tensor> keys_, values_;  // a layer each: (batch, kv_heads, capacity, head_size)
    std::int64_t capacity_;
    std::int64_t length_ = 0;
};

/// Cosine and sine for rotary embedding (see rotary_tables()), shared by the layers of a model.
struct RotaryTable {
    Tensor cosine = {}, sine = {};  // (positions, head_size / 2); undefined: no rotary embedding
};

struct AttentionConfig {
    std::int64_t width = 0;  // of the input and of the output
    std::int64_t heads = 1;  // query heads
    std::optional<std::int64_t> kv_heads =
        {};                      // heads of keys and values, each shared by a group of query heads
    std::int64_t head_size = 0;  // 0: width / heads
    bool causal = false;         // true: a token sees itself and what comes before, and nothing behind
    bool bias = false;           // of the four projections
    double dropout = 0.0;        // of attention weights, while training
    RotaryTable rotary = {};
    bool initialize = true;  // false leaves zeros, for a model that sets its own start values
};

/// Multi-head attention of a text with itself: (batch, time, width) to (batch, time, width). Grouped heads (Ainslie et
/// al., "GQA", 2023) when kv_heads < heads; parameters have Llama's names.
class Attention : public Module {
public:
    Linear q_proj, k_proj, v_proj, o_proj;

    /// Throws Error when heads do not divide width or kv_heads do not divide heads.
    explicit Attention(AttentionConfig config);
    template <std::size_t N>
    explicit Attention(MistypedOptions<N>, Refused<"no such option: see AttentionConfig", N> = {});

    void members(Members& m) override;
    Tensor forward(const Tensor& x) override { return forward(x, nullptr, 0); }
    /// With a cache, x are the tokens that follow those that the cache holds for `layer`.
    Tensor forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer);
    std::string describe() const override;
    /// Query heads, and heads of keys and values, that the weights make. A layer with a share of the heads is the same code.
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
