#include <algorithm>
#include <array>
#include <vector>

#include "core/cpu/convolution_columns.h"
#include "core/cpu/copy.h"
#include "core/cpu/gemm.h"
#include "core/cpu/rows.h"
#include "core/cpu/workspace.h"
#include "core/kernel_specs.h"

// Convolutions as matrix products (Chellapilla, Puri, Simard, 2006). The elements of x in one window, channel by
// channel and row by row, form a column; all windows of all samples form a matrix. For one group of channels it has
//     depth  = channels / groups * kernel height * kernel width    rows,
//     places = batch * height' * width'                            columns,
// and then, for each group with its share of the filters,
//     y = weight (filters, depth) . columns,  dweight = dy . columns^T,  dcolumns = weight^T . dy,
// where dx sums the entries of dcolumns that belong to each of its elements. The matrix is never stored as a whole:
// tiles of it are gathered, multiplied and discarded. Their borders depend only on the shapes, each is one product in
// one thread, and sums over tiles are taken in order: the bits do not depend on the number of threads.

namespace potluck::cpu {
namespace {

/// The tensor itself if it is contiguous and in the compute type, else such a copy.
template <class T>
Tensor dense(const Tensor& x) {
    if (!x.defined() || (x.is_contiguous() && x.dtype() == dtype_of<T>())) return x;
    Tensor result = Tensor::empty(x.shape(), {dtype_of<T>(), x.device()});
    copy(x, result);
    return result;
}

/// Whether all columns of a tile belong to one sample.
bool is_in_one_sample(const Geometry& g, const Tile& tile) {
    return tile.columns <= g.windows() - tile.column % g.windows();
}

/// The columns of a tile that is_in_one_sample(), from planes [first, first + count) of the group, each of windows()
/// elements, in the memory of x or y itself.
template <class T>
Matrix<T> in_planes(const Geometry& g, std::int64_t group, const Tile& tile, T* planes,
                    std::int64_t planes_of_group, std::int64_t first, std::int64_t count) {
    const std::int64_t sample = tile.column / g.windows();
    const std::int64_t plane = (sample * g.groups + group) * planes_of_group + first;
    return {planes + plane * g.windows() + tile.column % g.windows(), count, tile.columns, g.windows(), 1};
}

/// Whether the columns are the elements of x as they lie in memory: a window is one element, and every element has one.
bool is_pointwise(const Geometry& g) {
    return g.kernel_size() == 1 && g.out_height == g.height && g.out_width == g.width &&
           g.options.padding == std::array<std::int64_t, 2>{0, 0};
}

/// A tile of the matrix of columns, gathered in `memory` unless x itself shows it.
template <class T>
Matrix<const T> columns_of(const Geometry& g, std::int64_t group, const Tile& tile, const T* x, T* memory) {
    if (is_pointwise(g) && is_in_one_sample(g, tile))
        return in_planes(g, group, tile, x, g.channels, tile.row, tile.rows);
    gather(g, group, tile, x, memory);
    return {memory, tile.rows, tile.columns, tile.columns, 1};
}

/// The columns of a tile from dy, as a matrix (filters of the group, columns), likewise.
template <class T>
Matrix<const T> slopes_of(const Geometry& g, std::int64_t group, const Tile& tile, const T* dy, T* memory) {
    if (is_in_one_sample(g, tile)) return in_planes(g, group, tile, dy, g.filters, 0, g.filters);
    gather_filters(g, group, tile, dy, memory);
    return {memory, g.filters, tile.columns, tile.columns, 1};
}

struct TileMemory;  // the owner of its workspace

constexpr std::int64_t tile_elements = 1 << 17;  // of both factors or of the product: fits an L2 cache
constexpr std::int64_t least_tile_columns = 128;
constexpr std::int64_t wanted_tiles = 8;            // enough to occupy more threads,
constexpr std::int64_t least_piece_work = 1 << 19;  // as long as a piece is worth its overhead

/// Multiplications of a tile; gathering one element takes about as long as 16 of them.
std::int64_t work_of(const Geometry& g, std::int64_t rows, std::int64_t columns) {
    return rows * columns * (g.filters + 16);
}

/// How many consecutive tiles one thread processes.
std::int64_t tiles_per_piece(std::int64_t tile_work) {
    return std::max<std::int64_t>(1, least_piece_work / std::max<std::int64_t>(1, tile_work));
}

/// How the columns of one group are divided for the forward pass.
Tiling forward_tiling(const Geometry& g) {
    const std::int64_t depth = g.depth(), places = g.places();
    const std::int64_t most =
        std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, depth + g.filters));
    const std::int64_t worth_while =
        std::min(places / least_tile_columns, work_of(g, depth, places) / least_piece_work);
    const std::int64_t tiles =
        std::max({std::int64_t{1}, (places + most - 1) / most, std::min(wanted_tiles, worth_while)});
    return {g, ((places + tiles - 1) / tiles + 15) / 16 * 16};
}

template <class T>
void forward(const Geometry& g, const T* x, const T* weight, const std::vector<T>& bias, Tensor& y) {
    const std::int64_t depth = g.depth();
    const Tiling tiling = forward_tiling(g);
    const std::int64_t tiles = tiling.count(), size = tiling.most_columns();
    parallel_for(
        g.groups * tiles, tiles_per_piece(work_of(g, depth, size)),
        [&](std::int64_t first, std::int64_t last) {
            T* const memory = workspace<TileMemory, T>((depth + g.filters) * size);
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t group = i / tiles;
                const Tile tile = tiling.at(i % tiles, 0, depth);
                const bool direct = y.dtype() == dtype_of<T>() && is_in_one_sample(g, tile);
                Matrix<T> sums{memory + depth * size, g.filters, tile.columns, tile.columns, 1};
                if (direct) sums = in_planes(g, group, tile, y.data<T>(), g.filters, 0, g.filters);
                const Matrix<const T> columns = columns_of(g, group, tile, x, memory);
                for (std::int64_t f = 0; f < g.filters && !bias.empty(); ++f)
                    std::fill_n(sums.data + f * sums.row_stride, tile.columns,
                                bias[static_cast<std::size_t>(group * g.filters + f)]);
                gemm(Matrix<const T>{weight + group * g.filters * depth, g.filters, depth, depth, 1}, columns,
                     sums, /*accumulate=*/!bias.empty());
                if (direct) continue;
                for_each_sample(
                    g, tile,
                    [&](std::int64_t sample, std::int64_t window, std::int64_t position, std::int64_t n) {
                        for (std::int64_t f = 0; f < g.filters; ++f) {
                            const std::int64_t at =
                                ((sample * g.groups + group) * g.filters + f) * g.windows() + window;
                            convert_from(sums.data + f * tile.columns + position,
                                         static_cast<std::byte*>(y.raw_data()) + at * size_of(y.dtype()),
                                         y.dtype(), 1, n);
                        }
                    });
            }
        });
}

/// dx (dense) from dcolumns = weight^T . dy. Windows overlap, so one thread processes whole samples: enough of
/// them to make a product worthwhile.
template <class T>
void input_gradient(const Geometry& g, const T* weight, const T* dy, T* dx) {
    const std::int64_t depth = g.depth();
    const Tiling tiling(
        g, std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, depth + g.filters)));
    const std::int64_t pieces = tiling.count() / tiling.parts(), size = tiling.most_columns();
    const std::int64_t work = work_of(g, depth, size) * tiling.parts();
    parallel_for(g.groups * pieces, tiles_per_piece(work), [&](std::int64_t first, std::int64_t last) {
        T* const memory = workspace<TileMemory, T>((depth + g.filters) * size);
        for (std::int64_t i = first * tiling.parts(); i < last * tiling.parts(); ++i) {
            const std::int64_t group = i / tiling.count();
            const Tile tile = tiling.at(i % tiling.count(), 0, depth);
            const Matrix<const T> slopes = slopes_of(g, group, tile, dy, memory + depth * size);
            const bool direct = is_pointwise(g) && is_in_one_sample(g, tile);
            Matrix<T> columns{memory, depth, tile.columns, tile.columns, 1};
            if (i % tiling.parts() == 0 && !direct) {
                // What the samples of this tile get is added up while it is in the cache.
                const std::int64_t size_of_group = g.channels * g.plane();
                for_each_sample(g, tile, [&](std::int64_t sample, std::int64_t, std::int64_t, std::int64_t) {
                    std::fill_n(dx + (sample * g.groups + group) * size_of_group, size_of_group, T{0});
                });
            }
            if (direct) columns = in_planes(g, group, tile, dx, g.channels, 0, g.channels);
            gemm(Matrix<const T>{weight + group * g.filters * depth, g.filters, depth, depth, 1}.transposed(),
                 slopes, columns, /*accumulate=*/false);
            if (!direct) scatter(g, group, tile, columns.data, dx);
        }
    });
}

/// dweight (dense) = dy . columns^T. One thread takes some rows of the matrix of columns (some inputs of the
/// filters) and goes through all places in order.
template <class T>
void weight_gradient(const Geometry& g, const T* x, const T* dy, T* dweight) {
    constexpr std::int64_t least_rows = 16;
    const std::int64_t depth = g.depth();
    const std::int64_t rows =
        std::max(std::min(least_rows, depth), (depth + wanted_tiles - 1) / wanted_tiles);
    const std::int64_t blocks = rows == 0 ? 0 : (depth + rows - 1) / rows;
    const Tiling tiling(
        g, std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, rows + g.filters)));
    const std::int64_t size = tiling.most_columns();
    parallel_for(
        g.groups * blocks, tiles_per_piece(work_of(g, rows, g.places())),
        [&](std::int64_t first, std::int64_t last) {
            T* const memory = workspace<TileMemory, T>((rows + g.filters) * size);
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t group = i / blocks, row = i % blocks * rows;
                for (std::int64_t part = 0; part < tiling.count(); ++part) {
                    const Tile tile = tiling.at(part, row, std::min(rows, depth - row));
                    const Matrix<const T> columns = columns_of(g, group, tile, x, memory);
                    const Matrix<const T> slopes = slopes_of(g, group, tile, dy, memory + rows * size);
                    gemm(slopes, columns.transposed(),
                         Matrix<T>{dweight + group * g.filters * depth + row, g.filters, tile.rows, depth, 1},
                         /*accumulate=*/part > 0);
                }
            }
        });
}

/// dbias[f] = the sum of dy over all samples and output positions, in f64.
template <class T>
void bias_gradient(const T* dy, const Shape& shape, Tensor& dbias) {
    const std::int64_t filters = shape[1], windows = shape[2] * shape[3];
    std::vector<double> totals(static_cast<std::size_t>(filters));
    parallel_for(filters, rows_per_piece(shape[0] * windows), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t f = first; f < last; ++f)
            for (std::int64_t sample = 0; sample < shape[0]; ++sample) {
                const T* row = dy + (sample * filters + f) * windows;
                totals[static_cast<std::size_t>(f)] +=
                    sum_of<T>(windows, [&](std::int64_t i) { return row[i]; });
            }
    });
    if (filters > 0) convert_from(totals.data(), dbias.raw_data(), dbias.dtype(), 1, filters);
}

/// Calls compute(T*) with a dense buffer of the shape of y in the compute type, and stores the result in y.
template <class T, class Compute>
void compute_dense(Tensor& y, const Compute& compute) {
    Tensor result = y.dtype() == dtype_of<T>() ? y : Tensor::empty(y.shape(), {dtype_of<T>(), y.device()});
    compute(result.data<T>());
    if (!result.is_same(y)) copy(result, y);
}

}  // namespace

void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                 const ConvolutionSpec& options, Tensor& y) {
    if (y.count() == 0) return;
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        forward<T>({x.shape(), weight.shape(), y.shape(), options}, dense<T>(x).template data<T>(),
                   dense<T>(weight).template data<T>(), read_vector<T>(bias_or_none), y);
    });
}

void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                          const ConvolutionSpec& options, Tensor& dx_or_none, Tensor& dweight_or_none,
                          Tensor& dbias_or_none) {
    const Geometry g(x.shape(), weight.shape(), dy.shape(), options);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const Tensor slopes = dense<T>(dy);
        if (slopes.count() == 0) {
            for (Tensor* gradient : {&dx_or_none, &dweight_or_none})
                if (gradient->defined()) fill(*gradient, 0);
        } else {
            if (dx_or_none.defined())
                compute_dense<T>(dx_or_none, [&](T* dx) {
                    input_gradient(g, dense<T>(weight).template data<T>(), slopes.data<T>(), dx);
                });
            if (dweight_or_none.defined())
                compute_dense<T>(dweight_or_none, [&](T* dweight) {
                    weight_gradient(g, dense<T>(x).template data<T>(), slopes.data<T>(), dweight);
                });
        }
        if (dbias_or_none.defined()) bias_gradient(slopes.data<T>(), dy.shape(), dbias_or_none);
    });
}

}  // namespace potluck::cpu
