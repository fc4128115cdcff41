// Pooling. Each thread computes one element of the result from the elements of the input that belong to it: in forward
// those of its window, in backward the windows that contain it (in their order, so that sums have a fixed order and
// need no atomics). Adjacent threads process adjacent columns. blockIdx.y counts planes (one channel of one sample).

#include <cmath>
#include <limits>

#include "cuda/kernel_device.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {
namespace {

constexpr unsigned block_threads = 128;
/// The limit of a grid's second dimension.
constexpr std::int64_t most_planes = 65535;

/// A tensor (batch, channels, height, width) of any strides.
template <class T>
struct Planes {
    T* data;
    std::int64_t channels, height, width;
    std::int64_t strides[4];

    __device__ std::int64_t cells() const { return height * width; }
    __device__ T* plane(std::int64_t index) const {
        return data + index / channels * strides[0] + index % channels * strides[1];
    }
    __device__ std::int64_t offset(std::int64_t row, std::int64_t column) const {
        return row * strides[2] + column * strides[3];
    }
};
template <class T>
Planes<T> planes_of(const Tensor& x) {
    Planes<T> planes{elements_of<T>(x), x.size(1), x.size(2), x.size(3), {}};
    for (std::size_t axis = 0; axis < 4; ++axis) planes.strides[axis] = x.strides()[axis];
    return planes;
}

/// The windows along one axis: window w begins at w * stride - padding and has `kernel` elements, `dilation` apart.
struct Windows {
    std::int64_t kernel, stride, padding, dilation;
    std::int64_t size;   // of the input
    std::int64_t count;  // of windows

    /// Calls visit(position) for the elements of a window that lie inside the input, in order.
    template <class Visit>
    __device__ void visit_elements(std::int64_t window, Visit visit) const {
        const std::int64_t begin = window * stride - padding;
        for (std::int64_t i = 0; i < kernel; ++i) {
            const std::int64_t position = begin + i * dilation;
            if (position >= 0 && position < size) visit(position);
        }
    }
    /// Calls visit(window) for the windows that contain the element, in order.
    template <class Visit>
    __device__ void visit_windows(std::int64_t position, Visit visit) const {
        for (std::int64_t i = kernel - 1; i >= 0; --i) {
            const std::int64_t begin = position + padding - i * dilation;
            if (begin >= 0 && begin % stride == 0 && begin / stride < count) visit(begin / stride);
        }
    }
    /// Number of elements of a window: inside the input, or (with_padding) inside the input and its padding.
    __device__ std::int64_t elements(std::int64_t window, bool with_padding) const {
        const std::int64_t begin = window * stride - padding;
        const std::int64_t margin = with_padding ? padding : 0;
        std::int64_t elements = 0;
        for (std::int64_t i = 0; i < kernel; ++i) {
            const std::int64_t position = begin + i * dilation;
            if (position >= -margin && position < size + margin) ++elements;
        }
        return elements;
    }
};
struct WindowGrid {
    Windows rows, columns;
    bool count_padding;

    /// The divisor of the mean over a window.
    __device__ double divisor(std::int64_t row, std::int64_t column) const {
        return static_cast<double>(rows.elements(row, count_padding) *
                                   columns.elements(column, count_padding));
    }
};
/// The windows over the planes of `input`, one per element of `output`.
WindowGrid window_grid(const Tensor& input, const Tensor& output, const PoolSpec& options) {
    const auto along = [&](std::size_t axis) {
        return Windows{options.kernel[axis],   options.stride[axis],    options.padding[axis],
                       options.dilation[axis], input.shape()[2 + axis], output.shape()[2 + axis]};
    };
    return {along(0), along(1), options.count_padding};
}

/// Launches a kernel with one thread for each element of `result`.
template <class... Parameters>
void launch_over(const Tensor& result, void (*kernel)(Parameters...), cudaStream_t on,
                 std::type_identity_t<Parameters>... arguments) {
    const std::int64_t planes = result.size(0) * result.size(1);
    const auto shown = static_cast<unsigned>(planes < most_planes ? planes : most_planes);
    launch(kernel, dim3(blocks_for(result.size(2) * result.size(3), block_threads), shown), block_threads, 0,
           on, arguments...);
}

/// Calls make(plane, row, column, position in the result) for this thread's elements.
template <class Make>
__device__ void for_each_result(std::int64_t planes, std::int64_t height, std::int64_t width, Make make) {
    const std::int64_t cell = global_thread();
    if (cell >= height * width) return;
    const std::int64_t row = cell / width;
    for (std::int64_t plane = blockIdx.y; plane < planes; plane += gridDim.y)
        make(plane, row, cell - row * width, plane * height * width + cell);
}

// Floor: reads x once (windows overlap in the caches), writes y and 8 bytes of place for each result.
template <class T>
__global__ void __launch_bounds__(block_threads)
    max_pool_kernel(Planes<const T> x, WindowGrid windows, std::int64_t planes, T* y, std::int64_t* indices) {
    for_each_result(planes, windows.rows.count, windows.columns.count,
                    [&](std::int64_t plane, std::int64_t row, std::int64_t column, std::int64_t result) {
                        const T* from = x.plane(plane);
                        compute_type<T> best = -std::numeric_limits<compute_type<T>>::infinity();
                        std::int64_t place = -1;  // none yet
                        windows.rows.visit_elements(row, [&](std::int64_t i) {
                            windows.columns.visit_elements(column, [&](std::int64_t j) {
                                const auto value = to_compute(from[x.offset(i, j)]);
                                const bool is_first_nan = std::isnan(value) && !std::isnan(best);
                                if (place >= 0 && !(value > best) && !is_first_nan) return;
                                best = value;
                                place = i * x.width + j;
                            });
                        });
                        y[result] = from_compute<T>(best);
                        indices[result] = place;
                    });
}

// Floor: reads indices (8 bytes) and dy, writes dx once.
template <class T>
__global__ void __launch_bounds__(block_threads)
    max_pool_backward_kernel(Planes<const std::int64_t> indices, Planes<const T> dy, WindowGrid windows,
                             std::int64_t planes, T* dx) {
    for_each_result(planes, windows.rows.size, windows.columns.size,
                    [&](std::int64_t plane, std::int64_t row, std::int64_t column, std::int64_t result) {
                        const std::int64_t* place = indices.plane(plane);
                        const T* gradient = dy.plane(plane);
                        const std::int64_t here = row * windows.columns.size + column;
                        compute_type<T> total = 0;
                        windows.rows.visit_windows(row, [&](std::int64_t i) {
                            windows.columns.visit_windows(column, [&](std::int64_t j) {
                                if (place[indices.offset(i, j)] == here)
                                    total += to_compute(gradient[dy.offset(i, j)]);
                            });
                        });
                        dx[result] = from_compute<T>(total);
                    });
}

// Floor: reads x once (windows overlap in the caches), writes y once.
template <class T>
__global__ void __launch_bounds__(block_threads)
    average_pool_kernel(Planes<const T> x, WindowGrid windows, std::int64_t planes, T* y) {
    for_each_result(planes, windows.rows.count, windows.columns.count,
                    [&](std::int64_t plane, std::int64_t row, std::int64_t column, std::int64_t result) {
                        const T* from = x.plane(plane);
                        double total = 0;
                        windows.rows.visit_elements(row, [&](std::int64_t i) {
                            windows.columns.visit_elements(column, [&](std::int64_t j) {
                                total += static_cast<double>(to_compute(from[x.offset(i, j)]));
                            });
                        });
                        y[result] = from_compute<T>(total / windows.divisor(row, column));
                    });
}

// Floor: reads dy once (windows overlap in the caches), writes dx once.
template <class T>
__global__ void __launch_bounds__(block_threads)
    average_pool_backward_kernel(Planes<const T> dy, WindowGrid windows, std::int64_t planes, T* dx) {
    for_each_result(
        planes, windows.rows.size, windows.columns.size,
        [&](std::int64_t plane, std::int64_t row, std::int64_t column, std::int64_t result) {
            const T* gradient = dy.plane(plane);
            compute_type<T> total = 0;
            windows.rows.visit_windows(row, [&](std::int64_t i) {
                windows.columns.visit_windows(column, [&](std::int64_t j) {
                    total += static_cast<compute_type<T>>(
                        static_cast<double>(to_compute(gradient[dy.offset(i, j)])) / windows.divisor(i, j));
                });
            });
            dx[result] = from_compute<T>(total);
        });
}

}  // namespace

void max_pool(KernelDevice& device, const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) {
    const cudaStream_t on = device.stream();
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch_over(y, max_pool_kernel<T>, on, planes_of<const T>(x), window_grid(x, y, options),
                    y.size(0) * y.size(1), elements_of<T>(y), elements_of<std::int64_t>(indices));
    });
}

void max_pool_backward(KernelDevice& device, const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                       Tensor& dx) {
    const cudaStream_t on = device.stream();
    visit_device_floating(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch_over(dx, max_pool_backward_kernel<T>, on, planes_of<const std::int64_t>(indices),
                    planes_of<const T>(dy), window_grid(dx, dy, options), dx.size(0) * dx.size(1),
                    elements_of<T>(dx));
    });
}

void average_pool(KernelDevice& device, const Tensor& x, const PoolSpec& options, Tensor& y) {
    const cudaStream_t on = device.stream();
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch_over(y, average_pool_kernel<T>, on, planes_of<const T>(x), window_grid(x, y, options),
                    y.size(0) * y.size(1), elements_of<T>(y));
    });
}

void average_pool_backward(KernelDevice& device, const Tensor& dy, const PoolSpec& options, Tensor& dx) {
    const cudaStream_t on = device.stream();
    visit_device_floating(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch_over(dx, average_pool_backward_kernel<T>, on, planes_of<const T>(dy),
                    window_grid(dx, dy, options), dx.size(0) * dx.size(1), elements_of<T>(dx));
    });
}

}  // namespace potluck::cuda
