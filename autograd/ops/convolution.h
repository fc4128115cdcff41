#pragma once

#include "autograd/ops/height_width.h"
#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

struct Convolution1d {
    std::int64_t stride = 1;    // distance between windows
    std::int64_t padding = 0;   // zeros on both sides
    std::int64_t dilation = 1;  // distance between the elements of a window
    std::int64_t groups = 1;    // splits channels and filters into independent groups
};
struct Convolution2d {
    HeightWidth stride = 1;
    HeightWidth padding = 0;
    HeightWidth dilation = 1;
    std::int64_t groups = 1;
};

/// Applies every filter to every window of x (cross-correlation, as in all frameworks): x (batch, channels, length),
/// weight (filters, channels / groups, kernel), bias (filters) or undefined. Result (batch, filters, windows) with
/// windows = floor((length + 2 padding - dilation (kernel - 1) - 1) / stride) + 1. Half types are accumulated in f32.
/// Throws Error when the shapes do not match or no window fits.
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const Convolution1d& options = {});
template <std::size_t N>
Tensor conv1d(const Tensor&, const Tensor&, const Tensor&, MistypedOptions<N>,
              Refused<"no such option: see Convolution1d", N> = {});
/// The same for images: x (batch, channels, height, width), weight (filters, channels / groups, kernel height, kernel
/// width); height and width of the result follow the rule of conv1d.
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const Convolution2d& options = {});
template <std::size_t N>
Tensor conv2d(const Tensor&, const Tensor&, const Tensor&, MistypedOptions<N>,
              Refused<"no such option: see Convolution2d", N> = {});

}  // namespace potluck
