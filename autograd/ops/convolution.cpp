#include "autograd/ops/convolution.h"

#include "autograd/autocast.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/ops/support_window.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// The parameters of the kernels besides the tensors.
struct Geometry {
    ConvolutionSpec options;
    Shape x, weight, y;
};

/// A tensor of which kernels read only the shape.
Tensor shape_only(const Shape& shape, const Tensor& like) {
    return Tensor::empty({1}, {like.dtype(), like.device()}).alias(shape, Strides(shape.size(), 0), 0);
}

// A convolution and its two gradients are linear in each of their two operands. So the gradient of each of the three is
// composed of the other two, and derivatives of any order come from these few lines.

Tensor input_gradient(const Tensor& weight, const Tensor& dy, const Geometry& geometry);
Tensor weight_gradient(const Tensor& x, const Tensor& dy, const Geometry& geometry);

/// x, weight and bias have the same dtype.
Tensor convolve(const char* name, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Geometry& geometry) {
    Tensor y = Tensor::empty(geometry.y, {x.dtype(), x.device()});
    backend(x.device()).convolution(x, weight, bias, geometry.options, y);
    return record(name, y, {x, weight, bias},
                  {detail::keep_if(detail::needs_gradient(weight), x),
                   detail::keep_if(detail::needs_gradient(x), weight)},
                  [geometry](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      if (is_grad_enabled()) {
                          if (dx.wants(0)) dx.add(0, input_gradient(saved[1], dy, geometry));
                          if (dx.wants(1)) dx.add(1, weight_gradient(saved[0], dy, geometry));
                          if (dx.wants(2)) dx.add(2, sum(dy, {0, 2, 3}));
                          return;
                      }
                      Tensor dinput = detail::empty_if(dx.wants(0), geometry.x, dy);
                      Tensor dweight = detail::empty_gradient(dx, 1, geometry.weight, dy);
                      Tensor dbias = detail::empty_gradient(dx, 2, {geometry.weight[0]}, dy);
                      const Tensor x = dx.wants(1) ? saved[0] : shape_only(geometry.x, dy);
                      const Tensor weight = dx.wants(0) ? saved[1] : shape_only(geometry.weight, dy);
                      backend(dy.device())
                          .convolution_backward(x, weight, dy, geometry.options, dinput, dweight, dbias);
                      if (dinput.defined()) dx.add(0, dinput);
                      if (dweight.defined()) dx.add(1, dweight);
                      if (dbias.defined()) dx.add(2, dbias);
                  });
}

/// The gradient of a convolution with respect to x.
Tensor input_gradient(const Tensor& weight, const Tensor& dy, const Geometry& geometry) {
    Tensor y = detail::empty_if(true, geometry.x, dy), none;
    backend(dy.device())
        .convolution_backward(shape_only(geometry.x, dy), weight, dy, geometry.options, y, none, none);
    return record("convolution_input_gradient", y, {weight, dy}, {weight, dy},
                  [geometry](const Saved& saved, const Tensor& g, Gradients& dx) {
                      if (dx.wants(0)) dx.add(0, weight_gradient(g, saved[1], geometry));
                      if (dx.wants(1)) dx.add(1, convolve("convolution", g, saved[0], {}, geometry));
                  });
}

/// The gradient of a convolution with respect to its weight.
Tensor weight_gradient(const Tensor& x, const Tensor& dy, const Geometry& geometry) {
    Tensor y = detail::empty_if(true, geometry.weight, dy), none;
    backend(dy.device())
        .convolution_backward(x, shape_only(geometry.weight, dy), dy, geometry.options, none, y, none);
    return record("convolution_weight_gradient", y, {x, dy}, {x, dy},
                  [geometry](const Saved& saved, const Tensor& g, Gradients& dx) {
                      if (dx.wants(0)) dx.add(0, input_gradient(g, saved[1], geometry));
                      if (dx.wants(1)) dx.add(1, convolve("convolution", saved[0], g, {}, geometry));
                  });
}

void check_operands(const char* name, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    std::int64_t ndim, std::int64_t groups) {
    for (const auto& [tensor, what] : {std::pair{&x, "x"}, {&weight, "weight"}}) {
        detail::require_defined(name, *tensor, what);
        detail::require_floating(name, *tensor, what);
    }
    if (bias.defined()) detail::require_floating(name, bias, "bias");
    detail::require_same_device(name, {x, weight, bias});
    detail::require_image(name, x, ndim);
    if (weight.ndim() != ndim)
        throw Error(
            name, fmt::format("weight has shape {}, but (filters, channels / groups, {}) is needed.",
                              pretty(weight.shape()), ndim == 3 ? "kernel" : "kernel height, kernel width"));
    const std::int64_t channels = x.size(1), filters = weight.size(0);
    if (groups < 1 || channels % groups != 0 || filters % groups != 0)
        throw Error(
            name,
            fmt::format("groups is {}, but it must divide the {} channels of x {} and the {} filters of "
                        "weight {}.",
                        groups, channels, pretty(x.shape()), filters, pretty(weight.shape())));
    if (weight.size(1) != channels / groups)
        throw Error(name,
                    fmt::format("x {} has {} channels in {} group{}, so weight must be ({}, {}, ..), but "
                                "it is {}.",
                                pretty(x.shape()), channels, groups, groups == 1 ? "" : "s", filters,
                                channels / groups, pretty(weight.shape())));
    if (bias.defined() && bias.shape() != Shape{filters})
        throw Error(name, fmt::format("weight {} needs a bias ({}), but it is {}.", pretty(weight.shape()),
                                      filters, pretty(bias.shape())));
}

detail::WindowAxis axis_of(const char* what, const Tensor& x, const Tensor& weight, std::int64_t axis,
                           std::int64_t stride, std::int64_t padding, std::int64_t dilation) {
    return {what, x.size(axis), weight.size(axis), stride, padding, dilation};
}

/// The operands are checked and have 4 axes. Other dtypes are converted on the tape.
Tensor convolve_promoted(const char* name, const Tensor& given_x, const Tensor& given_weight,
                         const Tensor& given_bias, const Geometry& geometry) {
    const auto [x, weight, bias] = detail::autocast_operands(given_x, given_weight, given_bias);
    DType dtype = promote(x.dtype(), weight.dtype());
    if (bias.defined()) dtype = promote(dtype, bias.dtype());
    return convolve(name, to(x, dtype), to(weight, dtype), bias.defined() ? to(bias, dtype) : bias, geometry);
}

}  // namespace

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Convolution1d& options) {
    const OpScope scope("conv1d");
    check_operands("conv1d", x, weight, bias, 3, options.groups);
    const std::int64_t windows = detail::windows_along(
        "conv1d", x.shape(),
        axis_of("length", x, weight, 2, options.stride, options.padding, options.dilation));
    // Treated as an image of height 1.
    const Tensor image = unsqueeze(x, 2), filters = unsqueeze(weight, 2);
    const Geometry geometry{{{.stride = detail::as_pair(1, options.stride),
                              .padding = detail::as_pair(0, options.padding),
                              .dilation = detail::as_pair(1, options.dilation)},
                             options.groups},
                            image.shape(),
                            filters.shape(),
                            {x.size(0), weight.size(0), 1, windows}};
    return squeeze(convolve_promoted("conv1d", image, filters, bias, geometry), 2);
}

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Convolution2d& options) {
    const OpScope scope("conv2d");
    check_operands("conv2d", x, weight, bias, 4, options.groups);
    const auto& [stride, padding, dilation, groups] = options;
    const std::int64_t out_height = detail::windows_along(
        "conv2d", x.shape(), axis_of("height", x, weight, 2, stride.height, padding.height, dilation.height));
    const std::int64_t out_width = detail::windows_along(
        "conv2d", x.shape(), axis_of("width", x, weight, 3, stride.width, padding.width, dilation.width));
    const Geometry geometry{{{.stride = detail::as_pair(stride),
                              .padding = detail::as_pair(padding),
                              .dilation = detail::as_pair(dilation)},
                             groups},
                            x.shape(),
                            weight.shape(),
                            {x.size(0), weight.size(0), out_height, out_width}};
    return convolve_promoted("conv2d", x, weight, bias, geometry);
}

}  // namespace potluck
