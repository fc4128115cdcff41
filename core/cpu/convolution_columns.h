#pragma once

// The matrix of columns of a convolution (core/cpu/convolution.cpp): how it is divided into tiles, how a tile is gathered
// from x, and how it is added back to x.
//
// Most tiles consist of whole rows of outputs. The part of x that such a tile reads is copied with its border of zeros
// first; with a stride along a row, elements that are one stride apart become neighbours. Then each row of outputs is a
// run without gaps in that copy, whatever the position in the kernel, and a few vector moves copy it.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cpu/workspace.h"
#include "core/kernel_specs.h"
#include "core/tensor.h"

namespace potluck::cpu {

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

/// Divides the columns into nearly equal tiles of at most `most` columns where that is possible: into some whole samples,
/// or into parts of one sample, cut between rows of outputs. Only rows that are longer than `most` are cut, too.
class Tiling {
public:
    Tiling(const Geometry& g, std::int64_t most) : windows_(g.windows()), batch_(g.batch) {
        if (windows_ <= most) {
            const std::int64_t largest = most / windows_;
            const std::int64_t tiles = (batch_ + largest - 1) / largest;
            samples_ = std::max<std::int64_t>(1, (batch_ + tiles - 1) / std::max<std::int64_t>(1, tiles));
        } else {
            unit_ = g.out_width <= most ? g.out_width : std::min<std::int64_t>(16, most);
            units_ = (windows_ + unit_ - 1) / unit_;
            const std::int64_t largest = most / unit_;
            parts_ = (units_ + largest - 1) / largest;
        }
    }

    std::int64_t count() const { return (batch_ + samples_ - 1) / samples_ * parts_; }
    std::int64_t parts() const {
        return parts_;
    }  // consecutive tiles that belong to the same sample (or samples)

    /// Tile i, with the given rows.
    Tile at(std::int64_t i, std::int64_t row, std::int64_t rows) const {
        const std::int64_t sample = i / parts_ * samples_;
        if (parts_ == 1)
            return {row, rows, sample * windows_, std::min(samples_, batch_ - sample) * windows_};
        const auto border = [&](std::int64_t part) {
            return std::min(windows_, part * units_ / parts_ * unit_);
        };
        const std::int64_t first = border(i % parts_);
        return {row, rows, sample * windows_ + first, border(i % parts_ + 1) - first};
    }

    std::int64_t most_columns() const {
        return parts_ == 1 ? samples_ * windows_ : std::min(windows_, (units_ + parts_ - 1) / parts_ * unit_);
    }

private:
    std::int64_t windows_, batch_;
    std::int64_t samples_ = 1;  // in a tile
    std::int64_t parts_ = 1;    // of a sample, made of units of as many columns
    std::int64_t unit_ = 1, units_ = 1;
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

namespace detail {

/// Calls run(width), with a constant for the usual widths.
template <class Run>
void with_constant(std::int64_t width, const Run& run) {
    switch (width) {
        case 4:
            return run(std::integral_constant<std::int64_t, 4>());
        case 8:
            return run(std::integral_constant<std::int64_t, 8>());
        case 16:
            return run(std::integral_constant<std::int64_t, 16>());
        case 32:
            return run(std::integral_constant<std::int64_t, 32>());
        case 64:
            return run(std::integral_constant<std::int64_t, 64>());
        default:
            run(width);
    }
}

/// to = from, or to += from, for a row of outputs.
template <bool add, class T, class Width>
void move_row(T* to, const T* from, Width width) {
    if constexpr (std::is_same_v<Width, std::int64_t>) {
        for (std::int64_t i = 0; i < width; ++i) to[i] = add ? to[i] + from[i] : from[i];
    } else {
        constexpr std::int64_t bytes =
            std::min<std::int64_t>(64, width * static_cast<std::int64_t>(sizeof(T)));
        constexpr std::int64_t vectors = width * static_cast<std::int64_t>(sizeof(T)) / bytes;
        typedef T InMemory __attribute__((vector_size(bytes), aligned(alignof(T)), may_alias));
        auto* const to_vectors = reinterpret_cast<InMemory*>(to);
        const auto* const from_vectors = reinterpret_cast<const InMemory*>(from);
#pragma GCC unroll 8
        for (std::int64_t i = 0; i < vectors; ++i)
            to_vectors[i] = add ? to_vectors[i] + from_vectors[i] : from_vectors[i];
    }
}

/// What whole rows of outputs of one sample read of some channels of x, with the border of zeros. A row is stored as
/// `phases` rows: element i of phase p is the element p + i * stride of the row.
struct Window {
    std::int64_t first_channel, channels;
    std::int64_t y, x;           // of the first element, in the plane; negative in the border
    std::int64_t rows, columns;  // of a channel; columns of a phase
    std::int64_t phases;

    /// Of rows of outputs [first, first + count), for the channels of the rows of a tile.
    Window(const Geometry& g, const Tile& tile, std::int64_t first, std::int64_t count)
        : first_channel(tile.row / g.kernel_size()),
          channels((tile.row + tile.rows + g.kernel_size() - 1) / g.kernel_size() - first_channel),
          y(first * g.options.stride[0] - g.options.padding[0]),
          x(-g.options.padding[1]),
          rows((count - 1) * g.options.stride[0] + (g.kernel_height - 1) * g.options.dilation[0] + 1),
          columns(g.out_width + (g.kernel_width - 1) * g.options.dilation[1] / g.options.stride[1]),
          phases(std::min(g.options.stride[1], (g.kernel_width - 1) * g.options.dilation[1] + 1)) {}

    std::int64_t elements() const { return channels * rows * phases * columns; }
    /// Where the element (y, x) of a kernel meets the first window.
    std::int64_t offset(const Geometry& g, std::int64_t channel, std::int64_t kernel_y,
                        std::int64_t kernel_x) const {
        const std::int64_t in_row = kernel_x * g.options.dilation[1];
        return (((channel - first_channel) * rows + kernel_y * g.options.dilation[0]) * phases +
                in_row % g.options.stride[1]) *
                   columns +
               in_row / g.options.stride[1];
    }

    /// Calls run(in_window, in_plane, count) for the runs of every row and phase that lie in x: elements in_window + i
    /// of the window are the elements in_plane + i * stride, counted from the plane of the first channel.
    template <class Run>
    void for_each_run(const Geometry& g, const Run& run) const {
        const std::int64_t stride = g.options.stride[1];
        for (std::int64_t channel = 0; channel < channels; ++channel)
            for (std::int64_t row = std::max<std::int64_t>(0, -y); row < std::min(rows, g.height - y); ++row)
                for (std::int64_t phase = 0; phase < phases; ++phase) {
                    const std::int64_t from = x + phase;
                    const std::int64_t first = from < 0 ? (-from + stride - 1) / stride : 0;
                    const std::int64_t end =
                        from < g.width ? std::min(columns, (g.width - from + stride - 1) / stride) : 0;
                    if (first < end)
                        run(((channel * rows + row) * phases + phase) * columns + first,
                            channel * g.plane() + (y + row) * g.width + from + first * stride, end - first);
                }
    }
};

struct WindowMemory;  // the owner of its workspace

inline bool has_whole_rows(const Geometry& g, const Tile& tile) {
    return tile.column % g.out_width == 0 && tile.columns % g.out_width == 0;
}

/// Calls run(in_tile, in_window) for each run of a row of outputs in the tile, in the samples' part that begins at
/// `position` in the tile.
template <class Run>
void for_each_row(const Geometry& g, const Tile& tile, const Window& window, std::int64_t position,
                  std::int64_t count, const Run& run) {
    const std::int64_t next = g.options.stride[0] * window.phases * window.columns;
    for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
        const std::int64_t in_kernel = row % g.kernel_size();
        std::int64_t in_window =
            window.offset(g, row / g.kernel_size(), in_kernel / g.kernel_width, in_kernel % g.kernel_width);
        std::int64_t in_tile = (row - tile.row) * tile.columns + position;
        for (std::int64_t i = 0; i < count; ++i, in_tile += g.out_width, in_window += next)
            run(in_tile, in_window);
    }
}

/// Calls part(window, memory, first element of the window's first plane in x, position, rows of outputs) for each sample
/// of a tile of whole rows.
template <class T, class Part>
void for_each_window(const Geometry& g, std::int64_t group, const Tile& tile, const Part& part) {
    for_each_sample(
        g, tile, [&](std::int64_t sample, std::int64_t first, std::int64_t position, std::int64_t n) {
            const Window window(g, tile, first / g.out_width, n / g.out_width);
            const std::int64_t plane =
                ((sample * g.groups + group) * g.channels + window.first_channel) * g.plane();
            part(window, workspace<WindowMemory, T>(window.elements()), plane, position, n / g.out_width);
        });
}

/// Traverses a tile of any columns in runs along one row of outputs. run(in_tile, offset, before, inside, after) gets the
/// position of the run in the tile; `before` of its elements lie left of x, `inside` elements lie in x, starting at
/// `offset` and one stride apart, and `after` elements lie right of it.
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

}  // namespace detail

/// Fills a tile from x.
template <class T>
void gather(const Geometry& g, std::int64_t group, const Tile& tile, const T* x, T* columns) {
    const std::int64_t stride = g.options.stride[1];
    if (!detail::has_whole_rows(g, tile)) {
        detail::for_each_run(g, group, tile,
                             [&](std::int64_t in_tile, std::int64_t offset, std::int64_t before,
                                 std::int64_t inside, std::int64_t after) {
                                 T* to = std::fill_n(columns + in_tile, before, T{0});
                                 for (std::int64_t i = 0; i < inside; ++i) *to++ = x[offset + i * stride];
                                 std::fill_n(to, after, T{0});
                             });
        return;
    }
    detail::for_each_window<T>(
        g, group, tile,
        [&](const detail::Window& window, T* memory, std::int64_t plane, std::int64_t position,
            std::int64_t count) {
            std::fill_n(memory, window.elements(), T{0});
            window.for_each_run(g, [&](std::int64_t in_window, std::int64_t in_plane, std::int64_t n) {
                const T* from = x + plane + in_plane;
                T* to = memory + in_window;
                if (stride == 1)
                    std::copy_n(from, n, to);
                else
                    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
            });
            detail::with_constant(g.out_width, [&](auto width) {
                detail::for_each_row(
                    g, tile, window, position, count, [&](std::int64_t in_tile, std::int64_t in_window) {
                        detail::move_row<false>(columns + in_tile, memory + in_window, width);
                    });
            });
        });
}

/// Adds a tile to the elements of x from which it was gathered.
template <class T>
void scatter(const Geometry& g, std::int64_t group, const Tile& tile, const T* columns, T* x) {
    const std::int64_t stride = g.options.stride[1];
    if (!detail::has_whole_rows(g, tile)) {
        detail::for_each_run(g, group, tile,
                             [&](std::int64_t in_tile, std::int64_t offset, std::int64_t before,
                                 std::int64_t inside, std::int64_t) {
                                 const T* from = columns + in_tile + before;
                                 for (std::int64_t i = 0; i < inside; ++i) x[offset + i * stride] += from[i];
                             });
        return;
    }
    detail::for_each_window<T>(
        g, group, tile,
        [&](const detail::Window& window, T* memory, std::int64_t plane, std::int64_t position,
            std::int64_t count) {
            std::fill_n(memory, window.elements(), T{0});
            detail::with_constant(g.out_width, [&](auto width) {
                detail::for_each_row(g, tile, window, position, count,
                                     [&](std::int64_t in_tile, std::int64_t in_window) {
                                         detail::move_row<true>(memory + in_window, columns + in_tile, width);
                                     });
            });
            window.for_each_run(g, [&](std::int64_t in_window, std::int64_t in_plane, std::int64_t n) {
                T* to = x + plane + in_plane;
                const T* from = memory + in_window;
                if (stride == 1)
                    for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
                else
                    for (std::int64_t i = 0; i < n; ++i) to[i * stride] += from[i];
            });
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

}  // namespace potluck::cpu
