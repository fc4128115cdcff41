#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "autograd/ops/convolution.h"
#include "core/factories.h"
#include "core/options.h"
#include "nn/init.h"
#include "nn/module.h"

namespace potluck::nn {

struct Conv1dOptions {
    std::int64_t stride = 1, padding = 0, dilation = 1, groups = 1;
    bool bias = true;
    bool initialize = true;  // false leaves zeros, for a model that initialises its parameters itself
};
struct Conv2dOptions {
    HeightWidth stride = 1, padding = 0, dilation = 1;
    std::int64_t groups = 1;
    bool bias = true;
    bool initialize = true;
};

namespace detail {

/// Creates weight and bias of a convolution, initially uniform in +-1 / sqrt(channels / groups * size of the kernel).
inline void make_convolution(const char* name, Shape weight_shape, std::int64_t channels, std::int64_t groups,
                             bool with_bias, bool initialize, Tensor& weight, Tensor& bias) {
    const std::int64_t filters = weight_shape[0];
    if (channels < 1 || filters < 1 || groups < 1 || channels % groups != 0 || filters % groups != 0)
        throw Error(name, "groups must divide channels and filters, which must be at least 1: groups is " +
                              std::to_string(groups) + ", channels " + std::to_string(channels) +
                              ", filters " + std::to_string(filters) + ".");
    weight_shape[1] = channels / groups;
    for (std::size_t axis = 2; axis < weight_shape.size(); ++axis)
        if (weight_shape[axis] < 1)
            throw Error(
                name, "a kernel has a size of at least 1: it is " + std::to_string(weight_shape[axis]) + ".");
    weight = parameter(zeros(weight_shape));
    if (with_bias) bias = parameter(zeros({filters}));
    if (!initialize) return;
    const double bound = 1.0 / std::sqrt(static_cast<double>(weight.count() / filters));
    init::uniform(weight, -bound, bound);
    if (with_bias) init::uniform(bias, -bound, bound);
}

/// "Conv2d(3, 16, kernel 3 x 3)".
inline std::string describe_convolution(const char* name, const Tensor& weight, std::int64_t groups,
                                        bool has_bias) {
    std::string text = std::string(name) + "(" + std::to_string(weight.size(1) * groups) + ", " +
                       std::to_string(weight.size(0)) + ", kernel " + std::to_string(weight.size(2));
    if (weight.ndim() == 4) text += " x " + std::to_string(weight.size(3));
    if (groups != 1) text += ", groups " + std::to_string(groups);
    return text + (has_bias ? ")" : ", no bias)");
}

}  // namespace detail

/// conv1d() with trainable filters: (batch, channels, length) to (batch, filters, windows). weight (filters, channels /
/// groups, kernel), bias (filters).
class Conv1d : public Module {
public:
    Tensor weight, bias;
    Convolution1d options;

    /// Throws Error when a size is below 1, or when channels or filters is not a multiple of groups.
    Conv1d(std::int64_t channels, std::int64_t filters, std::int64_t kernel, Conv1dOptions given = {})
        : options{given.stride, given.padding, given.dilation, given.groups} {
        detail::make_convolution("conv1d", {filters, 0, kernel}, channels, given.groups, given.bias,
                                 given.initialize, weight, bias);
    }
    template <std::size_t N>
    Conv1d(std::int64_t, std::int64_t, std::int64_t, MistypedOptions<N>,
           Refused<"no such option: see Conv1dOptions", N> = {});

    void members(Members& m) override { m("weight", weight)("bias", bias); }
    Tensor forward(const Tensor& x) override { return conv1d(x, weight, bias, options); }
    std::string describe() const override {
        return detail::describe_convolution("Conv1d", weight, options.groups, bias.defined());
    }
};

/// conv2d() with trainable filters: images (batch, channels, height, width) to (batch, filters, height', width').
/// weight (filters, channels / groups, kernel height, kernel width), bias (filters). `Conv2d(3, 16, 3, {.padding = 1})`
/// preserves height and width.
class Conv2d : public Module {
public:
    Tensor weight, bias;
    Convolution2d options;

    /// Throws Error when a size is below 1, or when channels or filters is not a multiple of groups.
    Conv2d(std::int64_t channels, std::int64_t filters, HeightWidth kernel, Conv2dOptions given = {})
        : options{given.stride, given.padding, given.dilation, given.groups} {
        detail::make_convolution("conv2d", {filters, 0, kernel.height, kernel.width}, channels, given.groups,
                                 given.bias, given.initialize, weight, bias);
    }
    template <std::size_t N>
    Conv2d(std::int64_t, std::int64_t, HeightWidth, MistypedOptions<N>,
           Refused<"no such option: see Conv2dOptions", N> = {});

    void members(Members& m) override { m("weight", weight)("bias", bias); }
    Tensor forward(const Tensor& x) override { return conv2d(x, weight, bias, options); }
    std::string describe() const override {
        return detail::describe_convolution("Conv2d", weight, options.groups, bias.defined());
    }
};

}  // namespace potluck::nn
