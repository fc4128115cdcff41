// The activation functions and, beside each, its derivative times dy.
//
// Arguments far out in the flat region are clamped before they are multiplied by a probability that is 0 there, so that
// infinity does not become NaN. A NaN fails every comparison and is passed on.

#include <cmath>

#include "core/cpu/blocks.h"
#include "core/cpu/elementwise.h"
#include "core/cpu/vector_math.h"
#include "core/elementwise_errors.h"

namespace potluck::cpu {

namespace {

template <class T>
T not_below(T x, T limit) {
    return x < limit ? limit : x;
}
template <class T>
T not_beyond(T x, T limit) {
    return x < -limit ? -limit : (x > limit ? limit : x);
}

// ---- relu ----

template <class T>
T relu(T x) {
    return x < T(0) ? T(0) : x;
}
template <class T>
T relu_backward(T x, T dy) {
    return x <= T(0) ? T(0) : dy;
}

// ---- gelu: x P(x), where P is the normal distribution's cumulative probability and p its density ----

constexpr double reciprocal_root_of_two_pi = 0.398942280401432677939946059934;

float gelu(float x) {
    const float tail =
        normal_tail(x).tail;  // unlike 1 + erf, keeps its relative precision on the negative side
    return not_below(x, -20.0F) * (x < 0.0F ? tail : 1.0F - tail);
}
double gelu(double x) { return not_below(x, -50.0) * 0.5 * std::erfc(-x * std::sqrt(0.5)); }

float gelu_backward(float x, float dy) {
    const NormalTail normal = normal_tail(x);
    const float probability = x < 0.0F ? normal.tail : 1.0F - normal.tail;
    const float density = static_cast<float>(reciprocal_root_of_two_pi) * normal.bell;
    return dy * (probability + not_beyond(x, 20.0F) * density);
}
double gelu_backward(double x, double dy) {
    const double z = not_beyond(x, 50.0);
    const double density = reciprocal_root_of_two_pi * std::exp(-0.5 * z * z);
    return dy * (0.5 * std::erfc(-z * std::sqrt(0.5)) + z * density);
}

// ---- gelu_tanh: x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3) ----

constexpr double twice_root_of_two_by_pi = 1.59576912160573071175978423974;
constexpr double cubic = 0.044715;

template <class T>
T gelu_tanh(T x) {
    const T z = not_below(x, T(-40));
    const T twice_u = T(twice_root_of_two_by_pi) * (x + T(cubic) * x * x * x);
    return z * sigmoid(twice_u);
}
template <class T>
T gelu_tanh_backward(T x, T dy) {
    const T z = not_beyond(x, T(40));
    const T square = z * z;
    const T s = sigmoid(T(twice_root_of_two_by_pi) * (z + T(cubic) * z * square));
    const T derivative = T(twice_root_of_two_by_pi) * (T(1) + T(3 * cubic) * square);
    return dy * (s + z * derivative * (s * (T(1) - s)));
}

// ---- silu: x sigmoid(x) ----

template <class T>
T silu(T x) {
    return not_below(x, T(-1000)) * sigmoid(x);
}
template <class T>
T silu_backward(T x, T dy) {
    const T z = not_beyond(x, T(1000));
    const T s = sigmoid(z);
    return dy * (s + z * (s * (T(1) - s)));
}

}  // namespace

template <class T>
BinaryLoop<T, T> activation_backward_loop(UnaryOp op) {
    switch (op) {
        case UnaryOp::relu:
            return binary_loop<T, T>([](T x, T dy) { return relu_backward(x, dy); });
        case UnaryOp::gelu:
            return binary_loop<T, T>([](T x, T dy) { return gelu_backward(x, dy); });
        case UnaryOp::gelu_tanh:
            return binary_loop<T, T>([](T x, T dy) { return gelu_tanh_backward(x, dy); });
        case UnaryOp::silu:
            return binary_loop<T, T>([](T x, T dy) { return silu_backward(x, dy); });
        default:
            break;
    }
    throw no_fused_backward(op);
}
template BinaryLoop<float, float> activation_backward_loop<float>(UnaryOp op);
template BinaryLoop<double, double> activation_backward_loop<double>(UnaryOp op);

template <class T>
UnaryLoop<T> activation_loop(UnaryOp op) {
    switch (op) {
        case UnaryOp::relu:
            return unary_loop<T>([](T x) { return relu(x); });
        case UnaryOp::gelu:
            return unary_loop<T>([](T x) { return gelu(x); });
        case UnaryOp::gelu_tanh:
            return unary_loop<T>([](T x) { return gelu_tanh(x); });
        case UnaryOp::silu:
            return unary_loop<T>([](T x) { return silu(x); });
        case UnaryOp::tanh:
            return unary_loop<T>([](T x) { return hyperbolic_tangent(x); });
        case UnaryOp::sigmoid:
            return unary_loop<T>([](T x) { return sigmoid(x); });
        default:
            return nullptr;
    }
}
template UnaryLoop<float> activation_loop<float>(UnaryOp op);
template UnaryLoop<double> activation_loop<double>(UnaryOp op);

void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) {
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        BlockMap<T, T, T>::run(dx, x, dy, activation_backward_loop<T>(op));
    });
}

}  // namespace potluck::cpu
