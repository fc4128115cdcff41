// Unfolding of windows, and the reverse: for convolutions without a deterministic algorithm in cuDNN.
//
// Both kernels assign each element of their output to one thread of a one-dimensional grid. unfold() reads the element
// of the image for it; fold() sums all positions to which the element was copied, in the order of the kernel's
// elements, so that no two threads write to the same address and the bits are always the same.

#include "cuda/kernels/convolution.h"

#include "cuda/kernels/numbers.h"

namespace potluck::cuda {
namespace {

constexpr int threads = 256;

/// Sizes of the image and the kernel, and the options; [0] for height and [1] for width.
struct Geometry {
    std::int64_t channels;
    std::int64_t size[2], kernel[2], windows[2], stride[2], padding[2], dilation[2];
};

// Floor: writes channels * kernel * windows elements and reads the image once, sizeof(T) bytes each; the other reads of
// it come from the caches.
template <class T>
__global__ void unfold_kernel(const T* image, T* columns, Geometry g, std::int64_t count) {
    for (std::int64_t i = global_thread(); i < count; i += global_threads()) {
        std::int64_t rest = i;
        const std::int64_t window_column = rest % g.windows[1];
        rest /= g.windows[1];
        const std::int64_t window_row = rest % g.windows[0];
        rest /= g.windows[0];
        const std::int64_t kernel_column = rest % g.kernel[1];
        rest /= g.kernel[1];
        const std::int64_t kernel_row = rest % g.kernel[0];
        const std::int64_t channel = rest / g.kernel[0];
        const std::int64_t row = window_row * g.stride[0] + kernel_row * g.dilation[0] - g.padding[0];
        const std::int64_t column =
            window_column * g.stride[1] + kernel_column * g.dilation[1] - g.padding[1];
        const bool inside = row >= 0 && row < g.size[0] && column >= 0 && column < g.size[1];
        columns[i] = inside ? image[(channel * g.size[0] + row) * g.size[1] + column]
                            : from_compute<T>(compute_type<T>{0});
    }
}

/// The window whose kernel element `element` lies at position `at` of an axis; -1 if there is none.
__device__ inline std::int64_t window_at(const Geometry& g, int axis, std::int64_t at, std::int64_t element) {
    const std::int64_t begin = at + g.padding[axis] - element * g.dilation[axis];
    if (begin < 0 || begin % g.stride[axis] != 0) return -1;
    const std::int64_t window = begin / g.stride[axis];
    return window < g.windows[axis] ? window : -1;
}

// Floor: reads channels * kernel * windows elements and writes the image once, sizeof(T) bytes each; one addition for
// each element read.
template <class T>
__global__ void fold_kernel(const T* columns, T* image, Geometry g, std::int64_t count) {
    for (std::int64_t i = global_thread(); i < count; i += global_threads()) {
        const std::int64_t column = i % g.size[1];
        const std::int64_t row = i / g.size[1] % g.size[0];
        const std::int64_t channel = i / g.size[1] / g.size[0];
        compute_type<T> sum = 0;
        for (std::int64_t kernel_row = 0; kernel_row < g.kernel[0]; ++kernel_row) {
            const std::int64_t window_row = window_at(g, 0, row, kernel_row);
            if (window_row < 0) continue;
            for (std::int64_t kernel_column = 0; kernel_column < g.kernel[1]; ++kernel_column) {
                const std::int64_t window_column = window_at(g, 1, column, kernel_column);
                if (window_column < 0) continue;
                const std::int64_t place = (channel * g.kernel[0] + kernel_row) * g.kernel[1] + kernel_column;
                sum +=
                    to_compute(columns[(place * g.windows[0] + window_row) * g.windows[1] + window_column]);
            }
        }
        image[i] = from_compute<T>(sum);
    }
}

Geometry geometry_of(const Tensor& image, std::array<std::int64_t, 2> kernel,
                     std::array<std::int64_t, 2> windows, const WindowSpec& options) {
    Geometry g{};
    g.channels = image.size(0);
    for (int axis = 0; axis < 2; ++axis) {
        const auto i = static_cast<std::size_t>(axis);
        g.size[axis] = image.size(1 + axis);
        g.kernel[axis] = kernel[i];
        g.windows[axis] = windows[i];
        g.stride[axis] = options.stride[i];
        g.padding[axis] = options.padding[i];
        g.dilation[axis] = options.dilation[i];
    }
    return g;
}

}  // namespace

void unfold(const Tensor& image, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
            const WindowSpec& options, Tensor& columns, cudaStream_t stream) {
    const Geometry g = geometry_of(image, kernel, windows, options);
    visit_device_floating(image.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(unfold_kernel<T>, dim3(blocks_for(columns.count(), threads)), dim3(threads), 0, stream,
               elements_of<T>(image), elements_of<T>(columns), g, columns.count());
    });
}

void fold(const Tensor& columns, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
          const WindowSpec& options, Tensor& image, cudaStream_t stream) {
    const Geometry g = geometry_of(image, kernel, windows, options);
    visit_device_floating(image.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(fold_kernel<T>, dim3(blocks_for(image.count(), threads)), dim3(threads), 0, stream,
               elements_of<T>(columns), elements_of<T>(image), g, image.count());
    });
}

}  // namespace potluck::cuda
