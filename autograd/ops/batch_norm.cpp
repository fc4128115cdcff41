#include "autograd/ops/batch_norm.h"

#include "autograd/autocast.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/recompute.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Checks the operands and returns the dtype of the result.
DType check(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
            const Tensor& running_variance, const BatchNormMode& mode) {
    const char* const name = "batch_norm";
    detail::require_defined(name, x, "x");
    detail::require_rank(name, x, "x", 2);
    if (x.ndim() > 5)
        throw Error(name,
                    fmt::format("x has shape {}, but 2 to 5 axes (batch, channels, ..) are needed. reshape() "
                                "joins some.",
                                pretty(x.shape())));
    detail::require_floating(name, x, "x");
    detail::require_same_device(name, {x, weight, bias, running_mean, running_variance});
    if (!(mode.epsilon >= 0.0))
        throw Error(name, fmt::format("epsilon is {}, but it must be 0 or more.", mode.epsilon));
    if (!(mode.momentum >= 0.0 && mode.momentum <= 1.0))
        throw Error(name, fmt::format("momentum is {}. A share lies in [0, 1].", mode.momentum));
    DType dtype = x.dtype();
    for (const auto& [tensor, what] : {std::pair{&weight, "weight"},
                                       {&bias, "bias"},
                                       {&running_mean, "running_mean"},
                                       {&running_variance, "running_variance"}}) {
        if (!tensor->defined()) continue;
        detail::require_floating(name, *tensor, what);
        if (tensor->shape() != Shape{x.size(1)})
            throw Error(name, fmt::format("x {} needs a {} ({}), but it is {}.", pretty(x.shape()), what,
                                          x.size(1), pretty(tensor->shape())));
        if (tensor == &weight || tensor == &bias) dtype = promote(dtype, tensor->dtype());
    }
    // Under Autocast f32 parameters do not widen what flows through.
    if (dtype == DType::f32 && x.dtype() == Autocast::dtype()) dtype = x.dtype();
    if (running_mean.defined() != running_variance.defined())
        throw Error(name, fmt::format("running_{0} is given and running_{1} is not. Give both or none.",
                                      running_mean.defined() ? "mean" : "variance",
                                      running_mean.defined() ? "variance" : "mean"));
    if (!mode.training && !running_mean.defined())
        throw Error(name,
                    "out of training the running statistics are used, but there are none. Give "
                    "running_mean and running_variance.");
    return dtype;
}

/// (batch, channels, ..) as (batch, channels, positions).
Tensor as_positions(const Tensor& x) {
    const std::int64_t positions = element_count(Shape(x.shape().begin() + 2, x.shape().end()));
    return detail::reshaped(x, {x.size(0), x.size(1), positions});
}

/// All axes but the channel axis.
Axes other_axes(const Tensor& x) {
    Axes axes{0};
    for (std::int64_t axis = 2; axis < x.ndim(); ++axis) axes.push_back(axis);
    return axes;
}

/// Reshapes a vector over channels so that it broadcasts to x.
Tensor along_channels(const Tensor& vector, const Tensor& x) {
    Shape shape(static_cast<std::size_t>(x.ndim()), 1);
    shape[1] = x.size(1);
    return reshape(vector, shape);
}

/// running = (1 - momentum) * running + momentum * value, in place and outside the tape.
void update(const Tensor& running, const Tensor& value, double momentum, double correction) {
    const NoGrad guard;
    running.mul_(1.0 - momentum);
    running.add_(value, momentum * correction);
}

/// The gradients, composed of ops on the tape, for second derivatives.
void composed_backward(const Tensor& x, const Tensor& weight, const Tensor& mean_of_channels,
                       const Tensor& reciprocal, const BatchNormMode& mode, const Tensor& dy, Gradients& dx) {
    const Axes axes = other_axes(x);
    const Tensor wide = to(x, promote(x.dtype(), DType::f32));
    Tensor normalised, scale;
    if (mode.training) {
        const Tensor centred = wide - mean(wide, axes, true);
        scale = detail::reciprocal_root_mean_square(centred, axes, mode.epsilon);
        normalised = centred * scale;
    } else {
        scale = along_channels(reciprocal, x);
        normalised = (wide - along_channels(mean_of_channels, x)) * scale;
    }
    if (dx.wants(0)) {
        Tensor slope = weight.defined() ? dy * along_channels(weight, x) : dy;
        if (mode.training)
            slope = slope - mean(slope, axes, true) - normalised * mean(slope * normalised, axes, true);
        dx.add(0, slope * scale);
    }
    if (dx.wants(1)) dx.add(1, sum(dy * normalised, axes));
    if (dx.wants(2)) dx.add(2, sum(dy, axes));
}

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
                  const Tensor& running_variance, const BatchNormMode& mode) {
    const OpScope scope("batch_norm");
    const DType dtype = check(x, weight, bias, running_mean, running_variance, mode);
    const Tensor values = detail::cast(as_positions(x), dtype);  // (batch, channels, positions)
    const TensorOptions statistics{accumulation_dtype(dtype), x.device()};
    Tensor mean_of_channels, rstd;
    if (mode.training) {
        const std::int64_t count = values.size(0) * values.size(2);
        if (count < 2)
            throw Error(
                "batch_norm",
                fmt::format("x {} has {} a channel, and in training the variance needs 2 or more. Make the "
                            "batch larger (drop an incomplete last one), or call eval() first.",
                            pretty(x.shape()), count == 1 ? "1 value" : "no value"));
        mean_of_channels = Tensor::empty({x.size(1)}, statistics);
        Tensor variance = Tensor::empty({x.size(1)}, statistics);
        rstd = Tensor::empty({x.size(1)}, statistics);
        backend(x.device()).batch_norm_statistics(values, mode.epsilon, mean_of_channels, variance, rstd);
        if (running_mean.defined() && !is_recomputing()) {
            const auto n = static_cast<double>(count);
            update(running_mean, mean_of_channels, mode.momentum, 1.0);
            update(running_variance, variance, mode.momentum, n / (n - 1.0));
        }
    } else {
        const NoGrad guard;
        mean_of_channels = detail::cast(running_mean, statistics.dtype);
        rstd = rsqrt(detail::cast(running_variance, statistics.dtype) + mode.epsilon);
    }
    Tensor y = Tensor::empty(values.shape(), {dtype, x.device()});
    backend(x.device())
        .batch_norm(values, detail::cast_or_none(weight, dtype), detail::cast_or_none(bias, dtype),
                    mean_of_channels, rstd, y);
    y = y.alias(x.shape(), contiguous_strides(x.shape()), 0);
    return record("batch_norm", y, {x, weight, bias}, {x, weight, mean_of_channels, rstd},
                  [mode](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], weight = saved[1];
                      if (is_grad_enabled())
                          return composed_backward(x, weight, saved[2], saved[3], mode, dy, dx);
                      const Tensor values = detail::cast(as_positions(x), dy.dtype());
                      Tensor dvalues = detail::empty_if(dx.wants(0), values.shape(), dy);
                      Tensor dweight = detail::empty_gradient(dx, 1, {x.size(1)}, dy);
                      Tensor dbias = detail::empty_gradient(dx, 2, {x.size(1)}, dy);
                      backend(x.device())
                          .batch_norm_backward(values, detail::cast_or_none(weight, dy.dtype()), saved[2],
                                               saved[3], as_positions(dy), mode.training, dvalues, dweight,
                                               dbias);
                      if (dvalues.defined())
                          dx.add(0, dvalues.alias(x.shape(), contiguous_strides(x.shape()), 0));
                      if (dweight.defined()) dx.add(1, dweight);
                      if (dbias.defined()) dx.add(2, dbias);
                  });
}

}  // namespace potluck
