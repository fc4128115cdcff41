#include "autograd/ops/support.h"

#include <algorithm>
#include <numeric>

#include "autograd/ops/index.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"

namespace potluck::detail {

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
            throw Error(op,
                        fmt::format("tensors are on different devices: {} and {}. Move one with .to(device).",
                                    first->device(), x.device()));
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

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

void require_pair(std::string_view op, const Tensor& a, const Tensor& b) {
    require_defined(op, a, "the first operand");
    require_defined(op, b, "the second operand");
    require_same_device(op, {a, b});
}

bool needs_gradient(const Tensor& x) { return is_grad_enabled() && x.defined() && x.requires_grad(); }

Tensor keep_if(bool needed, const Tensor& x) { return needed ? x : Tensor(); }

Tensor cast(const Tensor& x, DType dtype) {
    if (x.dtype() == dtype) return x;
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()});
    backend(x.device()).copy(x, y);
    return y;
}

Tensor cast_or_none(const Tensor& x, DType dtype) { return x.defined() ? cast(x, dtype) : x; }

Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like) {
    return wanted ? Tensor::empty(shape, {like.dtype(), like.device()}) : Tensor();
}

Tensor empty_gradient(const Gradients& dx, std::size_t index, const Shape& shape, const Tensor& dy) {
    if (!dx.wants(index)) return {};
    const bool wider = is_half(dy.dtype()) && dx.dtype(index) == DType::f32;
    return Tensor::empty(shape, {wider ? DType::f32 : dy.dtype(), dy.device()});
}

Tensor as_floating(const Tensor& x) { return is_floating(x.dtype()) ? x : cast(x, DType::f32); }

Tensor scalar_like(const Tensor& x, const Scalar& value) {
    return full({}, value, {promote(x.dtype(), value), x.device()});
}

Tensor scalar_tensor(double value, DType dtype, Device device) { return full({}, value, {dtype, device}); }

Tensor copy_of(const Tensor& x) {
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).copy(x, y);
    return y;
}

Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : copy_of(x); }

Tensor reshaped(const Tensor& x, const Shape& shape) {
    if (const auto strides = view_strides(x.shape(), x.strides(), shape))
        return x.alias(shape, *strides, x.offset());
    return copy_of(x).alias(shape, contiguous_strides(shape), 0);
}

Tensor as_rows(const Tensor& x) {
    const Shape leading(x.shape().begin(), x.shape().end() - 1);
    return reshaped(x, {element_count(leading), x.size(-1)});
}

std::optional<Strides> view_strides(const Shape& shape, const Strides& strides, const Shape& wanted) {
    if (element_count(wanted) == 0) return contiguous_strides(wanted);

    // Join neighbouring axes that one stride walks through, ..
    struct Run {
        std::int64_t size, stride;
    };
    std::vector<Run> runs;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        if (shape[axis] == 1) continue;
        if (!runs.empty() && runs.back().stride == shape[axis] * strides[axis])
            runs.back() = {runs.back().size * shape[axis], strides[axis]};
        else
            runs.push_back({shape[axis], strides[axis]});
    }
    // .. then cut them into the wanted axes, from the last.
    Strides result(wanted.size());
    Run run{1, 1};
    for (std::size_t axis = wanted.size(); axis-- > 0;) {
        if (wanted[axis] != 1 && run.size == 1) {
            run = runs.back();
            runs.pop_back();
        }
        if (run.size % wanted[axis] != 0) return std::nullopt;
        result[axis] = run.stride;
        run.size /= wanted[axis];
        run.stride *= wanted[axis];
    }
    return result;
}

bool overlaps_itself(const Tensor& x) {
    if (x.is_contiguous() || x.count() <= 1) return false;
    // From the smallest stride on, each axis must step over everything that the axes before it reach.
    std::vector<std::size_t> axes;
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis)
        if (x.shape()[axis] > 1) axes.push_back(axis);
    std::sort(axes.begin(), axes.end(),
              [&](std::size_t a, std::size_t b) { return x.strides()[a] < x.strides()[b]; });
    std::int64_t reach = 0;
    for (const std::size_t axis : axes) {
        if (x.strides()[axis] <= reach) return true;
        reach += x.strides()[axis] * (x.shape()[axis] - 1);
    }
    return false;
}

Tensor strided_alias(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length,
                     std::int64_t step) {
    Shape shape = x.shape();
    Strides strides = x.strides();
    const auto at = static_cast<std::size_t>(axis);
    // An empty view starts where x starts: nothing is read, and the place must lie inside the storage.
    const std::int64_t offset = length == 0 || x.count() == 0 ? x.offset() : x.offset() + start * strides[at];
    shape[at] = length;
    strides[at] *= step;
    return x.alias(std::move(shape), std::move(strides), offset);
}

Tensor permuted_alias(const Tensor& x, const std::vector<std::int64_t>& axes) {
    Shape shape(axes.size());
    Strides strides(axes.size());
    for (std::size_t i = 0; i < axes.size(); ++i) {
        shape[i] = x.shape()[static_cast<std::size_t>(axes[i])];
        strides[i] = x.strides()[static_cast<std::size_t>(axes[i])];
    }
    return x.alias(std::move(shape), std::move(strides), x.offset());
}

Tensor transposed_alias(const Tensor& x) {
    std::vector<std::int64_t> axes(static_cast<std::size_t>(x.ndim()));
    std::iota(axes.begin(), axes.end(), std::int64_t{0});
    std::swap(axes[axes.size() - 2], axes[axes.size() - 1]);
    return permuted_alias(x, axes);
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
