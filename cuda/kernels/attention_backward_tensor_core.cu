#include <cstdint>
#include <numbers>

#include "cuda/kernels/attention_fragments.h"

// The gradients of attention of half types by tensor cores (the algorithm: attention_backward.cu). A block of 4 warps
// owns a tile of keys (for dk and dv) or of queries (for dq), 16 or 32 rows per warp. The other operand passes through
// shared memory in tiles that are copied asynchronously: the next tile is loaded while one is processed. The owned rows
// are the rows of the score tile, so the weights and gradients of a warp enter its sums directly from registers.

namespace potluck::cuda {
namespace {

template <int Size, bool General>
struct BackwardShape {
    static constexpr int fragments = Size <= (General ? 32 : 64) ? 2 : 1;  // per warp, each of 16 owned rows
    static constexpr int warp_rows = 16 * fragments;
    static constexpr int owned = fragment_warps * warp_rows;  // rows of a block
    static constexpr int passing = Size <= 128 ? 32 : 16;     // rows of a tile of the other side
    static constexpr int stages = Size <= 128 ? 2 : 1;        // of those tiles
    static constexpr int stride = tile_stride(Size);
    static constexpr int slice = Size <= 128 ? Size : 128;  // columns of dk and dv that fit into registers
    static constexpr std::size_t shared_halves =
        std::size_t{2} * static_cast<std::size_t>((owned + stages * passing) * stride);
};

/// Logsumexp (which is subtracted from scores) and dot for the queries of a tile.
template <int Queries>
struct QueryStatistics {
    float shift[Queries];
    float dot[Queries];
};

template <class T>
__device__ inline float query_shift(const AttentionBackward<T>& arguments, std::int64_t row) {
    return shift_of(arguments.logsumexp[row]) * std::numbers::log2e_v<float>;
}

/// How many of `count` keys, starting with first_key, a query sees.
__device__ inline int seen_of(const AttentionRules<float>& rules, std::int64_t query, std::int64_t first_key,
                              int count) {
    const std::int64_t seen = query < rules.queries ? rules.keys_seen_by(query) - first_key : 0;
    return seen < count ? static_cast<int>(seen) : count;
}

/// Converts one element: the product q . k to the weight after dropout (not yet scaled by kept_factor), and the product
/// dy . v to the gradient of the score.
template <bool General>
__device__ inline void to_gradient(const AttentionRules<float>& rules, const AttentionPlace& place,
                                   std::int64_t query, std::int64_t key, bool is_seen, float shift, float dot,
                                   float& weight, float& gradient) {
    if constexpr (General) {
        const float score = rules.score(weight, place.batch, place.head, query, key);
        const float before_dropout = is_hidden(score) ? 0.0F : fast_exp2(score - shift);
        const bool is_kept = !rules.has_dropout || rules.keeps(place.batch, place.head, query, key);
        weight = is_kept ? before_dropout : 0.0F;
        gradient = before_dropout * ((is_kept ? gradient * rules.kept_factor : 0.0F) - dot);
        if (is_hidden(score)) gradient = 0.0F;
    } else {
        weight = is_seen ? fast_exp2(weight * rules.scale - shift) : 0.0F;
        gradient = is_seen ? weight * (gradient - dot) : 0.0F;
    }
}

// Floor: 2 * queries * keys * 2 * (head_size + value_size) operations at the rate of the tensor cores, half of it when
// causal; q, k, v, dy read, dk and dv written once. Each tile of keys reads all its queries and their dy.
template <class T, int Size, bool General>
__global__ void __launch_bounds__(fragment_threads, 2)
    attention_dkv_tensor_core_kernel(const AttentionBackward<T> arguments, std::int64_t tiles) {
    using Shape = BackwardShape<Size, General>;
    using Statistics = QueryStatistics<Shape::passing>;
    constexpr int rows = Shape::fragments;
    constexpr int queries = Shape::passing;
    constexpr int slice_columns = Shape::slice / 8;
    const AttentionRules<float>& rules = arguments.rules;
    AttentionPlace place = attention_place(blockIdx.x, rules.kv_heads, tiles);
    const std::int64_t kv_head = place.head;
    const std::int64_t block_key = place.tile * Shape::owned;
    const std::int64_t first_key = block_key + warp_index() * Shape::warp_rows;
    const int first_column = static_cast<int>(blockIdx.y) * Shape::slice;

    T* k_tile = dynamic_shared_memory<T>();
    T* v_tile = k_tile + Shape::owned * Shape::stride;
    T* q_tiles = v_tile + Shape::owned * Shape::stride;
    T* dy_tiles = q_tiles + Shape::stages * queries * Shape::stride;
    __shared__ Statistics statistics[Shape::stages];
    T* k_rows = k_tile + warp_index() * Shape::warp_rows * Shape::stride;
    T* v_rows = v_tile + warp_index() * Shape::warp_rows * Shape::stride;

    // The steps go through the tiles of queries that see any of the keys, head by head.
    const std::int64_t first_step = rules.first_query_of(block_key) / queries * queries;
    struct Step {
        int head;
        std::int64_t query;
    };
    const auto after = [&](Step step) {
        const bool is_last = step.query + queries >= rules.queries;
        return is_last ? Step{step.head + 1, first_step} : Step{step.head, step.query + queries};
    };
    const int first_head = static_cast<int>(kv_head * rules.group);
    const int last_head = first_step < rules.queries ? first_head + static_cast<int>(rules.group) : 0;
    const auto load = [&](Step step, int stage) {
        load_tile<queries, Size>(arguments.q, arguments.q.head(place.batch, step.head), step.query,
                                 q_tiles + stage * queries * Shape::stride);
        load_tile<queries, Size>(arguments.dy, arguments.dy.head(place.batch, step.head), step.query,
                                 dy_tiles + stage * queries * Shape::stride);
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread >= queries) return;
        const bool is_inside = step.query + thread < rules.queries;
        const std::int64_t row = rules.row_index(place.batch, step.head, step.query + thread);
        statistics[stage].shift[thread] = is_inside ? query_shift(arguments, row) : 0.0F;
        statistics[stage].dot[thread] = is_inside ? arguments.dot[row] : 0.0F;
    };

    Fragments<rows, slice_columns> dk, dv;
    clear(dk);
    clear(dv);
    load_tile<Shape::owned, Size>(arguments.k, arguments.k.head(place.batch, kv_head), block_key, k_tile);
    load_tile<Shape::owned, Size>(arguments.v, arguments.v.head(place.batch, kv_head), block_key, v_tile);
    Step step{first_head, first_step};
    int stage = 0;
    if (step.head < last_head) load(step, stage);
    copy_async_commit();
    const std::int64_t first_query_of_warp = rules.first_query_of(first_key);
    while (step.head < last_head) {
        const Step next = after(step);
        if (Shape::stages > 1) {
            if (next.head < last_head) load(next, 1 - stage);
            copy_async_commit();
        }
        copy_async_wait<Shape::stages - 1>();
        __syncthreads();  // the tile of this step has arrived
        const std::int64_t first_query = step.query;
        // Warps whose keys are out of range, or are seen by none of the queries, only help to load.
        const bool is_active = first_key < rules.keys && first_query + queries > first_query_of_warp;
        T* q_tile = q_tiles + stage * queries * Shape::stride;
        T* dy_tile = dy_tiles + stage * queries * Shape::stride;
        Fragments<rows, queries / 8> weights, gradients;
        if (is_active) {
            place.head = step.head;
            const bool all_seen = first_key + Shape::warp_rows <= rules.keys_seen_by(first_query) &&
                                  first_query + queries <= rules.queries;
            multiply_rows<Size>(k_rows, q_tile, weights);
            multiply_rows<Size>(v_rows, dy_tile, gradients);
#pragma unroll
            for (int c = 0; c < queries / 8; ++c)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = 8 * c + fragment_column(i);
                    const std::int64_t query = first_query + column;
                    const int seen =
                        all_seen ? Shape::warp_rows : seen_of(rules, query, first_key, Shape::warp_rows);
                    const float shift = statistics[stage].shift[column];
                    const float dot = statistics[stage].dot[column];
#pragma unroll
                    for (int r = 0; r < rows; ++r)
#pragma unroll
                        for (int e = i; e < 4; e += 2) {
                            const int row = 16 * r + fragment_row(e);
                            to_gradient<General>(rules, place, query, first_key + row, row < seen, shift, dot,
                                                 weights[r][c][e], gradients[r][c][e]);
                        }
                }
        }
        // A superset of hides_any(): causality hides nothing from queries so far behind the first key.
        const bool may_hide = General || (rules.causal && first_query < first_step + queries + Shape::owned);
        const bool with_care = may_hide && __syncthreads_or(holds_non_finite<queries, Size>(q_tile) ||
                                                            holds_non_finite<queries, Size>(dy_tile)) != 0;
        if (with_care) {
            if (is_active) {
                accumulate_non_finite<Size>(weights, dy_tile + first_column, dv);
                accumulate_non_finite<Size>(gradients, q_tile + first_column, dk);
            }
            __syncthreads();
            clear_non_finite<queries, Size>(q_tile);
            clear_non_finite<queries, Size>(dy_tile);
            __syncthreads();
        }
        if (is_active) {
            accumulate_rows<Size>(weights, dy_tile + first_column, dv);
            accumulate_rows<Size>(gradients, q_tile + first_column, dk);
        }
        __syncthreads();  // nobody needs the tile any more
        if (Shape::stages == 1) {
            if (next.head < last_head) load(next, stage);
            copy_async_commit();
        }
        step = next;
        if (Shape::stages > 1) stage = 1 - stage;
    }
    copy_async_wait<0>();
    __syncthreads();  // the keys have arrived even where there was no query to wait for
    store_rows<Size>(dk, rules.gradient_scale, arguments.dk, arguments.dk.head(place.batch, kv_head),
                     first_key, first_column, k_rows);
    store_rows<Size>(dv, rules.kept_factor, arguments.dv, arguments.dv.head(place.batch, kv_head), first_key,
                     first_column, v_rows);
}

// Floor: 2 * queries * keys * (2 * head_size + value_size) operations at the rate of the tensor cores, half of it when
// causal; q, k, v, dy read and dq written once. Each tile of queries reads all its keys and values. dmask, where wanted, is
// written once.
template <class T, int Size, bool General>
__global__ void __launch_bounds__(fragment_threads, 2)
    attention_dq_tensor_core_kernel(const AttentionBackward<T> arguments, std::int64_t tiles) {
    using Shape = BackwardShape<Size, General>;
    constexpr int rows = Shape::fragments;
    constexpr int keys = Shape::passing;
    const AttentionRules<float>& rules = arguments.rules;
    const AttentionPlace place = attention_place(blockIdx.x, rules.heads, tiles);
    const std::int64_t kv_head = place.head / rules.group;
    const std::int64_t block_query = query_tile(place, tiles) * Shape::owned;
    const std::int64_t first_query = block_query + warp_index() * Shape::warp_rows;

    T* q_tile = dynamic_shared_memory<T>();
    T* dy_tile = q_tile + Shape::owned * Shape::stride;
    T* k_tiles = dy_tile + Shape::owned * Shape::stride;
    T* v_tiles = k_tiles + Shape::stages * keys * Shape::stride;
    T* q_rows = q_tile + warp_index() * Shape::warp_rows * Shape::stride;
    const T* dy_rows = dy_tile + warp_index() * Shape::warp_rows * Shape::stride;

    const T* k = arguments.k.head(place.batch, kv_head);
    const T* v = arguments.v.head(place.batch, kv_head);
    const auto load = [&](std::int64_t first_key, int stage) {
        load_tile<keys, Size>(arguments.k, k, first_key, k_tiles + stage * keys * Shape::stride);
        load_tile<keys, Size>(arguments.v, v, first_key, v_tiles + stage * keys * Shape::stride);
    };

    float shift[rows][2], dot[rows][2];
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const std::int64_t query = first_query + 16 * r + fragment_row(2 * h);
            const std::int64_t row = rules.row_index(place.batch, place.head, query);
            shift[r][h] = query < rules.queries ? query_shift(arguments, row) : 0.0F;
            dot[r][h] = query < rules.queries ? arguments.dot[row] : 0.0F;
        }
    Fragments<rows, Size / 8> dq;
    clear(dq);
    load_tile<Shape::owned, Size>(arguments.q, arguments.q.head(place.batch, place.head), block_query,
                                  q_tile);
    load_tile<Shape::owned, Size>(arguments.dy, arguments.dy.head(place.batch, place.head), block_query,
                                  dy_tile);
    const std::int64_t seen = rules.keys_seen_by_tile(block_query, Shape::owned);
    const std::int64_t seen_by_warp =
        first_query < rules.queries ? rules.keys_seen_by_tile(first_query, Shape::warp_rows) : 0;
    if (seen > 0) load(0, 0);
    copy_async_commit();
    int stage = 0;
    for (std::int64_t first_key = 0; first_key < seen; first_key += keys) {
        if (Shape::stages > 1) {
            if (first_key + keys < seen) load(first_key + keys, 1 - stage);
            copy_async_commit();
        }
        copy_async_wait<Shape::stages - 1>();
        __syncthreads();  // the tile of this step has arrived
        // Warps whose queries are out of range, or see none of the keys, only help to load.
        const bool is_active = first_key < seen_by_warp;
        T* k_tile = k_tiles + stage * keys * Shape::stride;
        Fragments<rows, keys / 8> weights, gradients;
        if (is_active) {
            const T* v_tile = v_tiles + stage * keys * Shape::stride;
            const bool all_seen = first_key + keys <= rules.keys_seen_by(first_query);
            multiply_rows<Size>(q_rows, k_tile, weights);
            multiply_rows<Size>(dy_rows, v_tile, gradients);
#pragma unroll
            for (int r = 0; r < rows; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const std::int64_t query = first_query + 16 * r + fragment_row(e);
                    const int seen_here = all_seen ? keys : seen_of(rules, query, first_key, keys);
#pragma unroll
                    for (int c = 0; c < keys / 8; ++c) {
                        const int column = 8 * c + fragment_column(e);
                        const std::int64_t key = first_key + column;
                        to_gradient<General>(rules, place, query, key, column < seen_here, shift[r][e / 2],
                                             dot[r][e / 2], weights[r][c][e], gradients[r][c][e]);
                        if constexpr (General)
                            if (arguments.dmask.data != nullptr && query < rules.queries && key < rules.keys)
                                arguments.dmask.head(place.batch,
                                                     place.head)[query * arguments.dmask.row_stride +
                                                                 key * arguments.dmask.column_stride] =
                                    from_compute<T>(gradients[r][c][e]);
                    }
                }
        }
        const bool with_care = rules.hides_any(block_query, first_key, keys) &&
                               __syncthreads_or(holds_non_finite<keys, Size>(k_tile)) != 0;
        if (with_care) {
            if (is_active) accumulate_non_finite<Size>(gradients, k_tile, dq);
            __syncthreads();
            clear_non_finite<keys, Size>(k_tile);
            __syncthreads();
        }
        if (is_active) accumulate_rows<Size>(gradients, k_tile, dq);
        __syncthreads();  // nobody needs the tile any more
        if (Shape::stages == 1) {
            if (first_key + keys < seen) load(first_key + keys, stage);
            copy_async_commit();
        }
        if (Shape::stages > 1) stage = 1 - stage;
    }
    copy_async_wait<0>();
    __syncthreads();  // the queries have arrived even where there was no key to wait for
    store_rows<Size>(dq, rules.gradient_scale, arguments.dq, arguments.dq.head(place.batch, place.head),
                     first_query, 0, q_rows);
}

template <class T, int Size, bool General>
void start(const AttentionBackward<T>& arguments, cudaStream_t stream) {
    using Shape = BackwardShape<Size, General>;
    const AttentionRules<float>& rules = arguments.rules;
    const std::size_t shared_bytes = Shape::shared_halves * sizeof(T);
    const std::int64_t key_tiles = tiles_of(rules.keys, Shape::owned);
    const std::int64_t query_tiles = tiles_of(rules.queries, Shape::owned);
    launch(attention_dkv_tensor_core_kernel<T, Size, General>,
           dim3(static_cast<unsigned>(key_tiles * rules.batch * rules.kv_heads),
                static_cast<unsigned>(Size / Shape::slice)),
           dim3(fragment_threads), shared_bytes, stream, arguments, key_tiles);
    launch(attention_dq_tensor_core_kernel<T, Size, General>,
           dim3(static_cast<unsigned>(query_tiles * rules.batch * rules.heads)), dim3(fragment_threads),
           shared_bytes, stream, arguments, query_tiles);
}

}  // namespace

template <class T>
void attention_backward_tensor_core(const AttentionBackward<T>& arguments, cudaStream_t stream) {
    visit_fragment_kernel(arguments,
                          [&](auto size, auto general) { start<T, size(), general()>(arguments, stream); });
}

template void attention_backward_tensor_core(const AttentionBackward<__half>&, cudaStream_t);
template void attention_backward_tensor_core(const AttentionBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace potluck::cuda
