#include "autograd/ops/support.h"

#include <cmath>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/index.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck::detail {
namespace {

/// `.to(parse_device("cuda:0"))`.
std::string move_to(Device device) { return fmt::format(".to(parse_device(\"{}\"))", device); }

/// What two tensors are and where, and the call that mends it: where just one of them is a parameter, it is the data or the
/// model that is in the wrong place.
std::string different_devices(const Tensor& a, const Tensor& b) {
    const auto text = [](const Tensor& x) { return fmt::format("{} {}", x.dtype(), pretty(x.shape())); };
    const bool a_is_parameter = a.storage()->is_parameter();
    if (a_is_parameter == b.storage()->is_parameter())
        return fmt::format("{} is on {} and {} on {}. Move one of them: {}, or {}.", text(a), a.device(),
                           text(b), b.device(), move_to(b.device()), move_to(a.device()));
    const Tensor& parameter = a_is_parameter ? a : b;
    const Tensor& data = a_is_parameter ? b : a;
    return fmt::format(
        "the parameter {} is on {}, and {}, which comes to it, on {}. Move the data to the model, data{}, or "
        "the "
        "model to the data, model{}.",
        text(parameter), parameter.device(), text(data), data.device(), move_to(parameter.device()),
        move_to(data.device()));
}

}  // namespace

void require_defined(std::string_view op, const Tensor& x, std::string_view what) {
    if (!x.defined())
        throw Error(
            op, fmt::format("{} is an undefined tensor. Make one with zeros(), randn() or tensor().", what));
}

void require_same_device(std::string_view op, std::initializer_list<Tensor> tensors) {
    const Tensor* first = nullptr;
    for (const Tensor& x : tensors) {
        if (!x.defined()) continue;
        if (first == nullptr) {
            first = &x;
        } else if (!(x.device() == first->device())) {
            throw Error(op, different_devices(*first, x));
        }
    }
}

void require_floating(std::string_view op, const Tensor& x, std::string_view what) {
    if (!is_floating(x.dtype()))
        throw Error(
            op, fmt::format("{} is {} {}, but a floating dtype is needed. Convert it with .to(DType::f32).",
                            what, x.dtype(), pretty(x.shape())));
}

void require_rank(std::string_view op, const Tensor& x, std::string_view what, std::int64_t least) {
    if (x.ndim() < least)
        throw Error(op, fmt::format("{} has shape {}, but at least {} {} needed. Add axes with unsqueeze().",
                                    what, pretty(x.shape()), least, least == 1 ? "axis is" : "axes are"));
}

void require_pair(std::string_view op, const Tensor& a, const Tensor& b) {
    require_defined(op, a, "the first operand");
    require_defined(op, b, "the second operand");
    require_same_device(op, {a, b});
}

bool needs_gradient(const Tensor& x) { return is_grad_enabled() && x.defined() && x.requires_grad(); }

Tensor keep_if(bool needed, const Tensor& x) { return needed ? x : Tensor(); }

Tensor empty_gradient(const Gradients& dx, std::size_t index, const Shape& shape, const Tensor& dy) {
    if (!dx.wants(index)) return {};
    const bool wider = is_half(dy.dtype()) && dx.dtype(index) == DType::f32;
    return Tensor::empty(shape, {wider ? DType::f32 : dy.dtype(), dy.device()});
}

Tensor scalar_like(const Tensor& x, const Scalar& value) {
    const DType dtype = promote(x.dtype(), value);
    require_held(OpScope::current(), value, dtype);
    return full({}, value, {dtype, x.device()});
}

Tensor zero_like(const Tensor& x) {
    return full({}, 0, {x.dtype(), x.device()}).broadcast_alias("zeros", x.shape());
}

Tensor spread(const Tensor& dy, const Shape& shape, std::int64_t axis, std::int64_t start,
              std::int64_t step) {
    const std::int64_t length = dy.size(axis);
    Shape column(shape.size(), 1);
    column[static_cast<std::size_t>(axis)] = length;
    const Tensor places = arange(start, start + length * step, step, {DType::i64, dy.device()});
    return scatter_add(zeros(shape, {dy.dtype(), dy.device()}), axis,
                       expand(reshape(places, column), dy.shape()), dy);
}

Tensor reciprocal_root_mean_square(const Tensor& x, const std::vector<std::int64_t>& axes, double epsilon) {
    if (x.count() == 0) return rsqrt(mean(square(x), axes, true) + epsilon);
    // Divided by a number of the magnitude of the largest element, if necessary; the gradient treats it as a constant.
    const Tensor largest = maximum(max(abs(x.detach()), axes, true), std::sqrt(epsilon));
    const Tensor scale =
        where(largest == 0, 1, where(largest > 1e-15, where(largest < 1e15, 1, largest), largest));
    const Tensor unit = square(std::sqrt(epsilon) / scale);
    return rsqrt(mean(square(x / scale), axes, true) + unit) / scale;
}

Tensor sum_to_shape(std::string_view op, const Tensor& x, const Shape& shape, DType dtype) {
    if (x.shape() == shape) return x;
    const Shape& from = x.shape();
    bool fits = from.size() >= shape.size();
    const std::size_t leading = fits ? from.size() - shape.size() : 0;
    Axes axes;
    for (std::size_t axis = 0; fits && axis < from.size(); ++axis) {
        if (axis < leading || (shape[axis - leading] == 1 && from[axis] != 1))
            axes.push_back(static_cast<std::int64_t>(axis));
        else
            fits = shape[axis - leading] == from[axis];
    }
    if (!fits)
        throw Error(op,
                    fmt::format("a gradient of shape {} was given to a tensor of shape {}. It must have that "
                                "shape, or one that the tensor was broadcast to.",
                                pretty(from), pretty(shape)));
    if (dtype == x.dtype()) return reshape(sum(x, axes, /*keep_axes=*/true), shape);
    Axes order;  // the kept axes, then those that are summed
    for (std::int64_t axis = 0; axis < x.ndim(); ++axis)
        if (std::find(axes.begin(), axes.end(), axis) == axes.end()) order.push_back(axis);
    order.insert(order.end(), axes.begin(), axes.end());
    const Tensor turned = permuted_alias(x, order);
    Tensor total = Tensor::empty(
        {turned.shape().begin(), turned.shape().end() - static_cast<std::ptrdiff_t>(axes.size())},
        {dtype, x.device()});
    backend(x.device()).reduce(ReduceOp::sum, turned, static_cast<std::int64_t>(axes.size()), total);
    return reshaped(total, shape);
}

}  // namespace potluck::detail
