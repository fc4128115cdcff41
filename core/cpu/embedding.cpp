#include <numeric>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/indices.h"
#include "core/format.h"

namespace potluck::cpu {

namespace {

std::vector<std::int64_t> read_ids(const Tensor& ids) {
    std::vector<std::int64_t> values(static_cast<std::size_t>(ids.count()));
    BlockReader<std::int64_t> reader(ids);
    for (std::int64_t first = 0; first < ids.count(); first += block_size) {
        const std::int64_t n = std::min(block_size, ids.count() - first);
        const std::int64_t* block = reader.read(first, n);
        std::copy(block, block + n, values.begin() + first);
    }
    return values;
}

void check_ids(const Tensor& ids, std::int64_t rows) {
    check_indices("embedding", "id", ids, rows, fmt::format("the {} rows of the weight", rows));
}

/// A matrix that is read and written row by row, or by parts of a row.
struct Matrix {
    explicit Matrix(const Tensor& x)
        : base(static_cast<std::byte*>(x.raw_data())),
          dtype(x.dtype()),
          element(size_of(x.dtype())),
          row_stride(x.strides()[0]),
          column_stride(x.strides()[1]) {}
    std::byte* at(std::int64_t row, std::int64_t column) const {
        return base + (row * row_stride + column * column_stride) * element;
    }

    std::byte* base;
    DType dtype;
    std::int64_t element, row_stride, column_stride;
};

/// Positions of the ids, grouped by id and in order within a group.
struct Groups {
    std::vector<std::int64_t> positions;
    std::vector<std::int64_t> begins;  // the start of each group in `positions`, and the end
};
Groups group_by_id(const std::vector<std::int64_t>& ids) {
    Groups groups;
    groups.positions.resize(ids.size());
    std::iota(groups.positions.begin(), groups.positions.end(), 0);
    std::stable_sort(groups.positions.begin(), groups.positions.end(), [&](std::int64_t a, std::int64_t b) {
        return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
    });
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto id_at = [&](std::size_t place) {
            return ids[static_cast<std::size_t>(groups.positions[place])];
        };
        if (i == 0 || id_at(i) != id_at(i - 1)) groups.begins.push_back(static_cast<std::int64_t>(i));
    }
    groups.begins.push_back(static_cast<std::int64_t>(ids.size()));
    return groups;
}

/// Each row of dweight belongs to one thread (or to a few, split by columns), which adds all gradients of the row in
/// order in f64 and rounds once.
void add_gradients(const std::vector<std::int64_t>& ids, const Tensor& dy, Tensor& dweight) {
    constexpr std::int64_t tile = 512;  // columns
    const Groups groups = group_by_id(ids);
    const Matrix from(dy);
    const Matrix to(dweight);
    const std::int64_t width = dweight.size(1);
    const std::int64_t tiles = (width + tile - 1) / tile;
    const auto group_count = static_cast<std::int64_t>(groups.begins.size()) - 1;
    const std::int64_t piece = std::max<std::int64_t>(1, 16 * block_size / std::min(width, tile));
    parallel_for(group_count * tiles, piece, [&](std::int64_t begin, std::int64_t end) {
        double sum[tile];
        double add[tile];
        for (std::int64_t task = begin; task < end; ++task) {
            const auto group = static_cast<std::size_t>(task / tiles);
            const std::int64_t column = task % tiles * tile;
            const std::int64_t n = std::min(tile, width - column);
            const std::int64_t last = groups.begins[group + 1];
            const std::int64_t first_position =
                groups.positions[static_cast<std::size_t>(groups.begins[group])];
            std::byte* row = to.at(ids[static_cast<std::size_t>(first_position)], column);
            convert_to(sum, row, to.dtype, to.column_stride, n);
            for (std::int64_t i = groups.begins[group]; i < last; ++i) {
                const std::int64_t position = groups.positions[static_cast<std::size_t>(i)];
                convert_to(add, from.at(position, column), from.dtype, from.column_stride, n);
                for (std::int64_t j = 0; j < n; ++j) sum[j] += add[j];
            }
            convert_from(sum, row, to.dtype, to.column_stride, n);
        }
    });
}

}  // namespace

void embedding(const Tensor& weight, const Tensor& ids, Tensor& y) {
    check_ids(ids, weight.size(0));
    const std::vector<std::int64_t> rows = read_ids(ids);
    const Matrix from(weight);
    const Matrix to(y);
    const std::int64_t width = weight.size(1);
    if (width == 0) return;
    parallel_for(ids.count(), std::max<std::int64_t>(1, piece_size / width),
                 [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                         convert(from.at(rows[static_cast<std::size_t>(i)], 0), from.dtype,
                                 from.column_stride, to.at(i, 0), to.dtype, to.column_stride, width);
                 });
}

void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight) {
    check_ids(ids, dweight.size(0));
    if (dy.count() == 0) return;
    add_gradients(read_ids(ids), dy, dweight);
}

}  // namespace potluck::cpu
