#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu/copy.h"
#include "core/cpu/rows.h"
#include "core/kernel_specs.h"

// Pooling. A plane is the height * width elements of one channel of one sample. Each thread processes whole planes,
// gathered into dense memory of the compute type, so that overlapping windows add their gradients in a fixed order.

namespace potluck::cpu {
namespace {

constexpr std::int64_t planes_of(const Shape& shape) { return shape[0] * shape[1]; }
constexpr std::int64_t plane_size(const Shape& shape) { return shape[2] * shape[3]; }

/// The elements of a window along one axis: begin, begin + step, .. below end, all inside the input.
struct Span {
    std::int64_t begin, end, step;
    std::int64_t with_padding;  // their number including padding, but not positions beyond it

    std::int64_t count() const { return end <= begin ? 0 : (end - begin + step - 1) / step; }
};

Span window_along(std::size_t axis, std::int64_t window, std::int64_t size, const PoolSpec& options) {
    const std::int64_t step = options.dilation[axis], padding = options.padding[axis];
    const std::int64_t start = window * options.stride[axis] - padding;
    const std::int64_t reach = start + (options.kernel[axis] - 1) * step + 1;
    const std::int64_t outside = start < 0 ? (-start + step - 1) / step : 0;  // elements before the input
    return {start + outside * step, std::min(reach, size), step,
            (std::min(reach, size + padding) - start + step - 1) / step};
}

std::vector<Span> windows_along(std::size_t axis, std::int64_t windows, std::int64_t size,
                                const PoolSpec& options) {
    std::vector<Span> spans;
    for (std::int64_t i = 0; i < windows; ++i) spans.push_back(window_along(axis, i, size, options));
    return spans;
}

/// Calls body(window, rows, columns) for the windows of a plane, in row-major order.
template <class Body>
void for_each_window(const std::vector<Span>& rows, const std::vector<Span>& columns, const Body& body) {
    std::int64_t window = 0;
    for (const Span& row_span : rows)
        for (const Span& column_span : columns) body(window++, row_span, column_span);
}

/// The divisor of the mean over a window.
double divisor_of(const Span& rows, const Span& columns, bool count_padding) {
    return static_cast<double>(count_padding ? rows.with_padding * columns.with_padding
                                             : rows.count() * columns.count());
}

/// n consecutive elements of a tensor in row-major order, as dense numbers.
template <class T>
void read_all(BlockReader<T>& reader, std::int64_t first, std::int64_t n, T* to) {
    for (std::int64_t i = 0; i < n; i += block_size) {
        const std::int64_t length = std::min(block_size, n - i);
        std::copy_n(reader.read(first + i, length), length, to + i);
    }
}

/// The reverse: writes dense numbers to a contiguous tensor.
template <class T>
void write_all(const T* from, Tensor& y, std::int64_t first, std::int64_t n) {
    if (n > 0)
        convert_from(from, static_cast<std::byte*>(y.raw_data()) + first * size_of(y.dtype()), y.dtype(), 1,
                     n);
}

/// Calls make_plane(plane, x, y) for every plane, with plane x of `from`, dense, and plane y of `to`, initialised to
/// zeros.
template <class T, class MakePlane>
void for_each_plane(const Tensor& from, Tensor& to, const MakePlane& make_plane) {
    const std::int64_t from_size = plane_size(from.shape()), to_size = plane_size(to.shape());
    parallel_for(to_size == 0 ? 0 : planes_of(to.shape()), rows_per_piece(from_size + to_size),
                 [&](std::int64_t first, std::int64_t last) {
                     BlockReader<T> reader(from);
                     std::vector<T> x(static_cast<std::size_t>(from_size));
                     std::vector<T> y(static_cast<std::size_t>(to_size));
                     for (std::int64_t plane = first; plane < last; ++plane) {
                         read_all(reader, plane * from_size, from_size, x.data());
                         std::fill(y.begin(), y.end(), T{0});
                         make_plane(plane, x.data(), y.data());
                         write_all(y.data(), to, plane * to_size, to_size);
                     }
                 });
}

}  // namespace

void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) {
    const std::int64_t width = x.size(3), windows = plane_size(y.shape());
    const std::vector<Span> all_rows = windows_along(0, y.size(2), x.size(2), options);
    const std::vector<Span> all_columns = windows_along(1, y.size(3), width, options);
    auto* const place_of = indices.data<std::int64_t>();
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        for_each_plane<T>(x, y, [&](std::int64_t plane, const T* from, T* to) {
            for_each_window(
                all_rows, all_columns, [&](std::int64_t window, const Span& rows, const Span& columns) {
                    std::int64_t best = rows.begin * width + columns.begin;
                    for (std::int64_t row = rows.begin; row < rows.end; row += rows.step)
                        for (std::int64_t column = columns.begin; column < columns.end;
                             column += columns.step) {
                            const std::int64_t at = row * width + column;
                            const bool is_first_nan = std::isnan(from[at]) && !std::isnan(from[best]);
                            if (from[at] > from[best] || is_first_nan) best = at;
                        }
                    to[window] = from[best];
                    place_of[plane * windows + window] = best;
                });
        });
    });
}

void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec&, Tensor& dx) {
    const std::int64_t windows = plane_size(indices.shape());
    const Tensor dense_indices =
        indices.is_contiguous() ? indices : Tensor::empty(indices.shape(), {DType::i64, indices.device()});
    if (!indices.is_contiguous()) {
        Tensor to = dense_indices;
        copy(indices, to);
    }
    const auto* const place_of = dense_indices.data<std::int64_t>();
    visit_floating_compute(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        for_each_plane<T>(dy, dx, [&](std::int64_t plane, const T* from, T* to) {
            for (std::int64_t window = 0; window < windows; ++window)
                to[place_of[plane * windows + window]] += from[window];
        });
    });
}

void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y) {
    const std::int64_t width = x.size(3);
    const std::vector<Span> all_rows = windows_along(0, y.size(2), x.size(2), options);
    const std::vector<Span> all_columns = windows_along(1, y.size(3), width, options);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        for_each_plane<T>(x, y, [&](std::int64_t, const T* from, T* to) {
            for_each_window(
                all_rows, all_columns, [&](std::int64_t window, const Span& rows, const Span& columns) {
                    double total = 0;
                    for (std::int64_t row = rows.begin; row < rows.end; row += rows.step)
                        for (std::int64_t column = columns.begin; column < columns.end;
                             column += columns.step)
                            total += static_cast<double>(from[row * width + column]);
                    to[window] = static_cast<T>(total / divisor_of(rows, columns, options.count_padding));
                });
        });
    });
}

void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx) {
    const std::int64_t width = dx.size(3);
    const std::vector<Span> all_rows = windows_along(0, dy.size(2), dx.size(2), options);
    const std::vector<Span> all_columns = windows_along(1, dy.size(3), width, options);
    visit_floating_compute(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        for_each_plane<T>(dy, dx, [&](std::int64_t, const T* from, T* to) {
            for_each_window(
                all_rows, all_columns, [&](std::int64_t window, const Span& rows, const Span& columns) {
                    const T share = static_cast<T>(static_cast<double>(from[window]) /
                                                   divisor_of(rows, columns, options.count_padding));
                    for (std::int64_t row = rows.begin; row < rows.end; row += rows.step)
                        for (std::int64_t column = columns.begin; column < columns.end;
                             column += columns.step)
                            to[row * width + column] += share;
                });
        });
    });
}

}  // namespace potluck::cpu
