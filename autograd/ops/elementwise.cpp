#include "autograd/ops/elementwise.h"

#include <numbers>

#include "autograd/autocast.h"
#include "autograd/ops/chain.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

using detail::apply;
using detail::as_floating;
using detail::cast;
using detail::chain;
using detail::combine;
using detail::combine_number;
using detail::keep_if;
using detail::needs_gradient;

namespace {

/// a op b in `dtype`, broadcast, outside the tape.
Tensor compute(const char* name, BinaryOp op, const Tensor& a, const Tensor& b, DType dtype) {
    detail::require_pair(name, a, b);
    const Shape shape = broadcast_shapes(name, a.shape(), b.shape());
    Tensor y = Tensor::empty(shape, {dtype, a.device()});
    backend(a.device())
        .binary(op, cast(a, dtype).broadcast_alias(name, shape), cast(b, dtype).broadcast_alias(name, shape),
                y);
    return y;
}

Tensor compute(const char* name, BinaryOp op, const Tensor& a, const Tensor& b) {
    detail::require_pair(name, a, b);
    return compute(name, op, a, b, promote(a.dtype(), b.dtype()));
}

Tensor compute(const char* name, UnaryOp op, const Tensor& x) {
    detail::require_defined(name, x, "the operand");
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).unary(op, x, y);
    return y;
}

Tensor test(const char* name, UnaryOp op, const Tensor& x) {
    const OpScope scope(name);
    detail::require_defined(name, x, "the operand");
    Tensor y = Tensor::empty(x.shape(), {DType::boolean, x.device()});
    backend(x.device()).unary(op, x, y);
    return y;
}

}  // namespace

// ---- arithmetic ----

Tensor add(const Tensor& a, const Tensor& b) {
    const OpScope scope("add");
    const Tensor y = compute("add", BinaryOp::add, a, b);
    return record("add", y, {a, b}, {}, [](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, dy);
        dx.add(1, dy);
    });
}

Tensor subtract(const Tensor& a, const Tensor& b) {
    const OpScope scope("subtract");
    const Tensor y = compute("subtract", BinaryOp::subtract, a, b);
    return record("subtract", y, {a, b}, {}, [](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, dy);
        if (dx.wants(1)) dx.add(1, -dy);
    });
}

Tensor multiply(const Tensor& a, const Tensor& b) {
    const OpScope scope("multiply");
    const Tensor y = compute("multiply", BinaryOp::multiply, a, b);
    return record("multiply", y, {a, b}, {keep_if(needs_gradient(b), a), keep_if(needs_gradient(a), b)},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      if (dx.wants(0)) dx.add(0, dy * saved[1]);
                      if (dx.wants(1)) dx.add(1, dy * saved[0]);
                  });
}

Tensor divide(const Tensor& a, const Tensor& b) {
    const OpScope scope("divide");
    detail::require_pair("divide", a, b);
    const DType common = promote(a.dtype(), b.dtype());
    const Tensor y = compute("divide", BinaryOp::divide, a, b, floating_result(common));
    return record("divide", y, {a, b}, {keep_if(needs_gradient(b), a), b},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor b = saved[1];
                      const Tensor slope = dy / b;
                      dx.add(0, slope);
                      if (dx.wants(1)) dx.add(1, -(slope * (saved[0] / b)));
                  });
}

Tensor power(const Tensor& given_a, const Tensor& given_b) {
    const OpScope scope("power");
    detail::require_pair("power", given_a, given_b);
    const Tensor a = detail::autocast_wide(given_a), b = detail::autocast_wide(given_b);
    const DType dtype = promote(a.dtype(), b.dtype());
    if (!is_floating(dtype) && b.count() > 0) {
        const auto smallest = min(cast(b, DType::i64)).item<std::int64_t>();
        if (smallest < 0)
            throw Error(
                "power",
                fmt::format("the exponents hold {}, and an integer to a negative power is no integer. "
                            "Convert one operand with .to(DType::f32).",
                            smallest));
    }
    const Tensor y = compute("power", BinaryOp::power, a, b, dtype);
    return record("power", y, {a, b}, {a, b, keep_if(needs_gradient(b), y)},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor a = saved[0], b = saved[1];
                      // The derivative is 0 for b = 0, also at a = 0, where the formula would give 0 times infinity.
                      if (dx.wants(0)) dx.add(0, dy * where(b == 0, 0, b * power(a, b - 1)));
                      if (dx.wants(1)) {
                          const Tensor base = where(a == 0, 1, a);  // 0^b does not depend on b
                          dx.add(1, dy * where(a == 0, 0, saved[2] * log(base)));
                      }
                  });
}

namespace {

/// Passes `dy` to a where y came from a, else to b. In a tie y equals a; NaN came from a when a is NaN.
void choose_backward(const Saved& saved, const Tensor& dy, Gradients& dx) {
    const Tensor a = saved[0], y = saved[1];
    const Tensor same = equal(a, y), broken = is_nan(a);
    if (dx.wants(0)) dx.add(0, where(same, dy, where(broken, dy, 0)));
    if (dx.wants(1)) dx.add(1, where(same, 0, where(broken, 0, dy)));
}

}  // namespace

Tensor maximum(const Tensor& a, const Tensor& b) {
    const OpScope scope("maximum");
    const Tensor y = compute("maximum", BinaryOp::maximum, a, b);
    return record("maximum", y, {a, b}, {a, y}, choose_backward);
}

Tensor minimum(const Tensor& a, const Tensor& b) {
    const OpScope scope("minimum");
    const Tensor y = compute("minimum", BinaryOp::minimum, a, b);
    return record("minimum", y, {a, b}, {a, y}, choose_backward);
}

Tensor remainder(const Tensor& a, const Tensor& b) {
    const OpScope scope("remainder");
    if (needs_gradient(b))
        throw Error(
            "remainder",
            "the divisor requires a gradient, but remainder is not differentiable in it. detach() it.");
    const Tensor y = compute("remainder", BinaryOp::remainder, a, b);
    return record("remainder", y, {a, b}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
}

Tensor floor_divide(const Tensor& a, const Tensor& b) {
    const OpScope scope("floor_divide");
    const Tensor y = compute("floor_divide", BinaryOp::floor_divide, a, b);
    return record("floor_divide", y, {a, b}, {}, [](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, detail::zero_like(dy));
        dx.add(1, detail::zero_like(dy));
    });
}

Tensor operator%(const Tensor& a, const Tensor& b) { return remainder(a, b); }
Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor operator-(const Tensor& a, const Tensor& b) { return subtract(a, b); }
Tensor operator*(const Tensor& a, const Tensor& b) { return multiply(a, b); }
Tensor operator/(const Tensor& a, const Tensor& b) { return divide(a, b); }
Tensor operator-(const Tensor& x) { return negate(x); }

// ---- functions of one tensor ----

Tensor negate(const Tensor& x) {
    const OpScope scope("negate");
    const Tensor y = compute("negate", UnaryOp::negate, x);
    return record("negate", y, {x}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, -dy); });
}

Tensor abs(const Tensor& x) {
    const OpScope scope("abs");
    const Tensor y = compute("abs", UnaryOp::absolute, x);
    return record("abs", y, {x}, {x}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        dx.add(0, dy * sign(saved[0]));
    });
}

Tensor sign(const Tensor& x) {
    const OpScope scope("sign");
    const Tensor y = compute("sign", UnaryOp::sign, x);
    return record("sign", y, {x}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, detail::zero_like(dy)); });
}

Tensor square(const Tensor& given) {
    const OpScope scope("square");
    const Tensor x = detail::autocast_wide(given);
    const Tensor y = compute("square", UnaryOp::square, x);
    return record("square", y, {x}, {x}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        if (is_grad_enabled()) return dx.add(0, dy * (2 * saved[0]));
        dx.add(0, chain({saved[0], dy},
                        {combine_number(BinaryOp::multiply, 2.0), combine(BinaryOp::multiply, 1)}));
    });
}

Tensor sqrt(const Tensor& x) {
    const OpScope scope("sqrt");
    detail::require_defined("sqrt", x, "the operand");
    const Tensor y = compute("sqrt", UnaryOp::square_root, as_floating(x));
    return record("sqrt", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        if (is_grad_enabled()) return dx.add(0, dy / (2 * saved[0]));
        dx.add(0, chain({dy, saved[0]},
                        {combine(BinaryOp::divide, 1), combine_number(BinaryOp::multiply, 0.5)}));
    });
}

Tensor rsqrt(const Tensor& given) {
    const OpScope scope("rsqrt");
    detail::require_defined("rsqrt", given, "the operand");
    const Tensor x = detail::autocast_wide(given);
    const Tensor y = compute("rsqrt", UnaryOp::reciprocal_square_root, as_floating(x));
    return record("rsqrt", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor y = saved[0];
        if (is_grad_enabled()) return dx.add(0, dy * (-0.5 * y * square(y)));
        dx.add(0, chain({y, dy}, {apply(UnaryOp::square), combine(BinaryOp::multiply, 0),
                                  combine_number(BinaryOp::multiply, -0.5), combine(BinaryOp::multiply, 1)}));
    });
}

Tensor reciprocal(const Tensor& given) {
    const OpScope scope("reciprocal");
    detail::require_defined("reciprocal", given, "the operand");
    const Tensor x = detail::autocast_wide(given);
    const Tensor y = compute("reciprocal", UnaryOp::reciprocal, as_floating(x));
    return record("reciprocal", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        if (is_grad_enabled()) return dx.add(0, -(dy * square(saved[0])));
        dx.add(0, chain({saved[0], dy}, {apply(UnaryOp::square), combine_number(BinaryOp::multiply, -1.0),
                                         combine(BinaryOp::multiply, 1)}));
    });
}

Tensor exp(const Tensor& given) {
    const OpScope scope("exp");
    detail::require_defined("exp", given, "the operand");
    const Tensor x = detail::autocast_wide(given);
    const Tensor y = compute("exp", UnaryOp::exponential, as_floating(x));
    return record("exp", y, {x}, {y},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) { dx.add(0, dy * saved[0]); });
}

Tensor log(const Tensor& given) {
    const OpScope scope("log");
    detail::require_defined("log", given, "the operand");
    const Tensor x = detail::autocast_wide(given);
    const Tensor y = compute("log", UnaryOp::logarithm, as_floating(x));
    return record("log", y, {x}, {x},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) { dx.add(0, dy / saved[0]); });
}

Tensor sin(const Tensor& x) {
    const OpScope scope("sin");
    detail::require_defined("sin", x, "the operand");
    const Tensor y = compute("sin", UnaryOp::sine, as_floating(x));
    return record("sin", y, {x}, {x},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) { dx.add(0, dy * cos(saved[0])); });
}

Tensor cos(const Tensor& x) {
    const OpScope scope("cos");
    detail::require_defined("cos", x, "the operand");
    const Tensor y = compute("cos", UnaryOp::cosine, as_floating(x));
    return record("cos", y, {x}, {x}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        dx.add(0, -(dy * sin(saved[0])));
    });
}

Tensor erf(const Tensor& x) {
    const OpScope scope("erf");
    detail::require_defined("erf", x, "the operand");
    const Tensor y = compute("erf", UnaryOp::error_function, as_floating(x));
    return record("erf", y, {x}, {x}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const double scale = 2.0 * std::numbers::inv_sqrtpi;
        if (is_grad_enabled()) return dx.add(0, dy * (scale * exp(-square(saved[0]))));
        dx.add(0, chain({saved[0], dy},
                        {apply(UnaryOp::square), apply(UnaryOp::negate), apply(UnaryOp::exponential),
                         combine_number(BinaryOp::multiply, scale), combine(BinaryOp::multiply, 1)}));
    });
}

namespace {

/// floor, ceil and round: integers are returned unchanged; the derivative is 0.
Tensor step_function(const char* name, UnaryOp op, const Tensor& x) {
    const OpScope scope(name);
    detail::require_defined(name, x, "the operand");
    const Tensor y = is_floating(x.dtype()) ? compute(name, op, x) : detail::copy_of(x);
    return record(name, y, {x}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, detail::zero_like(dy)); });
}

}  // namespace

Tensor floor(const Tensor& x) { return step_function("floor", UnaryOp::floor, x); }
Tensor ceil(const Tensor& x) { return step_function("ceil", UnaryOp::ceil, x); }
Tensor round(const Tensor& x) { return step_function("round", UnaryOp::round, x); }

Tensor is_nan(const Tensor& x) { return test("is_nan", UnaryOp::is_nan, x); }
Tensor is_finite(const Tensor& x) { return test("is_finite", UnaryOp::is_finite, x); }
Tensor logical_not(const Tensor& x) { return test("logical_not", UnaryOp::logical_not, x); }

}  // namespace potluck
