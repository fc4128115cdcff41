#pragma once

#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

struct Attention {
    bool causal = false;  // aligned bottom-right: the last query sees every key
    // Broadcast to (batch, heads, queries, keys): bool (true: may be seen) or floating (added to the scores).
    Tensor mask = {};
    double scale = 0.0;    // 0: 1 / sqrt(head_size)
    double dropout = 0.0;  // probability of dropping an attention weight
};

/// softmax(q k^T * scale + mask) v, fused: the (queries, keys) matrix is never stored beyond a tile, forward or backward
/// (Dao et al., "FlashAttention", 2022). q (batch, heads, queries, head_size), k (batch, kv_heads, keys, head_size),
/// v (batch, kv_heads, keys, value_size); heads must be a multiple of kv_heads (grouped heads: each kv head serves
/// heads / kv_heads query heads). A query that sees no key gives zeros and gets zero gradients.
/// A query and a key of which the first may not see the second (causal, a mask of false or -inf) have no part in each
/// other's results: infinity or NaN in a hidden key or value changes no output and no gradient. (cuDNN's kernels, which
/// cuda/options.h allows, do not promise this.)
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Attention& options = {});
template <std::size_t N>
Tensor scaled_dot_product_attention(const Tensor&, const Tensor&, const Tensor&, MistypedOptions<N>,
                                    Refused<"no such option: see Attention", N> = {});

/// The same, composed of matmul, softmax and dropout, which stores the whole matrix: the reference for the fused one, and
/// differentiable twice. Under a mask or causality, what sees infinity in a row of q, k or v is NaN here.
Tensor attention_composed(const Tensor& q, const Tensor& k, const Tensor& v, const Attention& options = {});

}  // namespace potluck
