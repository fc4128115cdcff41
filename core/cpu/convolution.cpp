#include <algorithm>
#include <memory>
#include <vector>

#include "core/cpu/copy.h"
#include "core/cpu/gemm.h"
#include "core/cpu/rows.h"
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

struct Geometry {
    std::int64_t batch, groups;
    std::int64_t channels, filters;  // per group
    std::int64_t height, width, kernel_height, kernel_width, out_height, out_width;
    ConvolutionSpec options;

    Geometry(const Shape& x, const Shape& weight, const Shape& y, const ConvolutionSpec& options)
        : batch(x[0]),
          groups(options.groups),
          channels(weight[1]),
          filters(weight[0] / options.groups),
          height(x[2]),
          width(x[3]),
          kernel_height(weight[2]),
          kernel_width(weight[3]),
          out_height(y[2]),
          out_width(y[3]),
          options(options) {}

    std::int64_t kernel_size() const { return kernel_height * kernel_width; }
    std::int64_t depth() const { return channels * kernel_size(); }
    std::int64_t plane() const { return height * width; }
    std::int64_t windows() const { return out_height * out_width; }  // per sample
    std::int64_t places() const { return batch * windows(); }
};

/// A tile of the matrix of columns: rows [row, row + rows) and columns [column, column + columns).
struct Tile {
    std::int64_t row, rows, column, columns;
};

/// Calls run(sample, window, position, length) for the runs of windows of one sample in a tile: a run begins at
/// `window` in the sample and at `position` in the tile.
template <class Run>
void for_each_sample(const Geometry& g, const Tile& tile, const Run& run) {
    std::int64_t sample = tile.column / g.windows(), window = tile.column % g.windows();
    for (std::int64_t position = 0; position < tile.columns; ++sample, window = 0) {
        const std::int64_t length = std::min(g.windows() - window, tile.columns - position);
        run(sample, window, position, length);
        position += length;
    }
}

/// Traverses a tile in runs along one row of outputs. run(in_tile, offset, before, inside, after) gets the position of
/// the run in the tile; `before` of its elements lie left of x, `inside` elements lie in x, starting at `offset` and
/// one stride apart, and `after` elements lie right of it.
template <class Run>
void for_each_run(const Geometry& g, std::int64_t group, const Tile& tile, const Run& run) {
    const std::int64_t stride_y = g.options.stride[0], stride_x = g.options.stride[1];
    for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
        const std::int64_t channel = group * g.channels + row / g.kernel_size();
        const std::int64_t in_kernel = row % g.kernel_size();
        const std::int64_t y0 = in_kernel / g.kernel_width * g.options.dilation[0] - g.options.padding[0];
        const std::int64_t x0 = in_kernel % g.kernel_width * g.options.dilation[1] - g.options.padding[1];
        // For windows [first_inside, last_inside) of a row this kernel element lies inside x.
        const std::int64_t first_inside = std::min(g.out_width, x0 < 0 ? (-x0 + stride_x - 1) / stride_x : 0);
        const std::int64_t last_inside = std::clamp(
            x0 < g.width ? (g.width - x0 + stride_x - 1) / stride_x : 0, first_inside, g.out_width);
        std::int64_t in_tile = (row - tile.row) * tile.columns;
        for_each_sample(g, tile, [&](std::int64_t sample, std::int64_t window, std::int64_t, std::int64_t n) {
            const std::int64_t plane = (sample * g.groups * g.channels + channel) * g.plane();
            std::int64_t out_y = window / g.out_width, out_x = window % g.out_width;
            for (std::int64_t done = 0; done < n; ++out_y, out_x = 0) {
                const std::int64_t length = std::min(g.out_width - out_x, n - done);
                const std::int64_t y = out_y * stride_y + y0;
                if (y < 0 || y >= g.height) {
                    run(in_tile, std::int64_t{0}, length, std::int64_t{0}, std::int64_t{0});
                } else {
                    const std::int64_t begin = std::clamp(first_inside, out_x, out_x + length);
                    const std::int64_t end = std::clamp(last_inside, begin, out_x + length);
                    run(in_tile, plane + y * g.width + begin * stride_x + x0, begin - out_x, end - begin,
                        out_x + length - end);
                }
                in_tile += length;
                done += length;
            }
        });
    }
}

/// Fills a tile from x.
template <class T>
void gather(const Geometry& g, std::int64_t group, const Tile& tile, const T* x, T* columns) {
    const std::int64_t stride = g.options.stride[1];
    for_each_run(g, group, tile,
                 [&](std::int64_t in_tile, std::int64_t offset, std::int64_t before, std::int64_t inside,
                     std::int64_t after) {
                     T* to = std::fill_n(columns + in_tile, before, T{0});
                     if (stride == 1) {
                         to = std::copy_n(x + offset, inside, to);
                     } else {
                         for (std::int64_t i = 0; i < inside; ++i) *to++ = x[offset + i * stride];
                     }
                     std::fill_n(to, after, T{0});
                 });
}

/// Adds a tile to the elements of x from which it was gathered.
template <class T>
void scatter(const Geometry& g, std::int64_t group, const Tile& tile, const T* columns, T* x) {
    const std::int64_t stride = g.options.stride[1];
    for_each_run(g, group, tile,
                 [&](std::int64_t in_tile, std::int64_t offset, std::int64_t before, std::int64_t inside,
                     std::int64_t) {
                     const T* from = columns + in_tile + before;
                     for (std::int64_t i = 0; i < inside; ++i) x[offset + i * stride] += from[i];
                 });
}

/// The columns of a tile from y (batch, filters, height', width'), as a dense matrix (filters of the group, columns).
template <class T>
void gather_filters(const Geometry& g, std::int64_t group, const Tile& tile, const T* y, T* to) {
    for_each_sample(
        g, tile, [&](std::int64_t sample, std::int64_t window, std::int64_t position, std::int64_t n) {
            const std::int64_t first = (sample * g.groups + group) * g.filters;
            for (std::int64_t f = 0; f < g.filters; ++f)
                std::copy_n(y + (first + f) * g.windows() + window, n, to + f * tile.columns + position);
        });
}

template <class T>
Matrix<const T> as_const(const Matrix<T>& x) {
    return {x.data, x.rows, x.columns, x.row_stride, x.column_stride};
}

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

/// How many columns the tiles of one group have. They are nearly equal, so that the last one is not tiny.
std::int64_t columns_per_tile(const Geometry& g) {
    const std::int64_t depth = g.depth(), places = g.places();
    const std::int64_t most =
        std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, depth + g.filters));
    const std::int64_t worth_while =
        std::min(places / least_tile_columns, work_of(g, depth, places) / least_piece_work);
    const std::int64_t tiles =
        std::max({std::int64_t{1}, (places + most - 1) / most, std::min(wanted_tiles, worth_while)});
    return ((places + tiles - 1) / tiles + 15) / 16 * 16;
}

template <class T>
void forward(const Geometry& g, const T* x, const T* weight, const std::vector<T>& bias, Tensor& y) {
    const std::int64_t depth = g.depth(), size = columns_per_tile(g);
    const std::int64_t tiles = (g.places() + size - 1) / size;
    parallel_for(
        g.groups * tiles, tiles_per_piece(work_of(g, depth, size)),
        [&](std::int64_t first, std::int64_t last) {
            const auto memory =
                std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>((depth + g.filters) * size));
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t group = i / tiles, column = i % tiles * size;
                const Tile tile{0, depth, column, std::min(size, g.places() - column)};
                const Matrix<T> columns{memory.get(), depth, tile.columns, tile.columns, 1};
                const Matrix<T> sums{memory.get() + depth * tile.columns, g.filters, tile.columns,
                                     tile.columns, 1};
                gather(g, group, tile, x, columns.data);
                for (std::int64_t f = 0; f < g.filters; ++f)
                    std::fill_n(sums.data + f * tile.columns, tile.columns,
                                bias.empty() ? T{0} : bias[static_cast<std::size_t>(group * g.filters + f)]);
                gemm(Matrix<const T>{weight + group * g.filters * depth, g.filters, depth, depth, 1},
                     as_const(columns), sums, /*accumulate=*/true);
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

/// dx (dense, zeros) from dcolumns = weight^T . dy. Windows overlap, so one thread processes whole samples: enough of
/// them to make a product worthwhile.
template <class T>
void input_gradient(const Geometry& g, const T* weight, const T* dy, T* dx) {
    const std::int64_t depth = g.depth();
    const std::int64_t samples = std::max<std::int64_t>(1, least_tile_columns / g.windows());
    const std::int64_t pieces = (g.batch + samples - 1) / samples;
    const std::int64_t size =
        std::min(samples * g.windows(),
                 std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, depth + g.filters)));
    const std::int64_t work = work_of(g, depth, samples * g.windows());
    parallel_for(g.groups * pieces, tiles_per_piece(work), [&](std::int64_t first, std::int64_t last) {
        const auto memory =
            std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>((depth + g.filters) * size));
        for (std::int64_t i = first; i < last; ++i) {
            const std::int64_t group = i / pieces, sample = i % pieces * samples;
            const std::int64_t end = std::min(g.batch, sample + samples) * g.windows();
            for (std::int64_t column = sample * g.windows(); column < end; column += size) {
                const Tile tile{0, depth, column, std::min(size, end - column)};
                const Matrix<T> slopes{memory.get(), g.filters, tile.columns, tile.columns, 1};
                const Matrix<T> columns{memory.get() + g.filters * tile.columns, depth, tile.columns,
                                        tile.columns, 1};
                gather_filters(g, group, tile, dy, slopes.data);
                gemm(Matrix<const T>{weight + group * g.filters * depth, g.filters, depth, depth, 1}
                         .transposed(),
                     as_const(slopes), columns, /*accumulate=*/false);
                scatter(g, group, tile, columns.data, dx);
            }
        }
    });
}

/// dweight (dense, zeros) = dy . columns^T. One thread takes some rows of the matrix of columns (some inputs of the
/// filters) and goes through all places in order.
template <class T>
void weight_gradient(const Geometry& g, const T* x, const T* dy, T* dweight) {
    constexpr std::int64_t least_rows = 16;
    const std::int64_t depth = g.depth();
    const std::int64_t rows =
        std::max(std::min(least_rows, depth), (depth + wanted_tiles - 1) / wanted_tiles);
    const std::int64_t blocks = rows == 0 ? 0 : (depth + rows - 1) / rows;
    const std::int64_t size =
        std::min((g.places() + 15) / 16 * 16,
                 std::max(least_tile_columns, tile_elements / std::max<std::int64_t>(1, rows + g.filters)));
    parallel_for(
        g.groups * blocks, tiles_per_piece(work_of(g, rows, g.places())),
        [&](std::int64_t first, std::int64_t last) {
            const auto memory =
                std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>((rows + g.filters) * size));
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t group = i / blocks, row = i % blocks * rows;
                for (std::int64_t column = 0; column < g.places(); column += size) {
                    const Tile tile{row, std::min(rows, depth - row), column,
                                    std::min(size, g.places() - column)};
                    const Matrix<T> columns{memory.get(), tile.rows, tile.columns, tile.columns, 1};
                    const Matrix<T> slopes{memory.get() + tile.rows * tile.columns, g.filters, tile.columns,
                                           tile.columns, 1};
                    gather(g, group, tile, x, columns.data);
                    gather_filters(g, group, tile, dy, slopes.data);
                    gemm(as_const(slopes), as_const(columns).transposed(),
                         Matrix<T>{dweight + group * g.filters * depth + row, g.filters, tile.rows, depth, 1},
                         /*accumulate=*/true);
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

/// Calls compute(T*) with a zeroed dense buffer of the shape of y in the compute type, and stores the result in y.
template <class T, class Compute>
void compute_dense(Tensor& y, const Compute& compute) {
    Tensor result = y.dtype() == dtype_of<T>() ? y : Tensor::empty(y.shape(), {dtype_of<T>(), y.device()});
    fill(result, 0);
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
        if (dx_or_none.defined()) {
            compute_dense<T>(dx_or_none, [&](T* dx) {
                if (slopes.count() == 0) return;
                input_gradient(g, dense<T>(weight).template data<T>(), slopes.data<T>(), dx);
            });
        }
        if (dweight_or_none.defined()) {
            compute_dense<T>(dweight_or_none, [&](T* dweight) {
                if (slopes.count() == 0) return;
                weight_gradient(g, dense<T>(x).template data<T>(), slopes.data<T>(), dweight);
            });
        }
        if (dbias_or_none.defined()) bias_gradient(slopes.data<T>(), dy.shape(), dbias_or_none);
    });
}

}  // namespace potluck::cpu
