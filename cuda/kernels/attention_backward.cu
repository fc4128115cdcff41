#include <cmath>
#include <cstdint>
#include <numbers>

#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_plain.h"
#include "cuda/kernels/attention_tiles.h"

// The gradients of attention. The weights of each tile are recomputed from the logsumexp of forward. With P the weights
// after the dropout factors f, and dot = dy . y:
//
//   dv = P^T dy        dP = dy v^T        dS = P (f dP - dot)        dk = scale dS^T q        dq = scale dS k
//
// First, one warp per query computes dot. Then a kernel whose blocks own tiles of keys computes dk and dv, going
// through the queries of all heads of the group in order, and a kernel whose blocks own tiles of queries computes dq
// (and dmask). Each sum belongs to one block, so there are no atomics and the same input gives the same bits; the cost
// is that scores and dP are computed twice.
//
// Half types with sizes up to 256 use the tensor cores (attention_backward_tensor_core.cu). Here: f32, f64 and every
// size; see attention_plain.h for the threads.

namespace potluck::cuda {
namespace {

constexpr int dot_threads = 256;

// Floor: y and dy read once.
template <class T>
__global__ void __launch_bounds__(dot_threads)
    attention_dot_kernel(const AttentionOperand<T> y, const AttentionOperand<T> dy, std::int64_t heads,
                         std::int64_t count, compute_type<T>* dot) {
    using C = compute_type<T>;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    for (std::int64_t row = global_thread() / warp_size; row < count; row += global_threads() / warp_size) {
        const std::int64_t head = row / y.rows;
        const std::int64_t query = row % y.rows;
        const T* y_row = y.head(head / heads, head % heads) + query * y.row_stride;
        const T* dy_row = dy.head(head / heads, head % heads) + query * dy.row_stride;
        C sum{0};
        for (std::int64_t column = lane; column < y.columns; column += warp_size)
            sum +=
                to_compute(y_row[column * y.column_stride]) * to_compute(dy_row[column * dy.column_stride]);
        sum = warp_sum(sum);
        if (lane == 0) dot[row] = sum;
    }
}

/// A thread's elements of a tile: weights after dropout, and gradients of the scores.
template <class C>
struct ScoreGradients {
    C weights[4][4], gradients[4][4];
};

template <class T, class C>
__device__ void score_gradients(const AttentionBackward<T>& arguments, std::int64_t batch, std::int64_t head,
                                std::int64_t first_query, std::int64_t first_key,
                                const PlainMemory<C>& memory, ScoreGradients<C>& tile) {
    const AttentionRules<C>& rules = arguments.rules;
    const std::int64_t kv_head = head / rules.group;
    plain_scores(arguments.q, arguments.q.head(batch, head), first_query, arguments.k,
                 arguments.k.head(batch, kv_head), first_key, memory, tile.weights);
    plain_scores(arguments.dy, arguments.dy.head(batch, head), first_query, arguments.v,
                 arguments.v.head(batch, kv_head), first_key, memory, tile.gradients);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const std::int64_t query = first_query + 4 * plain_y() + i;
        const bool is_inside = query < rules.queries;
        const std::int64_t row = rules.row_index(batch, head, query);
        const C shift = is_inside ? shift_of(arguments.logsumexp[row]) : C{0};
        const C dot = is_inside ? arguments.dot[row] : C{0};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const std::int64_t key = first_key + plain_x() + 16 * j;
            const C score = rules.score(tile.weights[i][j], batch, head, query, key);
            // A hidden weight is 0 whatever its key, its value, or the statistics of the query contain.
            const C weight = is_hidden(score) ? C{0} : std::exp(score - shift);
            const C factor = rules.has_dropout ? rules.dropout_factor(batch, head, query, key) : C{1};
            const C passed = factor == C{0} ? C{0} : tile.gradients[i][j] * factor;
            tile.weights[i][j] = weight * factor;
            tile.gradients[i][j] = is_hidden(score) ? C{0} : weight * (passed - dot);
        }
    }
}

// Floor: 2 * queries * keys * 2 * (head_size + value_size) operations, half of it when causal; q, k, v, dy read, dk and dv
// written once. Each tile of keys reads all its queries and their dy.
template <class T>
__global__ void __launch_bounds__(plain_threads, 1)
    attention_dkv_kernel(const AttentionBackward<T> arguments, std::int64_t tiles) {
    using C = compute_type<T>;
    const AttentionRules<C>& rules = arguments.rules;
    const PlainMemory<C> memory = plain_memory<C>();
    const AttentionPlace place = attention_place(blockIdx.x, rules.kv_heads, tiles);
    const std::int64_t batch = place.batch, kv_head = place.head;
    const std::int64_t first_key = place.tile * plain_tile;
    const std::int64_t column = std::int64_t{blockIdx.y} * PlainShape<C>::slice;

    PlainSums<C> dk, dv;
    dk.clear();
    dv.clear();
    const std::int64_t first_seen = rules.first_query_of(first_key) / plain_tile * plain_tile;
    for (std::int64_t head = kv_head * rules.group; head < (kv_head + 1) * rules.group; ++head)
        for (std::int64_t query = first_seen; query < rules.queries; query += plain_tile) {
            ScoreGradients<C> scores;
            score_gradients(arguments, batch, head, query, first_key, memory, scores);
            const bool hides_any = rules.hides_any(query, first_key, plain_tile);
            store_weights(scores.weights, memory);
            plain_accumulate<true>(arguments.dy, arguments.dy.head(batch, head), query, column, hides_any,
                                   memory, dv);
            store_weights(scores.gradients, memory);
            plain_accumulate<true>(arguments.q, arguments.q.head(batch, head), query, column, hides_any,
                                   memory, dk);
        }
    store_plain(dk, rules.gradient_scale, arguments.dk, arguments.dk.head(batch, kv_head), first_key, column);
    store_plain(dv, C{1}, arguments.dv, arguments.dv.head(batch, kv_head), first_key, column);
}

// Floor: 2 * queries * keys * (2 * head_size + value_size) operations, half of it when causal; q, k, v, dy read and dq
// written once. Each tile of queries reads all its keys and values. dmask, where wanted, is written once.
template <class T>
__global__ void __launch_bounds__(plain_threads, 1)
    attention_dq_kernel(const AttentionBackward<T> arguments, std::int64_t tiles) {
    using C = compute_type<T>;
    const AttentionRules<C>& rules = arguments.rules;
    const PlainMemory<C> memory = plain_memory<C>();
    const AttentionPlace place = attention_place(blockIdx.x, rules.heads, tiles);
    const std::int64_t batch = place.batch, head = place.head;
    const std::int64_t first_query = query_tile(place, tiles) * plain_tile;
    const std::int64_t column = std::int64_t{blockIdx.y} * PlainShape<C>::slice;
    const T* k = arguments.k.head(batch, head / rules.group);

    PlainSums<C> dq;
    dq.clear();
    const std::int64_t seen = rules.keys_seen_by_tile(first_query, plain_tile);
    for (std::int64_t first_key = 0; first_key < seen; first_key += plain_tile) {
        ScoreGradients<C> scores;
        score_gradients(arguments, batch, head, first_query, first_key, memory, scores);
        store_weights(scores.gradients, memory);
        plain_accumulate<false>(arguments.k, k, first_key, column,
                                rules.hides_any(first_query, first_key, plain_tile), memory, dq);
        if (arguments.dmask.data == nullptr || blockIdx.y != 0) continue;
        T* dmask = arguments.dmask.head(batch, head);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const std::int64_t query = first_query + 4 * plain_y() + i;
                const std::int64_t key = first_key + plain_x() + 16 * j;
                if (query < rules.queries && key < rules.keys)
                    dmask[query * arguments.dmask.row_stride + key * arguments.dmask.column_stride] =
                        from_compute<T>(scores.gradients[i][j]);
            }
    }
    store_plain(dq, rules.gradient_scale, arguments.dq, arguments.dq.head(batch, head), first_query, column);
}

template <class T>
void attention_backward_plain(const AttentionBackward<T>& arguments, cudaStream_t stream) {
    using C = compute_type<T>;
    const AttentionRules<C>& rules = arguments.rules;
    const auto slices_of = [](std::int64_t columns) {
        return static_cast<unsigned>(std::max<std::int64_t>(1, tiles_of(columns, PlainShape<C>::slice)));
    };
    const std::int64_t key_tiles = tiles_of(rules.keys, plain_tile);
    const std::int64_t query_tiles = tiles_of(rules.queries, plain_tile);
    launch(attention_dkv_kernel<T>,
           dim3(static_cast<unsigned>(key_tiles * rules.batch * rules.kv_heads),
                slices_of(std::max(arguments.dk.columns, arguments.dv.columns))),
           dim3(plain_threads), PlainShape<C>::shared_bytes, stream, arguments, key_tiles);
    launch(
        attention_dq_kernel<T>,
        dim3(static_cast<unsigned>(query_tiles * rules.batch * rules.heads), slices_of(arguments.dq.columns)),
        dim3(plain_threads), PlainShape<C>::shared_bytes, stream, arguments, query_tiles);
}

}  // namespace

void attention_backward_by_kernels(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& mask_or_none, const Tensor& y, const Tensor& logsumexp,
                                   const Tensor& dy, const AttentionSpec& options, Tensor& dq, Tensor& dk,
                                   Tensor& dv, Tensor& dmask_or_none, const std::uint64_t* random_advance,
                                   cudaStream_t stream) {
    const bool fits_tensor_cores = std::max(q.size(3), v.size(3)) <= largest_tensor_core_size;
    const Tensor dot = Tensor::empty(logsumexp.shape(), {logsumexp.dtype(), logsumexp.device()});
    visit_device_floating(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = compute_type<T>;
        launch(attention_dot_kernel<T>, dim3(blocks_for(dot.count(), dot_threads / warp_size)),
               dim3(dot_threads), 0, stream, AttentionOperand<T>(y), AttentionOperand<T>(dy), q.size(1),
               dot.count(), elements_of<C>(dot));
        const bool by_tensor_cores = is_half<T> && fits_tensor_cores;
        const double unit = by_tensor_cores ? std::numbers::log2e : 1.0;
        const AttentionBackward<T> arguments{
            attention_rules<C>(q, k, mask_or_none, options, random_advance, unit),
            AttentionOperand<T>(q),
            AttentionOperand<T>(k),
            AttentionOperand<T>(v),
            AttentionOperand<T>(dy),
            AttentionOperand<T>(dq),
            AttentionOperand<T>(dk),
            AttentionOperand<T>(dv),
            dmask_or_none.defined() ? AttentionOperand<T>(dmask_or_none) : AttentionOperand<T>(),
            elements_of<const C>(logsumexp),
            elements_of<const C>(dot)};
        if constexpr (is_half<T>)
            if (by_tensor_cores) return attention_backward_tensor_core(arguments, stream);
        attention_backward_plain(arguments, stream);
    });
}

}  // namespace potluck::cuda
