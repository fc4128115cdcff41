#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "cuda/kernels/attention_fragments.h"

// Forward attention of half types by tensor cores (the algorithm: attention.cu). A block of 4 warps owns 64 or 128
// queries, 16 or 32 per warp. The tiles of keys and values pass through shared memory, copied asynchronously: the
// values are loaded while the scores are computed, and the next keys while the weights are multiplied by the values.
// The weights stay in registers: the C fragments of the scores, rounded, are the A fragments of the second product.

namespace potluck::cuda {
namespace {

template <int Size, bool General>
struct ForwardShape {
    static constexpr int fragments = Size <= (General ? 32 : 128) ? 2 : 1;  // per warp, each of 16 queries
    static constexpr int warp_queries = 16 * fragments;
    static constexpr int queries = fragment_warps * warp_queries;
    static constexpr int keys = Size <= (General ? 32 : 64) ? 64 : 32;
    static constexpr std::size_t shared_halves =
        std::size_t{queries + 2 * keys} * static_cast<std::size_t>(tile_stride(Size));
};

/// The running state of each query. A lane holds two rows of each fragment, and for the total the part of its own
/// columns.
template <int Fragments_>
struct RunningSoftmax {
    float largest[Fragments_][2];
    float total[Fragments_][2];
};

/// Converts products to scores, in place. General: with mask and dropout.
template <bool General, int Rows, int Columns>
__device__ inline void to_scores(const AttentionRules<float>& rules, const AttentionPlace& place,
                                 std::int64_t first_query, std::int64_t first_key,
                                 Fragments<Rows, Columns>& scores) {
    const bool all_seen = first_key + 8 * Columns <= rules.keys_seen_by(first_query);
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const std::int64_t query = first_query + 16 * r + fragment_row(2 * h);
            const std::int64_t seen = rules.keys_seen_by(query) - first_key;
#pragma unroll
            for (int c = 0; c < Columns; ++c)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    const int column = 8 * c + fragment_column(e);
                    float& score = scores[r][c][e];
                    if constexpr (General)
                        score = rules.score(score, place.batch, place.head, query, first_key + column);
                    else
                        score = all_seen || column < seen ? score * rules.scale
                                                          : -std::numeric_limits<float>::infinity();
                }
        }
}

// Floor: 2 * queries * keys * (head_size + value_size) operations (half of it when causal) at the rate of the tensor
// cores, and one exponential for each score; q, k, v read and y written once. Each tile of queries reads all its keys and
// values, mostly from the L2 cache.
template <class T, int Size, bool General>
__global__ void __launch_bounds__(fragment_threads)
    attention_tensor_core_kernel(const AttentionForward<T> arguments, std::int64_t tiles) {
    using Shape = ForwardShape<Size, General>;
    constexpr int rows = Shape::fragments;
    constexpr int score_columns = Shape::keys / 8;
    constexpr int value_columns = Size / 8;
    const AttentionRules<float>& rules = arguments.rules;
    const AttentionPlace place = attention_place(blockIdx.x, rules.heads, tiles);
    const std::int64_t kv_head = place.head / rules.group;
    const std::int64_t block_query = query_tile(place, tiles) * Shape::queries;
    const std::int64_t first_query = block_query + warp_index() * Shape::warp_queries;

    T* q_tile = dynamic_shared_memory<T>();
    T* k_tile = q_tile + Shape::queries * tile_stride(Size);
    T* v_tile = k_tile + Shape::keys * tile_stride(Size);
    T* q_rows = q_tile + warp_index() * Shape::warp_queries * tile_stride(Size);
    const T* k = arguments.k.head(place.batch, kv_head);
    const T* v = arguments.v.head(place.batch, kv_head);

    Fragments<rows, value_columns> output;
    clear(output);
    RunningSoftmax<rows> softmax;
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            softmax.largest[r][h] = -std::numeric_limits<float>::infinity();
            softmax.total[r][h] = 0.0F;
        }

    const std::int64_t seen = rules.keys_seen_by_tile(block_query, Shape::queries);
    // Warps whose queries are out of range, or see no key of the tile, only help to load.
    const std::int64_t seen_by_warp =
        first_query < rules.queries ? rules.keys_seen_by_tile(first_query, Shape::warp_queries) : 0;
    load_tile<Shape::queries, Size>(arguments.q, arguments.q.head(place.batch, place.head), block_query,
                                    q_tile);
    if (seen > 0) load_tile<Shape::keys, Size>(arguments.k, k, 0, k_tile);
    copy_async_commit();
    for (std::int64_t first_key = 0; first_key < seen; first_key += Shape::keys) {
        copy_async_wait<0>();
        __syncthreads();  // the keys have arrived, and nobody needs the last values any more
        load_tile<Shape::keys, Size>(arguments.v, v, first_key, v_tile);
        copy_async_commit();
        const bool is_active = first_key < seen_by_warp;
        Fragments<rows, score_columns> scores;
        if (is_active) multiply_rows<Size>(q_rows, k_tile, scores);
        copy_async_wait<0>();
        __syncthreads();  // the values have arrived, and nobody needs the keys any more
        if (first_key + Shape::keys < seen)
            load_tile<Shape::keys, Size>(arguments.k, k, first_key + Shape::keys, k_tile);
        copy_async_commit();
        // Where the tile may hide keys (a superset of hides_any(): causality hides no key before the last one that the
        // first query sees) the block looks for non-finite values, sooner or later depending on the available
        // registers.
        const auto finds_non_finite = [&] {
            return __syncthreads_or(holds_non_finite<Shape::keys, Size>(v_tile)) != 0;
        };
        const bool may_hide = General || (rules.causal && first_key + Shape::keys + Shape::queries > seen);
        const bool found_early = General && finds_non_finite();
        if (is_active) {
            to_scores<General>(rules, place, first_query, first_key, scores);
#pragma unroll
            for (int r = 0; r < rows; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float largest = softmax.largest[r][h];
#pragma unroll
                    for (int c = 0; c < score_columns; ++c)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; ++e)
                            largest =
                                fmaxf(largest, scores[r][c][e]);  // skips NaN, which shows up in the total
                    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
                    const float shift = shift_of(largest);
                    const float correction =
                        largest == softmax.largest[r][h] ? 1.0F : fast_exp2(softmax.largest[r][h] - shift);
                    softmax.largest[r][h] = largest;
                    float total = softmax.total[r][h] * correction;
#pragma unroll
                    for (int c = 0; c < score_columns; ++c)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; ++e) {
                            float& weight = scores[r][c][e];
                            weight = fast_exp2(weight - shift);
                            total += weight;
                        }
                    softmax.total[r][h] = total;
#pragma unroll
                    for (int c = 0; c < value_columns; ++c)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; ++e) output[r][c][e] *= correction;
                    if (General && rules.has_dropout) {
                        const std::int64_t query = first_query + 16 * r + fragment_row(2 * h);
#pragma unroll
                        for (int c = 0; c < score_columns; ++c)
#pragma unroll
                            for (int e = 2 * h; e < 2 * h + 2; ++e)
                                if (!rules.keeps(place.batch, place.head, query,
                                                 first_key + 8 * c + fragment_column(e)))
                                    scores[r][c][e] = 0.0F;
                    }
                }
        }
        const bool with_care = General ? found_early : may_hide && finds_non_finite();
        if (with_care) {
            if (is_active) accumulate_non_finite<Size>(scores, v_tile, output);
            __syncthreads();
            clear_non_finite<Shape::keys, Size>(v_tile);
            __syncthreads();
        }
        if (is_active) accumulate_rows<Size>(scores, v_tile, output);
    }
    copy_async_wait<0>();

#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = softmax.total[r][h];
            total += __shfl_xor_sync(all_lanes, total, 1);
            total += __shfl_xor_sync(all_lanes, total, 2);
            const bool sees_none = total == 0.0F;
            // Dropout's scaling is applied here, so that a weight of 1 is still exactly 1 when it is rounded.
            const float factor = sees_none ? 0.0F : rules.kept_factor / total;
#pragma unroll
            for (int c = 0; c < value_columns; ++c)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) output[r][c][e] *= factor;
            const std::int64_t query = first_query + 16 * r + fragment_row(2 * h);
            if (lane_index() % 4 == 0 && query < rules.queries)
                arguments.logsumexp[rules.row_index(place.batch, place.head, query)] =
                    sees_none ? -std::numeric_limits<float>::infinity()
                              : shift_of(softmax.largest[r][h]) * std::numbers::ln2_v<float> + logf(total);
        }
    __syncthreads();  // the queries have arrived even where there was no key to wait for
    store_rows<Size>(output, 1.0F, arguments.y, arguments.y.head(place.batch, place.head), first_query, 0,
                     q_rows);
}

template <class T, int Size, bool General>
void start(const AttentionForward<T>& arguments, cudaStream_t stream) {
    using Shape = ForwardShape<Size, General>;
    const std::int64_t tiles = tiles_of(arguments.rules.queries, Shape::queries);
    launch(attention_tensor_core_kernel<T, Size, General>,
           dim3(static_cast<unsigned>(tiles * arguments.rules.batch * arguments.rules.heads)),
           dim3(fragment_threads), Shape::shared_halves * sizeof(T), stream, arguments, tiles);
}

}  // namespace

template <class T>
void attention_tensor_core(const AttentionForward<T>& arguments, cudaStream_t stream) {
    visit_fragment_kernel(arguments,
                          [&](auto size, auto general) { start<T, size(), general()>(arguments, stream); });
}

template void attention_tensor_core(const AttentionForward<__half>&, cudaStream_t);
template void attention_tensor_core(const AttentionForward<__nv_bfloat16>&, cudaStream_t);

}  // namespace potluck::cuda
