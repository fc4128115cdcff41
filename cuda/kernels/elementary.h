#pragma once

// The elementary functions of element-wise kernels, in double, float and int64, as on the CPU
// (core/cpu/elementwise.cpp, core/cpu/activation.cpp). The op is dispatched once per pack: all threads take the same
// branch, which costs a memory-bound kernel nothing, and one kernel serves all ops of a dtype.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/cpu/vector_math.h"
#include "core/kernel_specs.h"
#include "cuda/launch.h"

namespace potluck::cuda {

namespace detail {

/// Integer arithmetic wraps around by using unsigned numbers; signed overflow would be undefined.
__device__ inline std::uint64_t bits(std::int64_t x) { return static_cast<std::uint64_t>(x); }
__device__ inline std::int64_t integer(std::uint64_t x) { return static_cast<std::int64_t>(x); }

__device__ inline std::int64_t integer_power(std::int64_t base, std::int64_t exponent) {
    std::uint64_t result = 1;
    std::uint64_t factor = bits(base);
    for (std::uint64_t e = bits(exponent); e != 0; e >>= 1) {
        if ((e & 1u) != 0) result *= factor;
        factor *= factor;
    }
    return integer(result);
}

/// Rounded down. A divisor of 0 is reported later (see cuda/faults.h); the result is then arbitrary.
__device__ inline std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return integer(0 - bits(a));  // the lowest integer has no positive counterpart: wraps around
    const std::int64_t quotient = a / b;
    return quotient - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

__device__ inline std::int64_t floor_remainder(std::int64_t a, std::int64_t b) {
    if (b == 0 || b == -1) return 0;
    const std::int64_t rest = a % b;
    return rest + ((rest != 0 && (rest < 0) != (b < 0)) ? b : 0);
}
template <class T>
__device__ T floor_remainder(T a, T b) {
    const T rest = std::fmod(a, b);
    if (rest == T{0}) return std::copysign(T{0}, b);
    return (rest < T{0}) != (b < T{0}) ? rest + b : rest;
}

/// For floating types: the integer q for which a = q b + floor_remainder(a, b); infinite or NaN as a / b for b = 0.
template <class T>
__device__ T floor_divide(T a, T b) {
    if (b == T{0}) return a / b;
    const T rest = std::fmod(a, b);
    const T quotient = (a - rest) / b - (rest != T{0} && (rest < T{0}) != (b < T{0}) ? T{1} : T{0});
    return quotient == T{0} ? std::copysign(T{0}, a / b) : std::rint(quotient);
}

// ---- activations. Arguments far out in the flat region are clamped before they are multiplied by a probability that
// is 0
//      there, so that infinity does not become NaN. A NaN fails every comparison and is passed on. ----

template <class T>
__device__ T not_below(T x, T limit) {
    return x < limit ? limit : x;
}
template <class T>
__device__ T not_beyond(T x, T limit) {
    return x < -limit ? -limit : (x > limit ? limit : x);
}

template <class T>
__device__ T sigmoid(T x) {
    const T e = std::exp(-std::fabs(x));
    return (x < T{0} ? e : T{1}) / (T{1} + e);
}

inline constexpr double reciprocal_root_of_two_pi = 0.398942280401432677939946059934;

/// x * Phi(x), where Phi is the cumulative distribution function of the normal distribution.
__device__ inline float gelu(float x) {
    const float tail = cpu::normal_tail(x).tail;  // unlike 1 + erf, keeps its relative precision
    return not_below(x, -20.0f) * (x < 0.0f ? tail : 1.0f - tail);
}
__device__ inline double gelu(double x) {
    return not_below(x, -50.0) * 0.5 * std::erfc(-x * 0.70710678118654752440);
}

__device__ inline float gelu_backward(float x, float dy) {
    const cpu::NormalTail normal = cpu::normal_tail(x);
    const float probability = x < 0.0f ? normal.tail : 1.0f - normal.tail;
    const float density = static_cast<float>(reciprocal_root_of_two_pi) * normal.bell;
    return dy * (probability + not_beyond(x, 20.0f) * density);
}
__device__ inline double gelu_backward(double x, double dy) {
    const double z = not_beyond(x, 50.0);
    const double density = reciprocal_root_of_two_pi * std::exp(-0.5 * z * z);
    return dy * (0.5 * std::erfc(-z * 0.70710678118654752440) + z * density);
}

// x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
inline constexpr double twice_root_of_two_by_pi = 1.59576912160573071175978423974;
inline constexpr double cubic = 0.044715;

template <class T>
__device__ T gelu_tanh(T x) {
    const T z = not_below(x, T{-40});
    return z * sigmoid(T(twice_root_of_two_by_pi) * (x + T(cubic) * x * x * x));
}
template <class T>
__device__ T gelu_tanh_backward(T x, T dy) {
    const T z = not_beyond(x, T{40});
    const T square = z * z;
    const T s = sigmoid(T(twice_root_of_two_by_pi) * (z + T(cubic) * z * square));
    const T derivative = T(twice_root_of_two_by_pi) * (T{1} + T(3 * cubic) * square);
    return dy * (s + z * derivative * (s * (T{1} - s)));
}

template <class T>
__device__ T silu(T x) {
    return not_below(x, T{-1000}) * sigmoid(x);
}
template <class T>
__device__ T silu_backward(T x, T dy) {
    const T z = not_beyond(x, T{1000});
    const T s = sigmoid(z);
    return dy * (s + z * (s * (T{1} - s)));
}

}  // namespace detail

/// values = op(values), where T is double, float or int64. Values are unchanged for ops that T does not have.
template <int N, class T>
__device__ void apply_unary(UnaryOp op, T (&values)[N]) {
    const auto each = [&](auto function) {
        for (int i = 0; i < N; ++i) values[i] = function(values[i]);
    };
    if constexpr (std::is_integral_v<T>) {
        using detail::bits, detail::integer;
        switch (op) {
            case UnaryOp::negate:
                return each([](T x) { return integer(0 - bits(x)); });
            case UnaryOp::absolute:
                return each([](T x) { return x < 0 ? integer(0 - bits(x)) : x; });
            case UnaryOp::sign:
                return each([](T x) { return x > 0 ? T{1} : (x < 0 ? T{-1} : T{0}); });
            case UnaryOp::square:
                return each([](T x) { return integer(bits(x) * bits(x)); });
            case UnaryOp::relu:
                return each([](T x) { return x < 0 ? T{0} : x; });
            default:  // floor, ceil and round of integers
                return;
        }
    } else {
        switch (op) {
            case UnaryOp::negate:
                return each([](T x) { return -x; });
            case UnaryOp::absolute:
                return each([](T x) { return std::fabs(x); });
            case UnaryOp::sign:
                return each([](T x) { return x > T{0} ? T{1} : (x < T{0} ? T{-1} : x); });
            case UnaryOp::square:
                return each([](T x) { return x * x; });
            case UnaryOp::square_root:
                return each([](T x) { return std::sqrt(x); });
            case UnaryOp::reciprocal_square_root:
                return each([](T x) { return T{1} / std::sqrt(x); });
            case UnaryOp::reciprocal:
                return each([](T x) { return T{1} / x; });
            case UnaryOp::exponential:
                return each([](T x) { return std::exp(x); });
            case UnaryOp::logarithm:
                return each([](T x) { return std::log(x); });
            case UnaryOp::floor:
                return each([](T x) { return std::floor(x); });
            case UnaryOp::ceil:
                return each([](T x) { return std::ceil(x); });
            case UnaryOp::round:
                return each([](T x) { return std::rint(x); });
            case UnaryOp::error_function:
                return each([](T x) { return std::erf(x); });
            case UnaryOp::relu:
                return each([](T x) { return x < T{0} ? T{0} : x; });
            case UnaryOp::gelu:
                return each([](T x) { return detail::gelu(x); });
            case UnaryOp::gelu_tanh:
                return each([](T x) { return detail::gelu_tanh(x); });
            case UnaryOp::silu:
                return each([](T x) { return detail::silu(x); });
            case UnaryOp::tanh:
                return each([](T x) { return std::tanh(x); });
            case UnaryOp::sigmoid:
                return each([](T x) { return detail::sigmoid(x); });
            default:  // sine and cosine have their own kernels; is_nan etc. write bool
                return;
        }
    }
}

/// dx = dy * op'(x), for the activations that have a fused backward. dx may be dy.
template <int N, class T>
__device__ void apply_unary_backward(UnaryOp op, const T (&x)[N], const T (&dy)[N], T (&dx)[N]) {
    const auto each = [&](auto function) {
        for (int i = 0; i < N; ++i) dx[i] = function(x[i], dy[i]);
    };
    switch (op) {
        case UnaryOp::relu:
            return each([](T value, T derivative) { return value <= T{0} ? T{0} : derivative; });
        case UnaryOp::gelu:
            return each([](T value, T derivative) { return detail::gelu_backward(value, derivative); });
        case UnaryOp::gelu_tanh:
            return each([](T value, T derivative) { return detail::gelu_tanh_backward(value, derivative); });
        default:
            return each([](T value, T derivative) { return detail::silu_backward(value, derivative); });
    }
}

/// y = a op b. y may be a or b.
template <int N, class T>
__device__ void apply_binary(BinaryOp op, const T (&a)[N], const T (&b)[N], T (&y)[N]) {
    constexpr bool integral = std::is_integral_v<T>;
    using detail::bits, detail::integer;
    const auto each = [&](auto function) {
        for (int i = 0; i < N; ++i) y[i] = function(a[i], b[i]);
    };
    switch (op) {
        case BinaryOp::add:
            return each([](T u, T v) {
                if constexpr (integral)
                    return integer(bits(u) + bits(v));
                else
                    return u + v;
            });
        case BinaryOp::subtract:
            return each([](T u, T v) {
                if constexpr (integral)
                    return integer(bits(u) - bits(v));
                else
                    return u - v;
            });
        case BinaryOp::multiply:
            return each([](T u, T v) {
                if constexpr (integral)
                    return integer(bits(u) * bits(v));
                else
                    return u * v;
            });
        case BinaryOp::divide:
            return each([](T u, T v) {
                if constexpr (integral)
                    return detail::floor_divide(u, v);
                else
                    return u / v;
            });
        case BinaryOp::floor_divide:
            return each([](T u, T v) { return detail::floor_divide(u, v); });
        case BinaryOp::power:
            return each([](T u, T v) {
                if constexpr (integral)
                    return detail::integer_power(u, v);
                else
                    return std::pow(u, v);
            });
        case BinaryOp::maximum:  // a NaN in b fails the comparison, and so wins
            return each([](T u, T v) { return (u > v || u != u) ? u : v; });
        case BinaryOp::minimum:
            return each([](T u, T v) { return (u < v || u != u) ? u : v; });
        case BinaryOp::remainder:
            return each([](T u, T v) { return detail::floor_remainder(u, v); });
    }
}

}  // namespace potluck::cuda
