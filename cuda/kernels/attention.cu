#include <cmath>
#include <limits>
#include <numbers>

#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_plain.h"
#include "cuda/kernels/attention_tiles.h"

// Attention in tiles (Dao, "FlashAttention-2", 2023, arXiv:2307.08691): a block owns a tile of queries and iterates
// over the keys. The scores of a tile stay in registers and are never stored. Each query keeps a running maximum and
// sum of exponentials, and rescales its sums when a larger score appears; their logarithm (logsumexp) is saved for
// backward.
//
// Half types with sizes up to 256 use the tensor cores (attention_tensor_core.cu). Here: the kernel for f32, f64 and
// every size. A block has 64 queries and one slice of value columns; see attention_plain.h for the threads.

namespace potluck::cuda {
namespace {

// Floor: 2 * queries * keys * (head_size + value_size) operations (half of it when causal); q, k, v read and y written
// once. Each tile of queries reads all its keys and values, mostly from the L2 cache; each further slice of value columns
// computes the scores again.
template <class T>
__global__ void __launch_bounds__(plain_threads, 1)
    attention_kernel(const AttentionForward<T> arguments, std::int64_t tiles) {
    using C = compute_type<T>;
    const AttentionRules<C>& rules = arguments.rules;
    const PlainMemory<C> memory = plain_memory<C>();
    const AttentionPlace place = attention_place(blockIdx.x, rules.heads, tiles);
    const std::int64_t batch = place.batch, head = place.head, kv_head = head / rules.group;
    const std::int64_t first_query = query_tile(place, tiles) * plain_tile;
    const std::int64_t column = std::int64_t{blockIdx.y} * PlainShape<C>::slice;
    const T* q = arguments.q.head(batch, head);
    const T* k = arguments.k.head(batch, kv_head);
    const T* v = arguments.v.head(batch, kv_head);

    PlainSums<C> output;
    output.clear();
    C largest[4], total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        largest[i] = -std::numeric_limits<C>::infinity();
        total[i] = C{0};
    }
    const std::int64_t seen = rules.keys_seen_by_tile(first_query, plain_tile);
    for (std::int64_t first_key = 0; first_key < seen; first_key += plain_tile) {
        C scores[4][4];
        plain_scores(arguments.q, q, first_query, arguments.k, k, first_key, memory, scores);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::int64_t query = first_query + 4 * plain_y() + i;
            C tile_largest = largest[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                scores[i][j] = rules.score(scores[i][j], batch, head, query, first_key + plain_x() + 16 * j);
                // NaN fails every comparison: it shows up in the sum of exponentials.
                if (scores[i][j] > tile_largest) tile_largest = scores[i][j];
            }
            for (int distance = 8; distance > 0; distance /= 2) {
                const C other = __shfl_xor_sync(all_lanes, tile_largest, distance);
                if (other > tile_largest) tile_largest = other;
            }
            const C shift = shift_of(tile_largest);
            const C correction =
                tile_largest == largest[i] ? C{1} : static_cast<C>(std::exp(largest[i] - shift));
            largest[i] = tile_largest;
            total[i] *= correction;  // each lane sums its own columns
            output.scale_row(i, correction);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const C weight = std::exp(scores[i][j] - shift);
                total[i] += weight;
                scores[i][j] =
                    !rules.has_dropout
                        ? weight
                        : weight * rules.dropout_factor(batch, head, query, first_key + plain_x() + 16 * j);
            }
        }
        store_weights(scores, memory);
        plain_accumulate<false>(arguments.v, v, first_key, column,
                                rules.hides_any(first_query, first_key, plain_tile), memory, output);
    }

#pragma unroll
    for (int i = 0; i < 4; ++i) {
        for (int distance = 8; distance > 0; distance /= 2)
            total[i] += __shfl_xor_sync(all_lanes, total[i], distance);
        const bool sees_none = total[i] == C{0};
        output.scale_row(i, sees_none ? C{0} : C{1} / total[i]);
        const std::int64_t query = first_query + 4 * plain_y() + i;
        if (query < rules.queries && plain_x() == 0 && blockIdx.y == 0)
            arguments.logsumexp[rules.row_index(batch, head, query)] =
                sees_none ? -std::numeric_limits<C>::infinity()
                          : shift_of(largest[i]) + static_cast<C>(std::log(total[i]));
    }
    store_plain(output, C{1}, arguments.y, arguments.y.head(batch, head), first_query, column);
}

}  // namespace

void attention_by_kernels(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                          const AttentionSpec& options, Tensor& y, Tensor& logsumexp,
                          const std::uint64_t* random_advance, cudaStream_t stream) {
    const bool fits_tensor_cores = std::max(q.size(3), v.size(3)) <= largest_tensor_core_size;
    visit_device_floating(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = compute_type<T>;
        const bool by_tensor_cores = is_half<T> && fits_tensor_cores;
        const double unit = by_tensor_cores ? std::numbers::log2e : 1.0;
        const AttentionForward<T> arguments{
            attention_rules<C>(q, k, mask_or_none, options, random_advance, unit),
            AttentionOperand<T>(q),
            AttentionOperand<T>(k),
            AttentionOperand<T>(v),
            AttentionOperand<T>(y),
            elements_of<C>(logsumexp)};
        if constexpr (is_half<T>)
            if (by_tensor_cores) return attention_tensor_core(arguments, stream);
        const std::int64_t tiles = tiles_of(q.size(2), plain_tile);
        const auto slices = std::max<std::int64_t>(1, tiles_of(v.size(3), PlainShape<C>::slice));
        launch(attention_kernel<T>,
               dim3(static_cast<unsigned>(tiles * q.size(0) * q.size(1)), static_cast<unsigned>(slices)),
               dim3(plain_threads), PlainShape<C>::shared_bytes, stream, arguments, tiles);
    });
}

}  // namespace potluck::cuda
