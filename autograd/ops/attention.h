#pragma once

#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

struct Attention {
    bool causal = false;  // aligned bottom-right: the last query sees every key
    // Broadcast to (batch, heads, queries, keys): bool (true: visible) or floating (added to the scores).
    Tensor mask = {};
    double scale = 0.0;    // 0: 1 / sqrt(head_size)
    double dropout = 0.0;  // probability of dropping an attention weight
};

/// softmax(q k^T * scale + mask) v, fused: neither forward nor backward stores more than a tile of the (queries, keys)
/// matrix (Dao et al., "FlashAttention", 2022). q (batch, heads, queries, head_size), k (batch, kv_heads, keys,
/// head_size), v (batch, kv_heads, keys, value_size); heads must be a multiple of kv_heads (grouped-query attention:
/// each kv head serves heads / kv_heads query heads). A query that sees no key gives zeros and gets zero gradients.
/// If a key is hidden from a query (causal, a mask of false or -inf), neither affects the results of the other:
/// infinity or NaN in a hidden key or value changes no output and no gradient. (cuDNN's kernels, which cuda/options.h
/// can enable, do not guarantee this.)
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Attention& options = {});
template <std::size_t N>
Tensor scaled_dot_product_attention(const Tensor&, const Tensor&, const Tensor&, MistypedOptions<N>,
                                    Refused<"no such option: see Attention", N> = {});

/// The same, composed of matmul, softmax and dropout, which stores the whole matrix: the reference for the fused op,
/// and twice differentiable. Under a mask or causality, a result that depends on infinity in a row of q, k or v is NaN
/// here.
Tensor attention_composed(const Tensor& q, const Tensor& k, const Tensor& v, const Attention& options = {});

}  // namespace potluck
