// Arithmetic of a tensor and a number. The kernel does not convert the number, so that the product of a half-type
// tensor and 1e-8 or 70000 is rounded only once.

#include "autograd/autocast.h"
#include "autograd/ops/chain.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// x op number, or number op x, in `dtype`, outside the tape.
Tensor compute(const char* name, BinaryOp op, const Tensor& x, const Scalar& number, DType dtype,
               bool number_first = false) {
    require_held(name, number, dtype);
    const Tensor operand = detail::cast(x, dtype);
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()});
    if (number_first)
        backend(x.device()).binary(op, number, operand, y);
    else
        backend(x.device()).binary(op, operand, number, y);
    return y;
}

Tensor compute(const char* name, BinaryOp op, const Tensor& x, const Scalar& number,
               bool number_first = false) {
    detail::require_defined(name, x, "the operand");
    return compute(name, op, x, number, promote(x.dtype(), number), number_first);
}

/// maximum and minimum: the gradient goes to x, except where the number was selected; NaN wins.
Tensor choose(const char* name, BinaryOp op, CompareOp loses, const Tensor& x, const Scalar& number) {
    const OpScope scope(name);
    const Tensor y = compute(name, op, x, number);
    return record(name, y, {x}, {x}, [loses, number](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor x = saved[0];
        if (number.to_double() != number.to_double())
            dx.add(0, where(is_nan(x), dy, 0));
        else
            dx.add(0, where(loses == CompareOp::less ? x < number : x > number, 0, dy));
    });
}

}  // namespace

Tensor operator+(const Tensor& a, const Scalar& b) {
    const OpScope scope("add");
    const Tensor y = compute("add", BinaryOp::add, a, b);
    return record("add", y, {a}, {}, [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
}
Tensor operator+(const Scalar& a, const Tensor& b) { return b + a; }

Tensor operator-(const Tensor& a, const Scalar& b) {
    const OpScope scope("subtract");
    const Tensor y = compute("subtract", BinaryOp::subtract, a, b);
    return record("subtract", y, {a}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
}
Tensor operator-(const Scalar& a, const Tensor& b) {
    const OpScope scope("subtract");
    const Tensor y = compute("subtract", BinaryOp::subtract, b, a, /*number_first=*/true);
    return record("subtract", y, {b}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, -dy); });
}

Tensor operator*(const Tensor& a, const Scalar& b) {
    const OpScope scope("multiply");
    const Tensor y = compute("multiply", BinaryOp::multiply, a, b);
    return record("multiply", y, {a}, {},
                  [b](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy * b); });
}
Tensor operator*(const Scalar& a, const Tensor& b) { return b * a; }

Tensor operator/(const Tensor& a, const Scalar& b) {
    const OpScope scope("divide");
    detail::require_defined("divide", a, "the dividend");
    const Tensor y = compute("divide", BinaryOp::divide, a, b, floating_result(promote(a.dtype(), b)));
    return record("divide", y, {a}, {},
                  [b](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy / b); });
}
Tensor operator/(const Scalar& a, const Tensor& b) {
    const OpScope scope("divide");
    detail::require_defined("divide", b, "the divisor");
    const Tensor y = compute("divide", BinaryOp::divide, b, a, floating_result(promote(b.dtype(), a)),
                             /*number_first=*/true);
    return record("divide", y, {b}, {b}, [a](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor b = saved[0];
        if (is_grad_enabled())
            dx.add(0, -(dy / b * (a / b)));
        else
            dx.add(0, detail::chain({dy, b}, {detail::combine(BinaryOp::divide, 1),
                                              detail::combine_number(BinaryOp::multiply, -a.to_double()),
                                              detail::combine(BinaryOp::divide, 1)}));
    });
}

Tensor power(const Tensor& given, const Scalar& b) {
    const OpScope scope("power");
    detail::require_defined("power", given, "the base");
    const Tensor a = detail::autocast_wide(given);
    const DType dtype = promote(a.dtype(), b);
    const double exponent = b.to_double();
    if (exponent == 2.0 && dtype == a.dtype()) return square(a);
    if (!is_floating(dtype) && exponent < 0.0)
        throw Error("power", fmt::format("the exponents hold {}, and an integer to a negative power is no "
                                         "integer. Convert one operand with .to(DType::f32).",
                                         b.to_int64()));
    const Tensor y = compute("power", BinaryOp::power, a, b, dtype);
    return record("power", y, {a}, {a}, [exponent](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor a = saved[0];
        // The derivative is 0 for exponent 0, also at a = 0, where the formula would give 0 times infinity.
        if (exponent == 0.0)
            dx.add(0, detail::zero_like(dy));
        else if (is_grad_enabled())
            dx.add(0, dy * (exponent * power(a, exponent - 1.0)));
        else
            dx.add(0, detail::chain({a, dy}, {detail::combine_number(BinaryOp::power, exponent - 1.0),
                                              detail::combine_number(BinaryOp::multiply, exponent),
                                              detail::combine(BinaryOp::multiply, 1)}));
    });
}

Tensor maximum(const Tensor& a, const Scalar& b) {
    return choose("maximum", BinaryOp::maximum, CompareOp::less, a, b);
}
Tensor minimum(const Tensor& a, const Scalar& b) {
    return choose("minimum", BinaryOp::minimum, CompareOp::greater, a, b);
}

Tensor remainder(const Tensor& a, const Scalar& b) {
    const OpScope scope("remainder");
    const Tensor y = compute("remainder", BinaryOp::remainder, a, b);
    return record("remainder", y, {a}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
}
Tensor operator%(const Tensor& a, const Scalar& b) { return remainder(a, b); }

Tensor floor_divide(const Tensor& a, const Scalar& b) {
    const OpScope scope("floor_divide");
    const Tensor y = compute("floor_divide", BinaryOp::floor_divide, a, b);
    return record("floor_divide", y, {a}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, detail::zero_like(dy)); });
}

}  // namespace potluck
