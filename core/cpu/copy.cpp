#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "core/cpu/blocks.h"
#include "core/cpu/convert.h"
#include "core/cpu/copy.h"
#include "core/cpu/copy_past_caches.h"
#include "core/format.h"

namespace potluck::cpu {
namespace {

/// One side of a copy: its start and its strides along the axes of the layout, in elements.
struct Side {
    std::byte* data;
    DType dtype;
    std::int64_t element;  // bytes
    Strides strides;

    std::byte* at(std::int64_t offset) const { return data + offset * element; }
};

/// The axes of a copy, ordered for memory access: the target is traversed in the order of its memory, axes of size 1
/// are dropped, and neighbouring axes are merged where the strides of both sides allow it.
struct CopyLayout {
    Shape sizes;
    Side from, to;
};

CopyLayout layout_of(const Tensor& from, const Tensor& to) {
    std::vector<std::size_t> order;
    for (std::size_t axis = 0; axis < to.shape().size(); ++axis)
        if (to.shape()[axis] != 1) order.push_back(axis);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        const auto key = [&](std::size_t axis) {
            return std::pair(std::abs(to.strides()[axis]), std::abs(from.strides()[axis]));
        };
        return key(a) > key(b);
    });
    CopyLayout layout{{},
                      {static_cast<std::byte*>(from.raw_data()), from.dtype(), size_of(from.dtype()), {}},
                      {static_cast<std::byte*>(to.raw_data()), to.dtype(), size_of(to.dtype()), {}}};
    for (const std::size_t axis : order) {
        const std::int64_t size = to.shape()[axis];
        const std::int64_t from_stride = from.strides()[axis];
        const std::int64_t to_stride = to.strides()[axis];
        if (!layout.sizes.empty() && layout.from.strides.back() == from_stride * size &&
            layout.to.strides.back() == to_stride * size) {
            layout.sizes.back() *= size;
            layout.from.strides.back() = from_stride;
            layout.to.strides.back() = to_stride;
        } else {
            layout.sizes.push_back(size);
            layout.from.strides.push_back(from_stride);
            layout.to.strides.push_back(to_stride);
        }
    }
    if (layout.sizes.empty()) {  // one element
        layout.sizes = {1};
        layout.from.strides = {1};
        layout.to.strides = {1};
    }
    return layout;
}

/// Offsets of both sides at `index`, a row-major index over the first `axes` axes of the layout.
std::pair<std::int64_t, std::int64_t> offsets_at(const CopyLayout& layout, std::size_t axes,
                                                 std::int64_t index) {
    std::int64_t from = 0;
    std::int64_t to = 0;
    for (std::size_t axis = axes; axis-- > 0;) {
        const std::int64_t position = index % layout.sizes[axis];
        from += position * layout.from.strides[axis];
        to += position * layout.to.strides[axis];
        index /= layout.sizes[axis];
    }
    return {from, to};
}

std::int64_t product(const Shape& sizes, std::size_t axes) {
    return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(axes), std::int64_t{1},
                           std::multiplies<>());
}

// ---- one run ----

constexpr std::int64_t run_piece = std::int64_t{1} << 16;

void copy_run(const CopyLayout& layout) {
    const std::int64_t from_stride = layout.from.strides[0];
    const std::int64_t to_stride = layout.to.strides[0];
    if (layout.from.dtype == layout.to.dtype && from_stride == 1 && to_stride == 1 &&
        layout.sizes[0] * layout.to.element >= cpu::streamed_from) {
        parallel_for(layout.sizes[0], run_piece, [&](std::int64_t first, std::int64_t last) {
            cpu::copy_past_caches(layout.from.at(first), layout.to.at(first),
                                  (last - first) * layout.to.element);
        });
        return;
    }
    parallel_for(layout.sizes[0], run_piece, [&](std::int64_t first, std::int64_t last) {
        convert(layout.from.at(first * from_stride), layout.from.dtype, from_stride,
                layout.to.at(first * to_stride), layout.to.dtype, to_stride, last - first);
    });
}

// ---- rows: the innermost axis in one run, the others around it ----

/// Copies planes of (rows, columns) elements of one size, without a call for each short row.
template <class Word>
void move_plane(const std::byte* from, std::int64_t from_row, std::int64_t from_column, std::byte* to,
                std::int64_t to_row, std::int64_t to_column, std::int64_t rows, std::int64_t columns) {
    const auto* source = reinterpret_cast<const Word*>(from);
    auto* target = reinterpret_cast<Word*>(to);
    for (std::int64_t row = 0; row < rows; ++row, source += from_row, target += to_row)
        for (std::int64_t column = 0; column < columns; ++column)
            target[column * to_column] = source[column * from_column];
}

void copy_rows(const CopyLayout& layout) {
    const std::size_t inner = layout.sizes.size() - 1;
    const std::int64_t columns = layout.sizes[inner];
    const std::int64_t rows = layout.sizes[inner - 1];
    const std::int64_t from_column = layout.from.strides[inner];
    const std::int64_t to_column = layout.to.strides[inner];
    const std::int64_t from_row = layout.from.strides[inner - 1];
    const std::int64_t to_row = layout.to.strides[inner - 1];
    constexpr std::int64_t short_row = 32;
    const bool moves = layout.from.dtype == layout.to.dtype && columns < short_row;

    // A piece is a range of the rows of all planes; it is split where a plane ends.
    const std::int64_t piece = std::max<std::int64_t>(1, run_piece / columns);
    parallel_for(product(layout.sizes, inner), piece, [&](std::int64_t first, std::int64_t last) {
        while (first < last) {
            const std::int64_t count = std::min(last - first, rows - first % rows);
            const auto [from_offset, to_offset] = offsets_at(layout, inner, first);
            const std::byte* from = layout.from.at(from_offset);
            std::byte* to = layout.to.at(to_offset);
            first += count;
            if (moves) {
                const auto move = layout.to.element == 8   ? move_plane<std::uint64_t>
                                  : layout.to.element == 4 ? move_plane<std::uint32_t>
                                  : layout.to.element == 2 ? move_plane<std::uint16_t>
                                                           : move_plane<std::uint8_t>;
                move(from, from_row, from_column, to, to_row, to_column, count, columns);
            } else {
                for (std::int64_t row = 0; row < count; ++row)
                    convert(from + row * from_row * layout.from.element, layout.from.dtype, from_column,
                            to + row * to_row * layout.to.element, layout.to.dtype, to_column, columns);
            }
        }
    });
}

// ---- transpose: source and target are dense along different axes ----

constexpr std::int64_t tile = 64;

/// Copies a tile of up to 64 x 64 elements: whole rows of the source are read, transposed in a small buffer (that stays
/// in the L1 cache), and written as whole rows of the target.
template <class Word>
void turn_tile(const std::byte* from, std::int64_t from_stride, Word* turned, std::int64_t source_rows,
               std::int64_t source_columns) {
    const auto* source = reinterpret_cast<const Word*>(from);
    if (source_rows == tile && source_columns == tile) {  // sizes that the compiler knows
        for (std::int64_t row = 0; row < tile; ++row)
            for (std::int64_t column = 0; column < tile; ++column)
                turned[column * tile + row] = source[row * from_stride + column];
        return;
    }
    for (std::int64_t row = 0; row < source_rows; ++row)
        for (std::int64_t column = 0; column < source_columns; ++column)
            turned[column * tile + row] = source[row * from_stride + column];
}

/// `dense` is the axis along which the source is dense; the target is dense along the last axis.
template <class Word>
void copy_transposed(const CopyLayout& layout, std::size_t dense) {
    const std::size_t inner = layout.sizes.size() - 1;
    const std::int64_t from_stride = layout.from.strides[inner];  // from one source row to the next
    const std::int64_t to_stride = layout.to.strides[dense];
    const std::int64_t row_tiles = (layout.sizes[inner] + tile - 1) / tile;
    const std::int64_t column_tiles = (layout.sizes[dense] + tile - 1) / tile;
    CopyLayout outer = layout;  // the remaining axes
    for (const std::size_t axis : {inner, dense}) {
        outer.sizes.erase(outer.sizes.begin() + static_cast<std::ptrdiff_t>(axis));
        outer.from.strides.erase(outer.from.strides.begin() + static_cast<std::ptrdiff_t>(axis));
        outer.to.strides.erase(outer.to.strides.begin() + static_cast<std::ptrdiff_t>(axis));
    }
    const std::int64_t planes = product(outer.sizes, outer.sizes.size());
    parallel_for(planes * row_tiles * column_tiles, 4, [&](std::int64_t first, std::int64_t last) {
        alignas(64) std::array<Word, tile * tile> turned;
        for (std::int64_t index = first; index < last; ++index) {
            const auto [from_plane, to_plane] =
                offsets_at(outer, outer.sizes.size(), index / (row_tiles * column_tiles));
            // Along the rows of the source, where the prefetcher already loads the next cache lines.
            const std::int64_t column = index % column_tiles * tile;
            const std::int64_t row = index / column_tiles % row_tiles * tile;
            const std::int64_t columns = std::min(tile, layout.sizes[dense] - column);
            const std::int64_t rows = std::min(tile, layout.sizes[inner] - row);
            turn_tile(layout.from.at(from_plane + row * from_stride + column), from_stride, turned.data(),
                      rows, columns);
            for (std::int64_t i = 0; i < columns; ++i)
                convert(turned.data() + i * tile, layout.from.dtype, 1,
                        layout.to.at(to_plane + (column + i) * to_stride + row), layout.to.dtype, 1, rows);
        }
    });
}

/// The axis along which the source is dense, if copying by tiles is worthwhile; else the last axis.
std::size_t transposed_axis(const CopyLayout& layout) {
    const std::size_t inner = layout.sizes.size() - 1;
    if (layout.to.strides[inner] != 1 || layout.from.strides[inner] == 1 || layout.from.strides[inner] == 0 ||
        layout.sizes[inner] < 4)
        return inner;
    for (std::size_t axis = inner; axis-- > 0;)
        if (layout.from.strides[axis] == 1 && layout.sizes[axis] >= 4) return axis;
    return inner;
}

}  // namespace

void copy(const Tensor& from, Tensor& to) {
    if (from.shape() != to.shape())
        throw Error("copy",
                    fmt::format("shapes differ: {} into {}.", pretty(from.shape()), pretty(to.shape())));
    if (to.count() == 0) return;
    const CopyLayout layout = layout_of(from, to);
    if (layout.sizes.size() == 1) return copy_run(layout);
    const std::size_t dense = transposed_axis(layout);
    if (dense + 1 == layout.sizes.size()) return copy_rows(layout);
    switch (layout.from.element) {
        case 8:
            return copy_transposed<std::uint64_t>(layout, dense);
        case 4:
            return copy_transposed<std::uint32_t>(layout, dense);
        case 2:
            return copy_transposed<std::uint16_t>(layout, dense);
        default:
            return copy_transposed<std::uint8_t>(layout, dense);
    }
}

void fill(Tensor& to, const Scalar& value) {
    if (to.count() == 0) return;
    // One element of the target's dtype, read with strides of 0.
    alignas(8) std::array<std::byte, 8> element;
    if (value.is_floating()) {
        const double number = value.to_double();
        convert(&number, DType::f64, 1, element.data(), to.dtype(), 1, 1);
    } else {
        const std::int64_t number = value.to_int64();
        convert(&number, DType::i64, 1, element.data(), to.dtype(), 1, 1);
    }
    const Tensor one =
        Tensor::view_of(std::make_shared<Storage>(to.device(), element.data(), size_of(to.dtype()), [] {}),
                        to.dtype(), {}, {}, 0);
    copy(one.broadcast_alias("fill", to.shape()), to);
}

}  // namespace potluck::cpu
