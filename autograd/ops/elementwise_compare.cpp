// Comparisons, and the ops that select by them.

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

using detail::cast;
using detail::scalar_like;

namespace {

Tensor compare(const char* name, CompareOp op, const Tensor& a, const Tensor& b) {
    const OpScope scope(name);
    detail::require_pair(name, a, b);
    const Shape shape = broadcast_shapes(name, a.shape(), b.shape());
    const DType dtype = promote(a.dtype(), b.dtype());
    Tensor y = Tensor::empty(shape, {DType::boolean, a.device()});
    backend(a.device())
        .compare(op, cast(a, dtype).broadcast_alias(name, shape), cast(b, dtype).broadcast_alias(name, shape),
                 y);
    return y;
}

/// A comparison of integers with an integer that is equivalent to `op` with `number`.
std::pair<CompareOp, std::int64_t> with_integer(CompareOp op, const Scalar& scalar) {
    if (!scalar.is_floating()) return {op, scalar.to_int64()};
    using Limits = std::numeric_limits<std::int64_t>;
    const std::pair always{CompareOp::less_equal, Limits::max()};
    const std::pair never{CompareOp::less, Limits::min()};
    const double number = scalar.to_double();
    if (std::isnan(number)) return op == CompareOp::not_equal ? always : never;
    const bool above = number >= 0x1p63;
    if (above || number < -0x1p63) {
        const bool less = op == CompareOp::less || op == CompareOp::less_equal;
        const bool greater = op == CompareOp::greater || op == CompareOp::greater_equal;
        return op == CompareOp::not_equal || (above ? less : greater) ? always : never;
    }
    const bool whole = std::floor(number) == number;
    const auto ceil = static_cast<std::int64_t>(std::ceil(number));
    const auto floor = static_cast<std::int64_t>(std::floor(number));
    switch (op) {
        case CompareOp::equal:
            return whole ? std::pair{op, floor} : never;
        case CompareOp::not_equal:
            return whole ? std::pair{op, floor} : always;
        case CompareOp::less:
        case CompareOp::greater_equal:
            return {op, ceil};
        default:
            return {op, floor};
    }
}

/// Exact for every number: integers are compared as integers.
Tensor compare(const char* name, CompareOp op, const Tensor& a, const Scalar& b) {
    const OpScope scope(name);
    detail::require_defined(name, a, "the first operand");
    Tensor y = Tensor::empty(a.shape(), {DType::boolean, a.device()});
    if (is_floating(a.dtype())) {
        backend(a.device()).compare(op, a, b, y);
    } else {
        const auto [same, integer] = with_integer(op, b);
        backend(a.device()).compare(same, a, Scalar(integer), y);
    }
    return y;
}

}  // namespace

// ---- comparisons ----

Tensor equal(const Tensor& a, const Tensor& b) { return compare("equal", CompareOp::equal, a, b); }
Tensor not_equal(const Tensor& a, const Tensor& b) {
    return compare("not_equal", CompareOp::not_equal, a, b);
}
Tensor less(const Tensor& a, const Tensor& b) { return compare("less", CompareOp::less, a, b); }
Tensor less_equal(const Tensor& a, const Tensor& b) {
    return compare("less_equal", CompareOp::less_equal, a, b);
}
Tensor greater(const Tensor& a, const Tensor& b) { return compare("greater", CompareOp::greater, a, b); }
Tensor greater_equal(const Tensor& a, const Tensor& b) {
    return compare("greater_equal", CompareOp::greater_equal, a, b);
}
Tensor operator==(const Tensor& a, const Tensor& b) { return equal(a, b); }
Tensor operator!=(const Tensor& a, const Tensor& b) { return not_equal(a, b); }
Tensor operator<(const Tensor& a, const Tensor& b) { return less(a, b); }
Tensor operator<=(const Tensor& a, const Tensor& b) { return less_equal(a, b); }
Tensor operator>(const Tensor& a, const Tensor& b) { return greater(a, b); }
Tensor operator>=(const Tensor& a, const Tensor& b) { return greater_equal(a, b); }
Tensor operator==(const Tensor& a, const Scalar& b) { return compare("equal", CompareOp::equal, a, b); }
Tensor operator!=(const Tensor& a, const Scalar& b) {
    return compare("not_equal", CompareOp::not_equal, a, b);
}
Tensor operator<(const Tensor& a, const Scalar& b) { return compare("less", CompareOp::less, a, b); }
Tensor operator<=(const Tensor& a, const Scalar& b) {
    return compare("less_equal", CompareOp::less_equal, a, b);
}
Tensor operator>(const Tensor& a, const Scalar& b) { return compare("greater", CompareOp::greater, a, b); }
Tensor operator>=(const Tensor& a, const Scalar& b) {
    return compare("greater_equal", CompareOp::greater_equal, a, b);
}

// ---- selecting ----

namespace {

void require_condition(const char* name, const Tensor& condition, const char* what) {
    detail::require_defined(name, condition, what);
    if (condition.dtype() != DType::boolean)
        throw Error(name, fmt::format("{} is {} {}, but bool is needed. Compare it with something: x != 0.",
                                      what, condition.dtype(), pretty(condition.shape())));
}

/// where() outside the tape; a and b have the same dtype.
Tensor choose(const char* name, const Tensor& condition, const Tensor& a, const Tensor& b,
              const Shape& shape) {
    Tensor y = Tensor::empty(shape, {a.dtype(), a.device()});
    backend(a.device())
        .where(condition.broadcast_alias(name, shape), a.broadcast_alias(name, shape),
               b.broadcast_alias(name, shape), y);
    return y;
}

}  // namespace

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
    const OpScope scope("where");
    require_condition("where", condition, "the condition");
    detail::require_pair("where", a, b);
    detail::require_same_device("where", {condition, a});
    const Shape shape =
        broadcast_shapes("where", condition.shape(), broadcast_shapes("where", a.shape(), b.shape()));
    const DType dtype = promote(a.dtype(), b.dtype());
    const Tensor y = choose("where", condition, cast(a, dtype), cast(b, dtype), shape);
    return record("where", y, {condition, a, b}, {condition},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      if (dx.wants(1)) dx.add(1, where(saved[0], dy, 0));
                      if (dx.wants(2)) dx.add(2, where(saved[0], 0, dy));
                  });
}

Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b) {
    const OpScope scope("where");
    detail::require_defined("where", a, "the first operand");
    return where(condition, a, scalar_like(a, b));
}

Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b) {
    const OpScope scope("where");
    detail::require_defined("where", b, "the second operand");
    return where(condition, scalar_like(b, a), b);
}

Tensor clamp(const Tensor& x, double low, double high) {
    const OpScope scope("clamp");
    detail::require_defined("clamp", x, "the operand");
    if (!(low <= high))
        throw Error("clamp",
                    fmt::format("the lower limit {} is not below the upper limit {}. Swap them.", low, high));
    Scalar lower = low, upper = high;
    if (!is_floating(x.dtype())) {  // the integers between the limits
        const IntegerRange range = range_of(x.dtype());
        lower = std::max(Scalar(std::ceil(low)).to_int64(), range.low);
        upper = std::min(Scalar(std::floor(high)).to_int64(), range.high);
        if (lower.to_int64() > upper.to_int64())
            throw Error("clamp", fmt::format("no {} lies between {} and {}.", x.dtype(), low, high));
    }
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).binary(BinaryOp::maximum, x, lower, y);
    backend(x.device()).binary(BinaryOp::minimum, y, upper, y);
    return record("clamp", y, {x}, {x}, [low, high](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor x = saved[0];
        dx.add(0, where(x < low, 0, where(x > high, 0, dy)));
    });
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, const Scalar& value) {
    const OpScope scope("masked_fill");
    detail::require_defined("masked_fill", x, "x");
    require_condition("masked_fill", mask, "the mask");
    detail::require_same_device("masked_fill", {x, mask});
    require_held("masked_fill", value, x.dtype());
    const Tensor filling = full({}, value, {x.dtype(), x.device()});
    const Tensor y = choose("masked_fill", mask, filling, x, x.shape());
    return record(
        "masked_fill", y, {x, filling}, {mask},
        [](const Saved& saved, const Tensor& dy, Gradients& dx) { dx.add(0, where(saved[0], 0, dy)); });
}

}  // namespace potluck
