#include "core/measure.h"

#include "core/backend.h"
#include "core/capture.h"
#include "core/op_scope.h"

namespace potluck {

SquareSums sum_of_squares(std::span<const Tensor> tensors) {
    SquareSums sums;
    if (tensors.empty()) return sums;
    const Device device = tensors.front().device();
    detail::require_readable(OpScope::current(), device);
    Tensor result = Tensor::empty({3}, {DType::f64, device});
    backend(device).sum_of_squares(tensors, result);
    static_assert(sizeof(sums) == 3 * sizeof(double));
    backend(device).copy_to_host(&sums, result.raw_data(), sizeof(sums));
    return sums;
}

double largest_magnitude(std::span<const Tensor> tensors) {
    if (tensors.empty()) return 0.0;
    const Device device = tensors.front().device();
    detail::require_readable(OpScope::current(), device);
    Tensor result = Tensor::empty({}, {DType::f64, device});
    backend(device).largest_magnitude(tensors, result);
    return result.item<double>();
}

}  // namespace potluck
