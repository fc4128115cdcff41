#pragma once

// Attention on one tile: sizes and positions, reading and writing tiles of any strides and dtype, and the scores of a
// tile with all that affects them (scale, causality, mask, dropout).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/convert.h"
#include "core/cpu/tile_product.h"
#include "core/kernel_specs.h"

namespace potluck::cpu {

inline constexpr std::int64_t tile_queries = 64;
inline constexpr std::int64_t tile_keys = 64;

struct AttentionSizes {
    AttentionSizes(const Tensor& q, const Tensor& k, const Tensor& v)
        : batch(q.size(0)),
          heads(q.size(1)),
          kv_heads(k.size(1)),
          queries(q.size(2)),
          keys(k.size(2)),
          head_size(q.size(3)),
          value_size(v.size(3)),
          group(kv_heads == 0 ? 0 : heads / kv_heads) {}

    std::int64_t batch, heads, kv_heads, queries, keys, head_size, value_size;
    std::int64_t group;  // number of heads that share one kv head

    std::int64_t tiles_per_head() const { return (queries + tile_queries - 1) / tile_queries; }
    /// Number of tiles of queries that share one kv head, head by head.
    std::int64_t query_tiles() const { return group * tiles_per_head(); }
};

/// Queries [first, first + count) of one head.
struct QueryTile {
    std::int64_t batch, head, first, count;
};
struct KeyTile {
    std::int64_t first, count;
};

/// Memory for tiles, aligned for vectors; initialised to zero when it will accumulate sums.
template <class T>
class TileBuffer {
public:
    TileBuffer() = default;
    explicit TileBuffer(std::int64_t count, bool zeroed = false)
        : data_(count == 0 ? nullptr
                           : static_cast<T*>(::operator new (static_cast<std::size_t>(count) * sizeof(T),
                                                             std::align_val_t{64}))) {
        if (zeroed) std::fill_n(data_.get(), count, T{0});
    }
    T* data() const { return data_.get(); }

private:
    struct Free {
        void operator()(T* data) const { ::operator delete (data, std::align_val_t{64}); }
    };
    std::unique_ptr<T[], Free> data_;
};

/// The rows of a tile in memory.
template <class T>
struct TileView {
    const T* data;
    std::int64_t width;  // distance between rows
};

inline const std::byte* row_address(const Tensor& x, std::int64_t batch, std::int64_t head,
                                    std::int64_t row) {
    const Strides& strides = x.strides();
    return static_cast<const std::byte*>(x.raw_data()) +
           (batch * strides[0] + head * strides[1] + row * strides[2]) * size_of(x.dtype());
}

/// Rows [first, first + count) of x[batch, head] as a tile of `width`; padded with 0 beyond the columns of x.
template <class T>
void load_tile(const Tensor& x, std::int64_t batch, std::int64_t head, std::int64_t first, std::int64_t count,
               T* to, std::int64_t width) {
    // What holds for all rows is asked once: rows are short, and there are many.
    const std::byte* from = row_address(x, batch, head, first);
    const DType dtype = x.dtype();
    const std::int64_t columns = x.size(3), stride = x.strides()[3];
    const std::int64_t step = x.strides()[2] * size_of(dtype);
    const bool is_dense = dtype == dtype_of<T>() && stride == 1;
    for (std::int64_t i = 0; i < count; ++i, from += step, to += width) {
        if (is_dense)
            std::copy_n(reinterpret_cast<const T*>(from), columns, to);
        else
            convert_to(to, from, dtype, stride, columns);
        std::fill(to + columns, to + width, T{0});
    }
}

/// The same, but without a copy where x already has the layout of a tile.
template <class T>
TileView<T> view_or_load(const Tensor& x, std::int64_t batch, std::int64_t head, std::int64_t first,
                         std::int64_t count, T* buffer, std::int64_t width) {
    if (x.dtype() == dtype_of<T>() && x.strides()[3] == 1 && x.size(3) == width)
        return {reinterpret_cast<const T*>(row_address(x, batch, head, first)), x.strides()[2]};
    load_tile(x, batch, head, first, count, buffer, width);
    return {buffer, width};
}

template <class T>
void store_tile(const T* from, std::int64_t width, Tensor& x, std::int64_t batch, std::int64_t head,
                std::int64_t first, std::int64_t count) {
    auto* to = const_cast<std::byte*>(row_address(x, batch, head, first));
    const DType dtype = x.dtype();
    const std::int64_t columns = x.size(3), stride = x.strides()[3];
    const std::int64_t step = x.strides()[2] * size_of(dtype);
    const bool is_dense = dtype == dtype_of<T>() && stride == 1;
    for (std::int64_t i = 0; i < count; ++i, from += width, to += step) {
        if (is_dense)
            std::copy_n(from, columns, reinterpret_cast<T*>(to));
        else
            convert_from(from, to, dtype, stride, columns);
    }
}

template <class T>
void scale_tile(T* tile, std::int64_t count, T factor) {
    for (std::int64_t i = 0; i < count; ++i) tile[i] *= factor;
}

/// Transposes a block of 4 x 4 elements.
template <class T>
void transpose_4x4(const T* from, std::int64_t from_width, T* to, std::int64_t to_width) {
    typedef T Four __attribute__((vector_size(4 * sizeof(T)), aligned(alignof(T)), may_alias));
    const Four a = *reinterpret_cast<const Four*>(from);
    const Four b = *reinterpret_cast<const Four*>(from + from_width);
    const Four c = *reinterpret_cast<const Four*>(from + 2 * from_width);
    const Four d = *reinterpret_cast<const Four*>(from + 3 * from_width);
    const Four ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    const Four ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Four cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *reinterpret_cast<Four*>(to) = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
    *reinterpret_cast<Four*>(to + to_width) = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
    *reinterpret_cast<Four*>(to + 2 * to_width) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
    *reinterpret_cast<Four*>(to + 3 * to_width) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/// to (columns, tile_keys) = the transposed tile; rows missing to whole vectors are 0.
template <class T>
void transpose_tile(TileView<T> from, std::int64_t rows, std::int64_t columns, T* to) {
    const std::int64_t even_rows = rows / 4 * 4;
    const std::int64_t even_columns = columns / 4 * 4;
    for (std::int64_t j = 0; j < even_columns; j += 4)
        for (std::int64_t i = 0; i < even_rows; i += 4)
            transpose_4x4(from.data + i * from.width + j, from.width, to + j * tile_keys + i, tile_keys);
    for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t i = j < even_columns ? even_rows : 0; i < rows; ++i)
            to[j * tile_keys + i] = from.data[i * from.width + j];
        std::fill(to + j * tile_keys + rows, to + j * tile_keys + padded<T>(rows), T{0});
    }
}

/// The right factor of a product whose left factor, a tile of weights or score gradients, is 0 at hidden entries: at
/// keys that are not visible and at weights that dropout drops. Such an entry adds nothing even where the row of the
/// right factor contains infinity or NaN, whose product with 0 would be NaN.
template <class T>
class FactorTile {
public:
    FactorTile() = default;
    FactorTile(TileView<T> rows, std::int64_t count, std::int64_t columns)
        : rows_(rows), count_(count), columns_(columns) {}

    /// sums (rows, columns) += left (rows, count) times this tile. `has_zeros`: left may have hidden entries.
    void add_product(std::int64_t rows, LeftTile<T> left, bool has_zeros, T* sums, std::int64_t sums_width) {
        if (has_zeros && !was_searched_) search();
        const bool with_care = has_zeros && !bad_rows_.empty();
        const TileView<T> right = with_care ? TileView<T>{finite_rows_.data(), columns_} : rows_;
        tile_product<T>(rows, columns_, count_, left, right.data, right.width, sums, sums_width, true);
        if (with_care) add_bad_rows(rows, left, sums, sums_width);
    }

private:
    void search();  // looks for rows that are not finite, once
    void add_bad_rows(std::int64_t rows, LeftTile<T> left, T* sums, std::int64_t sums_width) const;

    TileView<T> rows_{};
    std::int64_t count_ = 0, columns_ = 0;
    bool was_searched_ = false;
    std::vector<std::int64_t> bad_rows_;
    TileBuffer<T> finite_rows_;  // a copy with zeros in the bad rows, if there are any
};

extern template class FactorTile<float>;
extern template class FactorTile<double>;

/// Computes the scores of tiles, which are (tile_queries, tile_keys).
template <class T>
class AttentionTiles {
public:
    AttentionTiles(const AttentionSizes& sizes, const Tensor& mask_or_none, const AttentionSpec& options);

    const AttentionSizes sizes;
    const std::int64_t head_width, value_width;  // padded
    const T scale;

    bool has_dropout() const { return options_.dropout > 0; }

    /// Tile `index` of the tiles that share a kv head.
    QueryTile query_tile(std::int64_t batch, std::int64_t kv_head, std::int64_t index) const {
        const std::int64_t first = index % sizes.tiles_per_head() * tile_queries;
        return {batch, kv_head * sizes.group + index / sizes.tiles_per_head(), first,
                std::min(tile_queries, sizes.queries - first)};
    }
    KeyTile key_tile(std::int64_t first) const { return {first, std::min(tile_keys, sizes.keys - first)}; }
    /// Row-major position of a query in tensors of (batch, heads, queries).
    std::int64_t row_index(const QueryTile& tile, std::int64_t row) const {
        return (tile.batch * sizes.heads + tile.head) * sizes.queries + tile.first + row;
    }
    /// How many of the keys are visible to a query under causality alone.
    std::int64_t seen(const QueryTile& tile, std::int64_t row, const KeyTile& keys) const {
        if (!options_.causal) return keys.count;
        const std::int64_t last_key = tile.first + row + sizes.keys - sizes.queries;  // aligned bottom-right
        return std::clamp(last_key + 1 - keys.first, std::int64_t{0}, keys.count);
    }
    bool sees_any(const QueryTile& tile, const KeyTile& keys) const {
        return seen(tile, tile.count - 1, keys) > 0;
    }
    /// Whether some key of the tile may be hidden from some query.
    bool hides_any(const QueryTile& tile, const KeyTile& keys) const {
        return mask_.defined() || has_dropout() || seen(tile, 0, keys) < keys.count;
    }

    /// q (rows, head_width) scaled, k_transposed (head_size, tile_keys). Keys that are not visible get -inf, and so do
    /// columns beyond keys.count.
    void scores(const QueryTile& tile, const KeyTile& keys, const T* q, const T* k_transposed,
                T* scores) const;
    /// The dropout factor of each weight: 0 or 1 / (1 - p).
    void dropout_factors(const QueryTile& tile, const KeyTile& keys, T* factors) const;
    void store_dmask(const QueryTile& tile, const KeyTile& keys, const T* gradients, Tensor& dmask) const;

private:
    void apply_mask(const QueryTile& tile, std::int64_t row, const KeyTile& keys, std::int64_t count,
                    T* scores) const;

    AttentionSpec options_;
    ElementNumbers numbers_;  // of the weights, for dropout
    Tensor mask_;
};

extern template class AttentionTiles<float>;
extern template class AttentionTiles<double>;

}  // namespace potluck::cpu
