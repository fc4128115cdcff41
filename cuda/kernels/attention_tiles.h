#pragma once

// Shared by all attention kernels: the layout of the operands, and the rules that turn the product of a query and a key
// into a score (scale, causality, mask) and a weight (dropout).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/cpu/dropout_rule.h"
#include "core/kernel_specs.h"
#include "cuda/kernels/numbers.h"
#include "cuda/kernels/random_words.h"
#include "cuda/launch.h"

namespace potluck::cuda {

/// One operand (batch, heads, rows, columns) of any strides.
template <class T>
struct AttentionOperand {
    T* data = nullptr;
    std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
    std::int64_t rows = 0, columns = 0;
    bool has_wide_rows = false;  // every row begins at a multiple of 16 bytes and has no gaps

    AttentionOperand() = default;
    explicit AttentionOperand(const Tensor& x)
        : data(elements_of<T>(x)),
          batch_stride(x.strides()[0]),
          head_stride(x.strides()[1]),
          row_stride(x.strides()[2]),
          column_stride(x.strides()[3]),
          rows(x.size(2)),
          columns(x.size(3)) {
        constexpr std::int64_t pack = Pack<T>::size;
        // The stride of an axis of size 1 is never used and may be arbitrary.
        const auto keeps_alignment = [&](int axis) {
            return x.size(axis) <= 1 || x.strides()[static_cast<std::size_t>(axis)] % pack == 0;
        };
        has_wide_rows = is_aligned_for_packs(data) && (column_stride == 1 || columns <= 1) &&
                        keeps_alignment(0) && keeps_alignment(1) && keeps_alignment(2);
    }

    __device__ T* head(std::int64_t batch, std::int64_t index) const {
        return data + batch * batch_stride + index * head_stride;
    }
};

/// The rules for a score and a weight. C is the compute type.
template <class C>
struct AttentionRules {
    std::int64_t batch, heads, kv_heads, queries, keys;
    std::int64_t group;  // number of heads that share one kv head
    bool causal;
    bool has_mask, has_dropout;
    C scale;           // factor of products, times unit
    C unit;            // scores are in units of 1 / unit: log2(e) where the weights are powers of 2, else 1
    C gradient_scale;  // factor of products, without the unit

    const void* mask;  // (batch, heads, queries, keys)
    DType mask_dtype;
    std::int64_t mask_strides[4];

    MovingKey dropout_key;
    std::int64_t first_number;       // of the random number of the first weight
    std::int64_t number_strides[3];  // per batch, head, query
    std::uint32_t lowest_kept;       // random numbers below it drop a weight
    C kept_factor;                   // factor of the kept weights; 1 without dropout

    /// How many keys a query sees under causality alone: always the first ones (aligned bottom-right).
    __device__ std::int64_t keys_seen_by(std::int64_t query) const {
        if (!causal) return keys;
        const std::int64_t seen = query + keys - queries + 1;
        return seen < 0 ? 0 : (seen < keys ? seen : keys);
    }
    /// How many keys at least one of the queries [first, first + count) sees.
    __device__ std::int64_t keys_seen_by_tile(std::int64_t first, std::int64_t count) const {
        return keys_seen_by((first + count < queries ? first + count : queries) - 1);
    }
    /// The first query that sees a key.
    __device__ std::int64_t first_query_of(std::int64_t key) const {
        const std::int64_t query = key - keys + queries;
        return causal && query > 0 ? query : 0;
    }
    /// Row-major position of a query in tensors of (batch, heads, queries).
    __device__ std::int64_t row_index(std::int64_t batch_index, std::int64_t head, std::int64_t query) const {
        return (batch_index * heads + head) * queries + query;
    }

    /// Whether some weight of the queries from first_query on and the keys [first_key, first_key + count) may be hidden
    /// or dropped. It is then 0, but its factor may be infinity or NaN.
    __device__ bool hides_any(std::int64_t first_query, std::int64_t first_key, std::int64_t count) const {
        const std::int64_t last = first_key + count < keys ? first_key + count : keys;
        return has_mask || has_dropout || keys_seen_by(first_query) < last;
    }

    /// The score for a product q . k; -inf for a key that is not visible or out of range.
    __device__ C score(C product, std::int64_t batch_index, std::int64_t head, std::int64_t query,
                       std::int64_t key) const {
        constexpr C hidden = -std::numeric_limits<C>::infinity();
        if (query >= queries || key >= keys_seen_by(query)) return hidden;
        const C scaled = product * scale;
        if (!has_mask) return scaled;
        const std::int64_t place = batch_index * mask_strides[0] + head * mask_strides[1] +
                                   query * mask_strides[2] + key * mask_strides[3];
        if (mask_dtype == DType::boolean) return static_cast<const bool*>(mask)[place] ? scaled : hidden;
        const C added = added_mask(place);
        return added == hidden ? hidden : scaled + unit * added;
    }

    /// Whether dropout keeps a weight.
    __device__ bool keeps(std::int64_t batch_index, std::int64_t head, std::int64_t query,
                          std::int64_t key) const {
        const std::int64_t element = first_number + batch_index * number_strides[0] +
                                     head * number_strides[1] + query * number_strides[2] + key;
        return random_word(dropout_key, element) >= lowest_kept;
    }
    /// The dropout factor of a weight: 0 or kept_factor.
    __device__ C dropout_factor(std::int64_t batch_index, std::int64_t head, std::int64_t query,
                                std::int64_t key) const {
        return keeps(batch_index, head, query, key) ? kept_factor : C{0};
    }

private:
    __device__ C added_mask(std::int64_t place) const {
        switch (mask_dtype) {
            case DType::f64:
                return static_cast<C>(static_cast<const double*>(mask)[place]);
            case DType::f16:
                return static_cast<C>(to_compute(static_cast<const __half*>(mask)[place]));
            case DType::bf16:
                return static_cast<C>(to_compute(static_cast<const __nv_bfloat16*>(mask)[place]));
            default:
                return static_cast<C>(static_cast<const float*>(mask)[place]);
        }
    }
};

template <class C>
AttentionRules<C> attention_rules(const Tensor& q, const Tensor& k, const Tensor& mask_or_none,
                                  const AttentionSpec& options, const std::uint64_t* random_advance,
                                  double unit) {
    AttentionRules<C> rules{};
    rules.batch = q.size(0);
    rules.heads = q.size(1);
    rules.kv_heads = k.size(1);
    rules.queries = q.size(2);
    rules.keys = k.size(2);
    rules.group = rules.kv_heads == 0 ? 0 : rules.heads / rules.kv_heads;
    rules.causal = options.causal;
    rules.scale = static_cast<C>(options.scale * unit);
    rules.unit = static_cast<C>(unit);
    rules.gradient_scale = static_cast<C>(options.scale);
    rules.has_mask = mask_or_none.defined();
    if (rules.has_mask) {
        const Shape full = {rules.batch, rules.heads, rules.queries, rules.keys};
        const Tensor mask = mask_or_none.broadcast_alias(OpScope::current(), full);
        rules.mask = mask.raw_data();
        rules.mask_dtype = mask.dtype();
        std::copy_n(mask.strides().begin(), 4, rules.mask_strides);
    }
    rules.kept_factor = C{1};
    rules.has_dropout = options.dropout > 0.0;
    if (rules.has_dropout) {
        const std::uint64_t threshold = cpu::dropout_threshold(options.dropout);
        const bool drops_all = threshold >> 32 != 0;  // the threshold does not fit
        rules.dropout_key = {options.dropout_key, random_advance};
        const ElementNumbers numbers =
            element_numbers({rules.batch, rules.heads, rules.queries, rules.keys}, options.dropout_part);
        rules.first_number = numbers.first;
        std::copy_n(numbers.strides.begin(), 3, rules.number_strides);
        rules.lowest_kept = static_cast<std::uint32_t>(threshold);
        rules.kept_factor = drops_all ? C{0} : static_cast<C>(1.0 / (1.0 - options.dropout));
    }
    return rules;
}

/// The value to subtract from scores before exp: 0 where no key is visible, so that exp(-inf) gives weights of 0.
template <class C>
__device__ inline C shift_of(C largest_or_logsumexp) {
    return largest_or_logsumexp == -std::numeric_limits<C>::infinity() ? C{0} : largest_or_logsumexp;
}

/// The score of a hidden key: its weight is 0, whatever is subtracted.
template <class C>
__device__ inline bool is_hidden(C score) {
    return score == -std::numeric_limits<C>::infinity();
}

/// Which tile of which head a block processes: the tiles of a head are consecutive, as they read the same memory.
struct AttentionPlace {
    std::int64_t batch, head, tile;
};
__device__ inline AttentionPlace attention_place(std::int64_t block, std::int64_t heads, std::int64_t tiles) {
    const std::int64_t head = block / tiles;
    return {head / heads, head % heads, block % tiles};
}
/// The query tile to process, from last to first: under causality the last queries see the most keys.
__device__ inline std::int64_t query_tile(const AttentionPlace& place, std::int64_t tiles) {
    return tiles - 1 - place.tile;
}
inline std::int64_t tiles_of(std::int64_t count, std::int64_t tile) { return (count + tile - 1) / tile; }

template <class T>
struct AttentionForward {
    using C = compute_type<T>;
    AttentionRules<C> rules;
    AttentionOperand<T> q, k, v, y;
    C* logsumexp;  // (batch, heads, queries)
};

template <class T>
struct AttentionBackward {
    using C = compute_type<T>;
    AttentionRules<C> rules;
    AttentionOperand<T> q, k, v, dy, dq, dk, dv;
    AttentionOperand<T> dmask;  // no data: not needed
    const C* logsumexp;         // (batch, heads, queries)
    const C* dot;  // (batch, heads, queries): dy . y = sum over keys of weight * gradient of the weight
};

/// Largest head and value sizes of the tensor core kernels; plain kernels support all sizes.
inline constexpr std::int64_t largest_tensor_core_size = 256;

/// Launched by attention_by_kernels and attention_backward_by_kernels for T = __half and __nv_bfloat16. Scores are in
/// units of log2(e).
template <class T>
void attention_tensor_core(const AttentionForward<T>& arguments, cudaStream_t stream);
template <class T>
void attention_backward_tensor_core(const AttentionBackward<T>& arguments, cudaStream_t stream);

}  // namespace potluck::cuda
