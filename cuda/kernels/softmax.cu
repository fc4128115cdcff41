// Softmax and log-softmax along rows. A warp processes a row of up to 1024 elements, a block a longer one. Each thread
// accumulates its packs in (largest, sum of exponentials), the threads combine these by shuffles (and shared memory when
// there are several warps), and a second pass, which reads the row from the caches, writes the result.

#include <cmath>
#include <limits>

#include "cuda/kernels/rows.h"

namespace potluck::cuda {
namespace {

// Floor: reads and writes each element once (2 sizeof(T) bytes), two exponentials an element.
template <class T, bool logarithm>
__global__ void __launch_bounds__(most_row_threads)
    softmax_kernel(const T* x, std::int64_t rows, std::int64_t width, std::int64_t stride, T* y) {
    using Computed = compute_type<T>;
    for (std::int64_t row = first_row(); row < rows; row += row_step()) {
        const T* from = x + row * stride;
        T* to = y + row * width;
        auto total = ExponentialSum<Computed>::start();
        visit_row(from, width, [&](std::int64_t, const auto& pack) { total.add(pack); });
        total = join_row(total, [](auto& state, const auto& other) { state.join(other); });
        const auto sum = static_cast<Computed>(total.sum);
        const Computed shift = total.shift();
        // A row of -inf only gives 0, not 0 / 0.
        const Computed factor = sum == 0 ? Computed{0} : 1 / sum;
        const Computed logarithm_of_sum = std::log(sum);
        visit_row(from, width, [&](std::int64_t column, const auto& pack) {
            auto result = pack;
            for (int i = 0; i < pack.size; ++i) {
                const Computed value = to_compute(pack.values[i]) - shift;
                if constexpr (logarithm)
                    result.values[i] = from_compute<T>(sum == 0 ? -std::numeric_limits<Computed>::infinity()
                                                                : value - logarithm_of_sum);
                else
                    result.values[i] = from_compute<T>(std::exp(value) * factor);
            }
            store_pack(to + column, result);
        });
    }
}

/// A sum over the row, and whether any of its results is above -inf.
struct RowGradient {
    double sum;
    int alive;
    int unused;
};

// softmax: dx = y (dy - sum(y dy)).  log_softmax: dx = dy - exp(y) sum(dy).
// Floor: reads y and dy and writes dx once (3 sizeof(T) bytes); log_softmax: one exponential an element.
template <class T, bool logarithm>
__global__ void __launch_bounds__(most_row_threads)
    softmax_backward_kernel(const T* y, std::int64_t y_stride, const T* dy, std::int64_t dy_stride,
                            std::int64_t rows, std::int64_t width, T* dx) {
    using Computed = compute_type<T>;
    for (std::int64_t row = first_row(); row < rows; row += row_step()) {
        const T* values = y + row * y_stride;
        const T* gradients = dy + row * dy_stride;
        RowGradient total{0.0, 0, 0};
        visit_row(values, width, [&](std::int64_t column, const auto& pack) {
            const auto gradient = load_pack<pack.size>(gradients + column);
            Computed sum = 0;
            for (int i = 0; i < pack.size; ++i) {
                const Computed value = to_compute(pack.values[i]);
                sum += to_compute(gradient.values[i]) * (logarithm ? Computed{1} : value);
                if (logarithm && value != -std::numeric_limits<Computed>::infinity()) total.alive = 1;
            }
            total.sum += static_cast<double>(sum);
        });
        total = join_row(total, [](RowGradient& state, const RowGradient& other) {
            state.sum += other.sum;
            state.alive |= other.alive;
        });
        const auto sum = static_cast<Computed>(total.sum);
        visit_row(values, width, [&](std::int64_t column, const auto& pack) {
            const auto gradient = load_pack<pack.size>(gradients + column);
            auto result = pack;
            for (int i = 0; i < pack.size; ++i) {
                const Computed value = to_compute(pack.values[i]);
                const Computed slope = to_compute(gradient.values[i]);
                // The softmax of a row of -inf only is defined as 0, a constant: its gradient is 0.
                if constexpr (logarithm)
                    result.values[i] =
                        from_compute<T>(total.alive != 0 ? slope - std::exp(value) * sum : Computed{0});
                else
                    result.values[i] = from_compute<T>(value * (slope - sum));
            }
            store_pack(dx + row * width + column, result);
        });
    }
}

}  // namespace

void softmax(KernelDevice& device, const Tensor& x, bool logarithm, Tensor& y) {
    if (y.count() == 0) return;
    const cudaStream_t on = device.stream();
    const DenseRows rows = dense_rows(device, x);
    const dim3 block = row_block(rows.width);
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(logarithm ? softmax_kernel<T, true> : softmax_kernel<T, false>,
               blocks_for(rows.count, block.y), block, 0, on, elements_of<T>(rows.tensor), rows.count,
               rows.width, rows.stride, elements_of<T>(y));
    });
}

void softmax_backward(KernelDevice& device, const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) {
    if (dx.count() == 0) return;
    const cudaStream_t on = device.stream();
    const DenseRows values = dense_rows(device, y);
    const DenseRows gradients = dense_rows(device, dy);
    const dim3 block = row_block(values.width);
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(logarithm ? softmax_backward_kernel<T, true> : softmax_backward_kernel<T, false>,
               blocks_for(values.count, block.y), block, 0, on, elements_of<T>(values.tensor), values.stride,
               elements_of<T>(gradients.tensor), gradients.stride, values.count, values.width,
               elements_of<T>(dx));
    });
}

}  // namespace potluck::cuda
