#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu/attention_tiles.h"
#include "core/cpu/copy.h"
#include "core/cpu/rows.h"
#include "core/cpu/vector_math.h"
#include "core/kernel_specs.h"

// Attention in tiles of 64 queries x 64 keys (Dao et al., "FlashAttention", 2022): the scores of a tile stay in the
// cache and are never written to memory. Forward keeps a running maximum and sum of exponentials for each query, and
// rescales its sums when a larger score appears; it saves their logarithm (logsumexp), from which backward recomputes
// the weights of any tile.

namespace potluck::cpu {
namespace {

/// The value to subtract from scores before exp: 0 where no key is visible, so that exp(-inf) gives weights of 0.
template <class T>
T shift_of(T largest_or_logsumexp) {
    return largest_or_logsumexp == -infinity<T> ? T{0} : largest_or_logsumexp;
}

template <class T>
T largest_in_tile_row(const T* scores, std::int64_t width) {
    const T largest = fold_row(scores, width, [](auto a, auto b) { return a > b ? a : b; });
    // NaN fails every comparison: it shows up in the sum of exponentials.
    return largest == largest ? largest : -infinity<T>;
}

template <class T>
T sum_of_tile_row(const T* weights, std::int64_t width) {
    return fold_row(weights, width, [](auto a, auto b) { return a + b; });
}

// ---- forward ----

/// The running state of one tile of queries while it goes through the keys.
template <class T>
struct ForwardState {
    QueryTile tile;
    T* q;        // (rows, head_width), scaled
    T* output;   // (rows, value_width), the weighted sum so far
    T* largest;  // (rows)
    T* total;    // (rows), the sum of exponentials so far
};

/// Processes the keys of one tile.
template <class T>
void attend(const AttentionTiles<T>& tiles, const ForwardState<T>& state, KeyTile keys, const T* k_transposed,
            FactorTile<T>& v, T* scores, T* dropout) {
    const std::int64_t width = padded<T>(keys.count);
    tiles.scores(state.tile, keys, state.q, k_transposed, scores);
    if (dropout != nullptr) tiles.dropout_factors(state.tile, keys, dropout);
    for (std::int64_t i = 0; i < state.tile.count; ++i) {
        T* weights = scores + i * tile_keys;
        const T largest = std::max(state.largest[i], largest_in_tile_row(weights, width));
        const T shift = shift_of(largest);
        for (std::int64_t j = 0; j < width; ++j) weights[j] = exponential_weight(weights[j] - shift);
        const T correction = largest == state.largest[i] ? T{1} : std::exp(state.largest[i] - shift);
        state.total[i] = state.total[i] * correction + sum_of_tile_row(weights, width);
        state.largest[i] = largest;
        if (correction != T{1})
            for (std::int64_t j = 0; j < tiles.value_width; ++j)
                state.output[i * tiles.value_width + j] *= correction;
        if (dropout != nullptr)
            for (std::int64_t j = 0; j < width; ++j) weights[j] *= dropout[i * tile_keys + j];
    }
    v.add_product(state.tile.count, {scores, tile_keys, 1}, tiles.hides_any(state.tile, keys), state.output,
                  tiles.value_width);
}

/// Processes one kv head and a few tiles of queries of the heads that share it.
template <class T>
void attention_forward(const AttentionTiles<T>& tiles, const Tensor& q, const Tensor& k, const Tensor& v,
                       std::int64_t batch, std::int64_t kv_head, std::int64_t first_tile,
                       std::int64_t last_tile, Tensor& y, T* logsumexp) {
    const std::int64_t count = last_tile - first_tile;
    TileBuffer<T> q_buffer(count * tile_queries * tiles.head_width);
    TileBuffer<T> output(count * tile_queries * tiles.value_width, true);
    std::vector<T> largest(static_cast<std::size_t>(count * tile_queries), -infinity<T>);
    std::vector<T> total(static_cast<std::size_t>(count * tile_queries), T{0});
    std::vector<ForwardState<T>> states;
    for (std::int64_t t = 0; t < count; ++t) {
        const QueryTile tile = tiles.query_tile(batch, kv_head, first_tile + t);
        ForwardState<T> state{tile, q_buffer.data() + t * tile_queries * tiles.head_width,
                              output.data() + t * tile_queries * tiles.value_width,
                              largest.data() + t * tile_queries, total.data() + t * tile_queries};
        load_tile(q, batch, tile.head, tile.first, tile.count, state.q, tiles.head_width);
        scale_tile(state.q, tile.count * tiles.head_width, tiles.scale);
        states.push_back(state);
    }

    TileBuffer<T> k_buffer(tile_keys * tiles.head_width);
    TileBuffer<T> k_transposed(tiles.sizes.head_size * tile_keys);
    TileBuffer<T> v_buffer(tile_keys * tiles.value_width);
    TileBuffer<T> scores(tile_queries * tile_keys);
    TileBuffer<T> dropout(tiles.has_dropout() ? tile_queries * tile_keys : 0);
    for (std::int64_t first = 0; first < tiles.sizes.keys; first += tile_keys) {
        const KeyTile keys = tiles.key_tile(first);
        if (std::none_of(states.begin(), states.end(),
                         [&](const ForwardState<T>& state) { return tiles.sees_any(state.tile, keys); }))
            continue;
        const TileView<T> k_tile =
            view_or_load(k, batch, kv_head, keys.first, keys.count, k_buffer.data(), tiles.head_width);
        transpose_tile(k_tile, keys.count, tiles.sizes.head_size, k_transposed.data());
        FactorTile<T> v_tile(
            view_or_load(v, batch, kv_head, keys.first, keys.count, v_buffer.data(), tiles.value_width),
            keys.count, tiles.value_width);
        for (const ForwardState<T>& state : states)
            if (tiles.sees_any(state.tile, keys))
                attend(tiles, state, keys, k_transposed.data(), v_tile, scores.data(),
                       tiles.has_dropout() ? dropout.data() : nullptr);
    }

    for (const ForwardState<T>& state : states) {
        for (std::int64_t i = 0; i < state.tile.count; ++i) {
            const bool sees_none = state.total[i] == 0;
            T* row = state.output + i * tiles.value_width;
            const T factor = sees_none ? T{0} : T{1} / state.total[i];
            for (std::int64_t j = 0; j < tiles.value_width; ++j) row[j] *= factor;
            logsumexp[tiles.row_index(state.tile, i)] =
                sees_none ? -infinity<T> : shift_of(state.largest[i]) + std::log(state.total[i]);
        }
        store_tile(state.output, tiles.value_width, y, batch, state.tile.head, state.tile.first,
                   state.tile.count);
    }
}

// ---- backward ----

/// Which gradients a task computes, and for which keys and queries of one kv head.
struct BackwardTask {
    std::int64_t batch, kv_head;
    std::int64_t first_tile, last_tile;  // of queries
    std::int64_t first_key, last_key;    // first_key is a multiple of tile_keys; all keys when dq is wanted
    bool wants_dq, wants_dkv;
};

struct BackwardTensors {
    const Tensor &q, &k, &v, &y, &logsumexp, &dy;
    Tensor &dq, &dk, &dv, &dmask;
};

/// The keys of a task: loaded once, used by every tile of queries.
template <class T>
struct BackwardKeys {
    BackwardKeys(const AttentionTiles<T>& tiles, const BackwardTask& task, const BackwardTensors& tensors)
        : head_size(tiles.sizes.head_size), value_size(tiles.sizes.value_size) {
        const std::int64_t count = task.last_key - task.first_key;
        const std::int64_t rows = (count + tile_keys - 1) / tile_keys * tile_keys;
        k_rows = TileBuffer<T>(task.wants_dq ? rows * tiles.head_width : 0);
        k_transposed = TileBuffer<T>(rows * head_size);
        v_transposed = TileBuffer<T>(rows * value_size);
        dk = TileBuffer<T>(task.wants_dkv ? rows * tiles.head_width : 0, true);
        dv = TileBuffer<T>(task.wants_dkv ? rows * tiles.value_width : 0, true);
        TileBuffer<T> buffer(tile_keys * std::max(tiles.head_width, tiles.value_width));
        for (std::int64_t first = 0; first < count; first += tile_keys) {
            const KeyTile keys = tiles.key_tile(task.first_key + first);
            T* k_buffer = task.wants_dq ? k_rows.data() + first * tiles.head_width : buffer.data();
            const TileView<T> k = view_or_load(tensors.k, task.batch, task.kv_head, keys.first, keys.count,
                                               k_buffer, tiles.head_width);
            k_tiles.emplace_back(k, keys.count, tiles.head_width);
            transpose_tile(k, keys.count, head_size, k_transposed.data() + first * head_size);
            const TileView<T> v = view_or_load(tensors.v, task.batch, task.kv_head, keys.first, keys.count,
                                               buffer.data(), tiles.value_width);
            transpose_tile(v, keys.count, value_size, v_transposed.data() + first * value_size);
        }
    }

    std::int64_t head_size, value_size;
    std::vector<FactorTile<T>> k_tiles;
    TileBuffer<T> k_rows, k_transposed, v_transposed;
    TileBuffer<T> dk, dv;  // (keys, width)
};

/// The state of one tile of queries in backward.
template <class T>
struct BackwardQueries {
    explicit BackwardQueries(const AttentionTiles<T>& tiles)
        : q(tile_queries * tiles.head_width),
          dq(tile_queries * tiles.head_width),
          y(tile_queries * tiles.value_width),
          dy_buffer(tile_queries * tiles.value_width),
          shift(static_cast<std::size_t>(tile_queries)),
          dot(static_cast<std::size_t>(tile_queries)) {}

    void load(const AttentionTiles<T>& tiles, QueryTile which, const BackwardTensors& tensors) {
        tile = which;
        load_tile(tensors.q, tile.batch, tile.head, tile.first, tile.count, q.data(), tiles.head_width);
        scale_tile(q.data(), tile.count * tiles.head_width, tiles.scale);
        dy = view_or_load(tensors.dy, tile.batch, tile.head, tile.first, tile.count, dy_buffer.data(),
                          tiles.value_width);
        const TileView<T> output = view_or_load(tensors.y, tile.batch, tile.head, tile.first, tile.count,
                                                y.data(), tiles.value_width);
        q_tile = FactorTile<T>({q.data(), tiles.head_width}, tile.count, tiles.head_width);
        dy_tile = FactorTile<T>(dy, tile.count, tiles.value_width);
        const T* logsumexp = tensors.logsumexp.data<T>();
        for (std::int64_t i = 0; i < tile.count; ++i) {
            const auto row = static_cast<std::size_t>(i);
            shift[row] = shift_of(logsumexp[tiles.row_index(tile, i)]);
            const T* dy_row = dy.data + i * dy.width;
            const T* y_row = output.data + i * output.width;
            dot[row] = static_cast<T>(
                sum_of<T>(tiles.sizes.value_size, [&](std::int64_t j) { return dy_row[j] * y_row[j]; }));
        }
        std::fill_n(dq.data(), tile.count * tiles.head_width, T{0});
    }

    QueryTile tile{};
    TileBuffer<T> q, dq, y, dy_buffer;
    TileView<T> dy{};
    FactorTile<T> q_tile, dy_tile;
    std::vector<T> shift;  // logsumexp
    std::vector<T> dot;    // dy . y = sum over keys of weight * gradient of the weight
};

/// Buffers for the intermediate results of a tile of scores.
template <class T>
struct BackwardScratch {
    explicit BackwardScratch(bool has_dropout)
        : weights(tile_queries * tile_keys),
          gradients(tile_queries * tile_keys),
          dropout(has_dropout ? tile_queries * tile_keys : 0) {}
    TileBuffer<T> weights, gradients, dropout;
};

/// weights: the attention weights, after dropout; gradients: the gradients of the scores.
template <class T>
void score_gradients(const AttentionTiles<T>& tiles, const BackwardQueries<T>& queries, KeyTile keys,
                     const T* k_transposed, const T* v_transposed, BackwardScratch<T>& scratch) {
    const QueryTile& tile = queries.tile;
    const std::int64_t width = padded<T>(keys.count);
    T* all_weights = scratch.weights.data();
    T* all_gradients = scratch.gradients.data();
    tiles.scores(tile, keys, queries.q.data(), k_transposed, all_weights);
    tile_product<T>(tile.count, width, tiles.sizes.value_size, {queries.dy.data, queries.dy.width, 1},
                    v_transposed, tile_keys, all_gradients, tile_keys, false);
    if (tiles.has_dropout()) tiles.dropout_factors(tile, keys, scratch.dropout.data());
    for (std::int64_t i = 0; i < tile.count; ++i) {
        T* weights = all_weights + i * tile_keys;
        T* gradients = all_gradients + i * tile_keys;
        const T shift = queries.shift[static_cast<std::size_t>(i)];
        const T dot = queries.dot[static_cast<std::size_t>(i)];
        // A hidden weight is 0 whatever its key, its value, or the statistics of the query contain.
        if (tiles.has_dropout()) {
            const T* factors = scratch.dropout.data() + i * tile_keys;
            for (std::int64_t j = 0; j < width; ++j) {
                const T passed = gradients[j] * factors[j];
                gradients[j] = factors[j] == 0 ? T{0} : passed;
            }
        }
        for (std::int64_t j = 0; j < width; ++j) {
            const bool is_hidden = weights[j] == -infinity<T>;
            const T weight = exponential_weight(weights[j] - shift);
            const T gradient = weight * (gradients[j] - dot);
            weights[j] = is_hidden ? T{0} : weight;
            gradients[j] = is_hidden ? T{0} : gradient;
        }
        if (tiles.has_dropout()) {
            const T* factors = scratch.dropout.data() + i * tile_keys;
            for (std::int64_t j = 0; j < width; ++j) weights[j] *= factors[j];
        }
    }
}

template <class T>
void attention_backward_task(const AttentionTiles<T>& tiles, const BackwardTask& task,
                             const BackwardTensors& tensors) {
    BackwardKeys<T> all_keys(tiles, task, tensors);
    BackwardQueries<T> queries(tiles);
    BackwardScratch<T> scratch(tiles.has_dropout());
    const T* weights = scratch.weights.data();
    const T* gradients = scratch.gradients.data();
    for (std::int64_t t = task.first_tile; t < task.last_tile; ++t) {
        queries.load(tiles, tiles.query_tile(task.batch, task.kv_head, t), tensors);
        const QueryTile& tile = queries.tile;
        for (std::int64_t first = 0; first < task.last_key - task.first_key; first += tile_keys) {
            const KeyTile keys = tiles.key_tile(task.first_key + first);
            if (!tiles.sees_any(tile, keys)) continue;
            score_gradients(tiles, queries, keys, all_keys.k_transposed.data() + first * all_keys.head_size,
                            all_keys.v_transposed.data() + first * all_keys.value_size, scratch);
            const bool hides_any = tiles.hides_any(tile, keys);
            if (task.wants_dkv) {
                queries.dy_tile.add_product(keys.count, {weights, 1, tile_keys}, hides_any,
                                            all_keys.dv.data() + first * tiles.value_width,
                                            tiles.value_width);
                queries.q_tile.add_product(keys.count, {gradients, 1, tile_keys}, hides_any,
                                           all_keys.dk.data() + first * tiles.head_width, tiles.head_width);
            }
            if (task.wants_dq) {
                all_keys.k_tiles[static_cast<std::size_t>(first / tile_keys)].add_product(
                    tile.count, {gradients, tile_keys, 1}, hides_any, queries.dq.data(), tiles.head_width);
                if (tensors.dmask.defined()) tiles.store_dmask(tile, keys, gradients, tensors.dmask);
            }
        }
        if (!task.wants_dq) continue;
        scale_tile(queries.dq.data(), tile.count * tiles.head_width, tiles.scale);
        store_tile(queries.dq.data(), tiles.head_width, tensors.dq, tile.batch, tile.head, tile.first,
                   tile.count);
    }
    if (!task.wants_dkv) return;
    const std::int64_t count = task.last_key - task.first_key;
    store_tile(all_keys.dk.data(), tiles.head_width, tensors.dk, task.batch, task.kv_head, task.first_key,
               count);
    store_tile(all_keys.dv.data(), tiles.value_width, tensors.dv, task.batch, task.kv_head, task.first_key,
               count);
}

/// With many kv heads each is one task. With few there would be too few tasks: then dq is split into pieces of the
/// queries, and dk and dv into pieces of the keys, at the cost of computing the weights twice. The choice depends only
/// on the shapes, so the result does not depend on the number of threads.
std::vector<BackwardTask> backward_tasks(const AttentionSizes& sizes) {
    constexpr std::int64_t enough = 8;
    constexpr std::int64_t piece = 8;  // tiles
    const std::int64_t tiles = sizes.query_tiles();
    std::vector<BackwardTask> tasks;
    for (std::int64_t batch = 0; batch < sizes.batch; ++batch)
        for (std::int64_t kv_head = 0; kv_head < sizes.kv_heads; ++kv_head) {
            if (sizes.batch * sizes.kv_heads >= enough ||
                (tiles <= piece && sizes.keys <= piece * tile_keys)) {
                tasks.push_back({batch, kv_head, 0, tiles, 0, sizes.keys, true, true});
                continue;
            }
            for (std::int64_t t = 0; t < tiles; t += piece)
                tasks.push_back({batch, kv_head, t, std::min(tiles, t + piece), 0, sizes.keys, true, false});
            for (std::int64_t key = 0; key < sizes.keys; key += piece * tile_keys)
                tasks.push_back({batch, kv_head, 0, tiles, key, std::min(sizes.keys, key + piece * tile_keys),
                                 false, true});
        }
    return tasks;
}

}  // namespace

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
               const AttentionSpec& options, Tensor& y, Tensor& logsumexp) {
    const AttentionSizes sizes(q, k, v);
    constexpr std::int64_t piece = 4;  // tiles of queries that share the loaded keys
    const std::int64_t pieces = (sizes.query_tiles() + piece - 1) / piece;
    visit_floating_compute(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const AttentionTiles<T> tiles(sizes, mask_or_none, options);
        T* logsumexp_of = logsumexp.data<T>();
        parallel_for(sizes.batch * sizes.kv_heads * pieces, 1, [&](std::int64_t task, std::int64_t) {
            const std::int64_t first = task % pieces * piece;
            const std::int64_t kv_head = task / pieces % sizes.kv_heads;
            attention_forward(tiles, q, k, v, task / pieces / sizes.kv_heads, kv_head, first,
                              std::min(sizes.query_tiles(), first + piece), y, logsumexp_of);
        });
    });
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                        const Tensor& y, const Tensor& logsumexp, const Tensor& dy,
                        const AttentionSpec& options, Tensor& dq, Tensor& dk, Tensor& dv,
                        Tensor& dmask_or_none) {
    const AttentionSizes sizes(q, k, v);
    // Tiles that no query sees are skipped.
    if (dmask_or_none.defined() && options.causal) fill(dmask_or_none, 0.0);
    const std::vector<BackwardTask> tasks = backward_tasks(sizes);
    visit_floating_compute(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const AttentionTiles<T> tiles(sizes, mask_or_none, options);
        const BackwardTensors tensors{q, k, v, y, logsumexp, dy, dq, dk, dv, dmask_or_none};
        parallel_for(static_cast<std::int64_t>(tasks.size()), 1, [&](std::int64_t task, std::int64_t) {
            attention_backward_task(tiles, tasks[static_cast<std::size_t>(task)], tensors);
        });
    });
}

}  // namespace potluck::cpu
