#include "autograd/ops/reduce.h"

#include <cmath>
#include <limits>

#include "autograd/autocast.h"
#include "autograd/ops/chain.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/index.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Which axes of a shape are reduced, and the resulting shapes.
struct ReduceLayout {
    Axes order;           // the kept axes, then the reduced ones
    Axes inverse;         // the position of each axis in `order`
    std::int64_t count;   // number of reduced axes
    Shape kept;           // shape without the reduced axes
    Shape with_ones;      // shape with the reduced axes as size 1
    std::int64_t merged;  // number of elements that are reduced to one
};

ReduceLayout layout_of(const char* name, const Tensor& x, const Axes& axes) {
    detail::require_defined(name, x, "the operand");
    const std::int64_t ndim = x.ndim();
    std::vector<bool> reduced(static_cast<std::size_t>(ndim), axes.empty());
    for (const std::int64_t axis : axes) {
        const auto at = static_cast<std::size_t>(normalize_axis(name, axis, ndim));
        if (reduced[at])
            throw Error(
                name, fmt::format("axis {} is named twice in {} for the shape {}. Name each axis once.", axis,
                                  fmt::join(axes, ", "), pretty(x.shape())));
        reduced[at] = true;
    }
    ReduceLayout layout{{}, {}, 0, {}, x.shape(), 1};
    layout.inverse.resize(static_cast<std::size_t>(ndim));
    Axes last;
    for (std::size_t axis = 0; axis < reduced.size(); ++axis) {
        if (reduced[axis]) {
            last.push_back(static_cast<std::int64_t>(axis));
            layout.with_ones[axis] = 1;
            layout.merged *= x.shape()[axis];
        } else {
            layout.order.push_back(static_cast<std::int64_t>(axis));
            layout.kept.push_back(x.shape()[axis]);
        }
    }
    layout.count = static_cast<std::int64_t>(last.size());
    layout.order.insert(layout.order.end(), last.begin(), last.end());
    for (std::size_t i = 0; i < layout.order.size(); ++i)
        layout.inverse[static_cast<std::size_t>(layout.order[i])] = static_cast<std::int64_t>(i);
    return layout;
}

/// Runs the kernel; the result is outside the tape and has the requested shape.
Tensor compute(ReduceOp op, const Tensor& x, const ReduceLayout& layout, DType dtype, bool keep_axes) {
    Tensor y = Tensor::empty(layout.kept, {dtype, x.device()});
    backend(x.device()).reduce(op, detail::permuted_alias(x, layout.order), layout.count, y);
    return keep_axes ? detail::reshaped(y, layout.with_ones) : y;
}

void require_elements(const char* name, const Tensor& x, const ReduceLayout& layout) {
    if (layout.merged == 0 && element_count(layout.kept) > 0)
        throw Error(
            name,
            fmt::format("the shape {} has no elements to choose from. Check the axes, or that the tensor is "
                        "not empty.",
                        pretty(x.shape())));
}

/// Broadcasts `dy` (or another result of the reduction) over the reduced axes again.
Tensor stretched(const Tensor& dy, const ReduceLayout& layout, const Shape& shape) {
    return expand(reshape(dy, layout.with_ones), shape);
}

}  // namespace

Tensor sum(const Tensor& given, const Axes& axes, bool keep_axes) {
    const OpScope scope("sum");
    const Tensor x = detail::autocast_wide(given);
    const ReduceLayout layout = layout_of("sum", x, axes);
    const DType dtype = sum_result(x.dtype());
    const Tensor y = compute(ReduceOp::sum, x, layout, dtype, keep_axes);
    return record("sum", y, {x}, {},
                  [layout, shape = x.shape()](const Saved&, const Tensor& dy, Gradients& dx) {
                      dx.add(0, stretched(dy, layout, shape));
                  });
}

Tensor mean(const Tensor& given, const Axes& axes, bool keep_axes) {
    const OpScope scope("mean");
    const Tensor x = detail::autocast_wide(given);
    const ReduceLayout layout = layout_of("mean", x, axes);
    const DType dtype = floating_result(x.dtype());
    const Tensor y = compute(ReduceOp::mean, x, layout, dtype, keep_axes);
    return record("mean", y, {x}, {},
                  [layout, shape = x.shape()](const Saved&, const Tensor& dy, Gradients& dx) {
                      dx.add(0, stretched(dy * (1.0 / static_cast<double>(layout.merged)), layout, shape));
                  });
}

namespace {

/// max and min: the gradient goes to the first such element, whose index the forward saves (one per result).
Tensor extreme(const char* name, ReduceOp op, ReduceOp place, const Tensor& x, const Axes& axes,
               bool keep_axes) {
    const OpScope scope(name);
    const ReduceLayout layout = layout_of(name, x, axes);
    require_elements(name, x, layout);
    const Tensor y = compute(op, x, layout, x.dtype(), keep_axes);
    Tensor indices;
    if (detail::needs_gradient(x)) indices = compute(place, x, layout, DType::i64, false);
    return record(name, y, {x}, {indices},
                  [layout, shape = x.shape()](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      // (results, merged): one row for each result
                      const std::int64_t results = element_count(layout.kept);
                      const Tensor rows =
                          scatter_add(zeros({results, layout.merged}, {dy.dtype(), dy.device()}), 1,
                                      reshape(saved[0], {results, 1}), reshape(dy, {results, 1}));
                      Shape permuted;
                      for (const std::int64_t axis : layout.order)
                          permuted.push_back(shape[static_cast<std::size_t>(axis)]);
                      dx.add(0, permute(reshape(rows, permuted), layout.inverse));
                  });
}

Tensor place_of(const char* name, ReduceOp op, const Tensor& x, const Axes& axes, bool keep_axis) {
    const OpScope scope(name);
    const ReduceLayout layout = layout_of(name, x, axes);
    require_elements(name, x, layout);
    return compute(op, x, layout, DType::i64, keep_axis);
}

Tensor test(const char* name, ReduceOp op, const Tensor& x, const Axes& axes, bool keep_axes) {
    const OpScope scope(name);
    return compute(op, x, layout_of(name, x, axes), DType::boolean, keep_axes);
}

}  // namespace

Tensor max(const Tensor& x, const Axes& axes, bool keep_axes) {
    return extreme("max", ReduceOp::max, ReduceOp::argmax, x, axes, keep_axes);
}
Tensor min(const Tensor& x, const Axes& axes, bool keep_axes) {
    return extreme("min", ReduceOp::min, ReduceOp::argmin, x, axes, keep_axes);
}

Tensor argmax(const Tensor& x) { return place_of("argmax", ReduceOp::argmax, x, {}, false); }
Tensor argmax(const Tensor& x, std::int64_t axis, bool keep_axis) {
    return place_of("argmax", ReduceOp::argmax, x, {axis}, keep_axis);
}
Tensor argmin(const Tensor& x) { return place_of("argmin", ReduceOp::argmin, x, {}, false); }
Tensor argmin(const Tensor& x, std::int64_t axis, bool keep_axis) {
    return place_of("argmin", ReduceOp::argmin, x, {axis}, keep_axis);
}

namespace {

/// The variance, or its square root.
Tensor compute_variance(const Tensor& x, const ReduceLayout& layout, double correction, bool root,
                        bool keep_axes) {
    Tensor y = Tensor::empty(layout.kept, {x.dtype(), x.device()});
    backend(x.device()).variance(detail::permuted_alias(x, layout.order), layout.count, correction, root, y);
    return keep_axes ? detail::reshaped(y, layout.with_ones) : y;
}

/// x / y * dy, the gradient of a root of squares; 0 where y, the root, is 0. Divides first: x and y have similar
/// magnitudes, so the quotient of large or tiny numbers stays in range.
Tensor root_gradient(const Tensor& x, const Tensor& y, const Tensor& dy) {
    const Tensor safe = where(y == 0, std::numeric_limits<double>::infinity(), y);
    if (is_grad_enabled()) return x / safe * dy;
    return detail::chain({x, safe, dy},
                         {detail::combine(BinaryOp::divide, 1), detail::combine(BinaryOp::multiply, 2)});
}

void require_correction(const char* name, double correction) {
    if (!(correction >= 0.0) || !std::isfinite(correction))
        throw Error(name,
                    fmt::format("the correction is {}. Use 1 (unbiased) or 0 (population).", correction));
}

/// x minus its mean over the reduced axes, in f32 or better: with a large mean, half types would lose the difference.
Tensor centred(const Tensor& given, const ReduceLayout& layout) {
    const Axes reduced(std::vector<std::int64_t>(layout.order.end() - layout.count, layout.order.end()));
    const Tensor x = to(given, promote(given.dtype(), DType::f32));
    return reduced.empty() ? x - x : x - mean(x, reduced, /*keep_axes=*/true);
}

}  // namespace

Tensor var(const Tensor& given, const Axes& axes, double correction, bool keep_axes) {
    const OpScope scope("var");
    detail::require_defined("var", given, "the operand");
    const Tensor operand = detail::autocast_wide(given);
    require_correction("var", correction);
    const ReduceLayout layout = layout_of("var", operand, axes);
    const Tensor y =
        compute_variance(detail::as_floating(operand), layout, correction, /*root=*/false, keep_axes);
    return record("var", y, {operand}, {operand},
                  [layout, correction](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0];
                      const double factor = 2.0 / (static_cast<double>(layout.merged) - correction);
                      dx.add(0, stretched(dy * factor, layout, x.shape()) * centred(x, layout));
                  });
}

Tensor stddev(const Tensor& given, const Axes& axes, double correction, bool keep_axes) {
    const OpScope scope("stddev");
    detail::require_defined("stddev", given, "the operand");
    const Tensor operand = detail::autocast_wide(given);
    require_correction("stddev", correction);
    const ReduceLayout layout = layout_of("stddev", operand, axes);
    const Tensor y =
        compute_variance(detail::as_floating(operand), layout, correction, /*root=*/true, keep_axes);
    return record("stddev", y, {operand}, {operand, y},
                  [layout, correction](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], y = saved[1];
                      // d y / d x = (x - mean) / ((n - correction) y), and 0 where all elements are equal
                      const double factor = 1.0 / (static_cast<double>(layout.merged) - correction);
                      dx.add(0, root_gradient(centred(x, layout), stretched(y, layout, x.shape()),
                                              stretched(dy * factor, layout, x.shape())));
                  });
}

namespace {

Tensor euclidean_norm(const Tensor& given, const Axes& axes, bool keep_axes) {
    const ReduceLayout layout = layout_of("norm", given, axes);
    const Tensor x = detail::as_floating(given);
    const Tensor y = compute(ReduceOp::norm, x, layout, x.dtype(), keep_axes);
    return record(
        "norm", y, {given}, {given, y}, [layout](const Saved& saved, const Tensor& dy, Gradients& dx) {
            const Shape& shape = saved[0].shape();
            dx.add(0,
                   root_gradient(saved[0], stretched(saved[1], layout, shape), stretched(dy, layout, shape)));
        });
}

}  // namespace

Tensor norm(const Tensor& given, double p, const Axes& axes, bool keep_axes) {
    const OpScope scope("norm");
    detail::require_defined("norm", given, "the operand");
    const Tensor x = detail::autocast_wide(given);
    const bool is_infinite = p == std::numeric_limits<double>::infinity();
    if (p == 1.0 || (is_infinite && x.count() == 0))  // an empty tensor has no largest element, but norm 0
        return sum(abs(detail::as_floating(x)), axes, keep_axes);
    if (p == 2.0) return euclidean_norm(x, axes, keep_axes);
    if (is_infinite) return max(abs(detail::as_floating(x)), axes, keep_axes);
    throw Error("norm", fmt::format("p is {}. Use 1, 2 or infinity.", p));
}

Tensor logsumexp(const Tensor& given, const Axes& axes, bool keep_axes) {
    const OpScope scope("logsumexp");
    detail::require_defined("logsumexp", given, "the operand");
    const Tensor operand = detail::autocast_wide(given);
    const ReduceLayout layout = layout_of("logsumexp", operand, axes);
    const Tensor x = detail::as_floating(operand);
    const Tensor y = compute(ReduceOp::logsumexp, x, layout, x.dtype(), keep_axes);
    return record("logsumexp", y, {operand}, {operand, y},
                  [layout](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], y = saved[1];
                      // Where everything is -inf the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf).
                      const Tensor empty = y == -std::numeric_limits<double>::infinity();
                      const Tensor safe = where(empty, 0, y);
                      dx.add(0,
                             stretched(dy, layout, x.shape()) * exp(x - stretched(safe, layout, x.shape())));
                  });
}

Tensor any(const Tensor& x, const Axes& axes, bool keep_axes) {
    return test("any", ReduceOp::any, x, axes, keep_axes);
}
Tensor all(const Tensor& x, const Axes& axes, bool keep_axes) {
    return test("all", ReduceOp::all, x, axes, keep_axes);
}

// ---- shorthands ----

Tensor Tensor::sum() const { return potluck::sum(*this); }
Tensor Tensor::mean() const { return potluck::mean(*this); }

}  // namespace potluck
