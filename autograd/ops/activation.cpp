#include "autograd/ops/activation.h"

#include <cmath>
#include <numbers>

#include "autograd/ops/chain.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

Tensor compute(const char* name, UnaryOp op, const Tensor& given) {
    detail::require_defined(name, given, "the operand");
    const Tensor x = detail::as_floating(given);
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).unary(op, x, y);
    return y;
}

/// The fused gradient: a single pass over x and dy.
Tensor fused_backward(UnaryOp op, const Tensor& x, const Tensor& dy) {
    Tensor dx = Tensor::empty(dy.shape(), {dy.dtype(), dy.device()});
    backend(dy.device()).unary_backward(op, x, dy, dx);
    return dx;
}

}  // namespace

Tensor relu(const Tensor& x) {
    const OpScope scope("relu");
    const Tensor y = compute("relu", UnaryOp::relu, x);
    // y serves as well as x to find where the derivative is 1, and the next op often saves y anyway.
    return record("relu", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor y = saved[0];
        if (is_grad_enabled())
            dx.add(0, where(y > 0, dy, detail::scalar_like(dy, 0)));
        else
            dx.add(0, fused_backward(UnaryOp::relu, y, dy));
    });
}

Tensor gelu(const Tensor& x) { return gelu(x, GeluKind::erf); }

Tensor gelu(const Tensor& x, GeluKind kind) {
    const OpScope scope("gelu");
    return detail::record_gelu(
        x, compute("gelu", kind == GeluKind::erf ? UnaryOp::gelu : UnaryOp::gelu_tanh, x), kind);
}

Tensor detail::record_gelu(const Tensor& x, const Tensor& y, GeluKind kind) {
    const UnaryOp op = kind == GeluKind::erf ? UnaryOp::gelu : UnaryOp::gelu_tanh;
    return record("gelu", y, {x}, {x}, [kind, op](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor x = saved[0];
        if (!is_grad_enabled()) return dx.add(0, fused_backward(op, x, dy));
        if (kind == GeluKind::erf) {
            const Tensor probability = 0.5 * (1.0 + erf(x * (1.0 / std::numbers::sqrt2)));
            const Tensor density = std::sqrt(0.5) * std::numbers::inv_sqrtpi * exp(-0.5 * square(x));
            dx.add(0, dy * (probability + x * density));
        } else {
            const double scale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // sqrt(2 / pi)
            const double cubic = 0.044715;
            const Tensor t = tanh(scale * (x + cubic * x * square(x)));
            const Tensor inner_derivative = scale * (1.0 + 3.0 * cubic * square(x));
            dx.add(0, dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - square(t)) * inner_derivative));
        }
    });
}

Tensor silu(const Tensor& x) {
    const OpScope scope("silu");
    const Tensor y = compute("silu", UnaryOp::silu, x);
    return record("silu", y, {x}, {x}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor x = saved[0];
        if (!is_grad_enabled()) return dx.add(0, fused_backward(UnaryOp::silu, x, dy));
        const Tensor s = sigmoid(x);
        dx.add(0, dy * (s + x * s * (1.0 - s)));
    });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
    const OpScope scope("swiglu");
    detail::require_defined("swiglu", gate, "the gate");
    detail::require_defined("swiglu", up, "the other factor");
    const Tensor y = detail::chain({detail::as_floating(gate), up},
                                   {detail::apply(UnaryOp::silu), detail::combine(BinaryOp::multiply, 1)});
    return record("swiglu", y, {gate, up}, {gate, up},
                  [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor gate = saved[0], up = saved[1];
                      if (is_grad_enabled()) {
                          if (dx.wants(0)) {
                              const Tensor s = sigmoid(gate);
                              dx.add(0, dy * up * (s + gate * s * (1.0 - s)));
                          }
                          if (dx.wants(1)) dx.add(1, dy * silu(gate));
                          return;
                      }
                      if (dx.wants(0))
                          dx.add(0, detail::chain({dy, up, gate}, {detail::combine(BinaryOp::multiply, 1),
                                                                   detail::derivative(UnaryOp::silu, 2)}));
                      if (dx.wants(1))
                          dx.add(1, detail::chain({gate, dy}, {detail::apply(UnaryOp::silu),
                                                               detail::combine(BinaryOp::multiply, 1)}));
                  });
}

Tensor tanh(const Tensor& x) {
    const OpScope scope("tanh");
    const Tensor y = compute("tanh", UnaryOp::tanh, x);
    return record("tanh", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor y = saved[0];
        if (is_grad_enabled()) return dx.add(0, dy * (1.0 - square(y)));
        // dy - dy y^2
        dx.add(0,
               detail::chain({y, dy}, {detail::apply(UnaryOp::square), detail::combine(BinaryOp::multiply, 1),
                                       detail::combine_into(BinaryOp::subtract, 1)}));
    });
}

Tensor sigmoid(const Tensor& x) {
    const OpScope scope("sigmoid");
    const Tensor y = compute("sigmoid", UnaryOp::sigmoid, x);
    return record("sigmoid", y, {x}, {y}, [](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor y = saved[0];
        if (is_grad_enabled()) return dx.add(0, dy * (y * (1.0 - y)));
        // (y - y^2) dy
        dx.add(0, detail::chain({y, dy},
                                {detail::apply(UnaryOp::square), detail::combine_into(BinaryOp::subtract, 0),
                                 detail::combine(BinaryOp::multiply, 1)}));
    });
}

}  // namespace potluck
