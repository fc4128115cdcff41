// Convolution and its gradients by cuDNN. Where cuDNN has no deterministic algorithm (or a tensor exceeds its limit of
// 2^31 elements), each image becomes a matrix product of its unfolded windows and the weights.

#include <array>

#include "cuda/convolution_plan.h"
#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/convolution.h"
#include "cuda/resources.h"

namespace potluck {
namespace {

using cuda::contiguous;
using cuda::ConvolutionPass;
using cuda::ConvolutionPlan;
using cuda::ConvolutionShape;

std::array<std::int64_t, 4> sizes_of(const Tensor& x) { return {x.size(0), x.size(1), x.size(2), x.size(3)}; }

/// Entry `index` along the first axis of a contiguous tensor, in another shape.
Tensor part(const Tensor& x, std::int64_t index, const Shape& shape) {
    return x.alias(shape, contiguous_strides(shape), x.offset() + index * (x.count() / x.size(0)));
}

Tensor transposed(const Tensor& x) {
    Shape shape = x.shape();
    Strides strides = x.strides();
    std::swap(shape[1], shape[2]);
    std::swap(strides[1], strides[2]);
    return x.alias(shape, strides, x.offset());
}

/// The same by matrix products, one image at a time: all tensors contiguous, f32 or f64.
void convolve_unfolded(CudaBackend& device, ConvolutionPass pass, const Tensor& x, const Tensor& weight,
                       const Tensor& y, const ConvolutionSpec& options, bool accumulate) {
    const cudaStream_t stream = device.stream();
    const std::int64_t groups = options.groups;
    const std::array<std::int64_t, 2> kernel{weight.size(2), weight.size(3)}, windows{y.size(2), y.size(3)};
    const std::int64_t depth = weight.size(1) * kernel[0] * kernel[1];  // terms of each element of y
    const std::int64_t filters = weight.size(0) / groups, places = windows[0] * windows[1];
    Tensor weights = weight.alias({groups, filters, depth}, {filters * depth, depth, 1}, weight.offset());
    Tensor columns = Tensor::empty({groups, depth, places}, {x.dtype(), x.device()});
    for (std::int64_t image = 0; image < x.size(0); ++image) {
        Tensor x_image = part(x, image, {x.size(1), x.size(2), x.size(3)});
        Tensor y_image = part(y, image, {groups, filters, places});
        switch (pass) {
            case ConvolutionPass::forward:
                cuda::unfold(x_image, kernel, windows, options, columns, stream);
                device.matmul(weights, columns, y_image, accumulate);
                break;
            case ConvolutionPass::data_gradient:
                device.matmul(transposed(weights), y_image, columns, /*accumulate=*/false);
                cuda::fold(columns, kernel, windows, options, x_image, stream);
                break;
            case ConvolutionPass::weight_gradient:
                cuda::unfold(x_image, kernel, windows, options, columns, stream);
                device.matmul(y_image, transposed(columns), weights, accumulate || image > 0);
                break;
        }
    }
}

/// One pass over contiguous tensors, none of them empty. Its result is `x`, `weight` or `y` (added to when
/// `accumulate`).
void convolve(CudaBackend& device, cuda::ConvolutionPlans& plans, ConvolutionPass pass, const Tensor& x,
              const Tensor& weight, const Tensor& y, const ConvolutionSpec& options, bool accumulate) {
    const ConvolutionShape shape{
        pass,        x.dtype(),      device.options().tf32, sizes_of(x),      sizes_of(weight),
        sizes_of(y), options.stride, options.padding,       options.dilation, options.groups};
    const cudnnHandle_t library = device.cudnn();
    const auto plan = plans.get(shape, [&] { return std::make_shared<ConvolutionPlan>(library, shape); });
    if (plan->exists()) {
        const Tensor workspace = Tensor::empty({plan->workspace_bytes()}, {DType::u8, x.device()});
        if (plan->run(library, x.raw_data(), weight.raw_data(), y.raw_data(), accumulate,
                      workspace.raw_data()))
            return;
    }
    if (size_of(x.dtype()) >= 4) {
        convolve_unfolded(device, pass, x, weight, y, options, accumulate);
        return;
    }
    // Half types are computed in f32 and rounded once.
    std::array<Tensor, 3> tensors{x, weight, y}, wide;
    const std::size_t result = pass == ConvolutionPass::data_gradient ? 0
                               : pass == ConvolutionPass::forward     ? 2
                                                                      : 1;
    for (std::size_t i = 0; i < 3; ++i) {
        wide[i] = Tensor::empty(tensors[i].shape(), {DType::f32, x.device()});
        if (i != result || accumulate) device.copy(tensors[i], wide[i]);
    }
    convolve_unfolded(device, pass, wide[0], wide[1], wide[2], options, accumulate);
    device.copy(wide[result], tensors[result]);
}

}  // namespace

void CudaBackend::convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                              const ConvolutionSpec& options, Tensor& y) {
    if (y.count() == 0) return;
    // y is initialised with the bias, and the products are added to it: one rounding, also in half types.
    const bool has_bias = bias_or_none.defined();
    if (has_bias)
        copy(
            bias_or_none
                .alias({1, weight.size(0), 1, 1}, {0, bias_or_none.strides()[0], 0, 0}, bias_or_none.offset())
                .broadcast_alias("convolution", y.shape()),
            y);
    if (x.count() == 0 || weight.count() == 0) {
        if (!has_bias) fill(y, 0);
        return;
    }
    convolve(*this, resources().convolution_plans, ConvolutionPass::forward, contiguous(*this, x),
             contiguous(*this, weight), y, options, has_bias);
}

void CudaBackend::convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                                       const ConvolutionSpec& options, Tensor& dx_or_none,
                                       Tensor& dweight_or_none, Tensor& dbias_or_none) {
    const bool empty = x.count() == 0 || weight.count() == 0 || dy.count() == 0;
    const Tensor packed_dy = contiguous(*this, dy);
    cuda::ConvolutionPlans& plans = resources().convolution_plans;
    if (Tensor& dx = dx_or_none; dx.defined()) {
        if (empty)
            fill(dx, 0);
        else
            convolve(*this, plans, ConvolutionPass::data_gradient, dx, contiguous(*this, weight), packed_dy,
                     options, /*accumulate=*/false);
    }
    if (Tensor& dweight = dweight_or_none; dweight.defined()) {
        if (empty)
            fill(dweight, 0);
        else  // cuDNN needs one dtype for all three: an f32 result is computed from f32
            convolve(*this, plans, ConvolutionPass::weight_gradient, contiguous(*this, x, dweight.dtype()),
                     dweight, contiguous(*this, dy, dweight.dtype()), options, /*accumulate=*/false);
    }
    if (dbias_or_none.defined() && dy.count() == 0) {
        fill(dbias_or_none, 0);
    } else if (dbias_or_none.defined()) {
        const Strides& steps = dy.strides();
        reduce(ReduceOp::sum,
               dy.alias({dy.size(1), dy.size(0), dy.size(2), dy.size(3)},
                        {steps[1], steps[0], steps[2], steps[3]}, dy.offset()),
               3, dbias_or_none);
    }
}

}  // namespace potluck
