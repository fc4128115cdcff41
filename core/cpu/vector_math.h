#pragma once

// Elementary functions without branches, so that the compiler vectorises a plain loop over them.
//
// The f32 versions are our own: polynomials fitted by the Remez algorithm to the stated error, after an exact argument
// reduction. NaN is passed on; infinities and subnormal results are correct. tests/ops/activation.cpp checks the bounds
// (in units in the last place, against f64) over the whole range. The functions are always inlined: a loop with a call
// in it is not vectorised. The f64 versions are those of the C++ library.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace potluck::cpu {

namespace detail {

/// 2^n for n in [-126, 127], given as an unsigned number that may have wrapped around.
[[gnu::always_inline]] constexpr float power_of_two(std::uint32_t n) {
    return std::bit_cast<float>((n + 127U) << 23);
}

/// Clamps the magnitude of x (and NaN) to `limit`. It uses integer operations, because after a floating comparison with
/// a constant the compiler computes both alternatives, and the one that is not needed may contain subnormal numbers,
/// which take a hundred times as long.
[[gnu::always_inline]] constexpr float cut(float x, float limit) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t magnitude = std::min(bits & 0x7fffffffU, std::bit_cast<std::uint32_t>(limit));
    return std::bit_cast<float>((bits & 0x80000000U) | magnitude);
}

/// exp(high + low) for |high| up to 106 and |low| far smaller.
[[gnu::always_inline]] constexpr float exponential_of_sum(float high, float low) {
    constexpr float log2_of_e = 0x1.715476p+0F;
    constexpr float ln2_high = 0x1.62e400p-1F;  // 15 bits: n * ln2_high is exact
    constexpr float ln2_low = 0x1.7f7d1cp-20F;
    constexpr float to_integer = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
    const float shifted = high * log2_of_e + to_integer;
    const float n = shifted - to_integer;
    const float r = ((high - n * ln2_high) - n * ln2_low) + low;  // |r| <= ln(2) / 2
    // exp(r) = 1 + r + r^2 P(r), relative error 2^-28
    float p = 0x1.6a1aaep-10F;
    p = p * r + 0x1.123fc6p-7F;
    p = p * r + 0x1.555916p-5F;
    p = p * r + 0x1.55548ap-3F;
    p = p * r + 0x1.fffffcp-2F;
    const float e = 1.0F + (r + r * r * p);
    // In two steps, as 2^n may be out of range although the result is not (or rounds to a subnormal).
    const std::uint32_t whole =
        std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(to_integer);
    const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole) >> 1);
    return e * power_of_two(half) * power_of_two(whole - half);
}

}  // namespace detail

/// exp(x) to 1 ulp.
[[gnu::always_inline]] inline float exponential(float x) {
    const float y = detail::exponential_of_sum(detail::cut(x, 104.5F), 0.0F);  // 0 or infinity beyond it
    return x != x ? x : y;
}
inline double exponential(double x) { return std::exp(x); }

/// exp(x) to 1 ulp for x <= 87, with subnormal results flushed to 0: for the weights of a softmax, whose largest is 1.
/// Half the work of exponential().
[[gnu::always_inline]] inline float exponential_weight(float x) {
    constexpr float log2_of_e = 0x1.715476p+0F;
    constexpr float ln2_high = 0x1.62e400p-1F;
    constexpr float ln2_low = 0x1.7f7d1cp-20F;
    constexpr float to_integer = 0x1.8p23F;
    const float shifted = x * log2_of_e + to_integer;
    const float n = shifted - to_integer;
    const float r = (x - n * ln2_high) - n * ln2_low;
    const float p = (((0x1.6a1aaep-10F * r + 0x1.123fc6p-7F) * r + 0x1.555916p-5F) * r + 0x1.55548ap-3F) * r +
                    0x1.fffffcp-2F;
    const float e = 1.0F + (r + r * r * p);
    // Multiply by 2^n by adding n to the exponent; the bits of to_integer are shifted out.
    const float y =
        std::bit_cast<float>(std::bit_cast<std::uint32_t>(e) + (std::bit_cast<std::uint32_t>(shifted) << 23));
    return x < -87.0F ? 0.0F : y;
}
inline double exponential_weight(double x) { return std::exp(x); }

/// Natural logarithm to 2 ulp: -inf at 0, NaN for negative numbers.
[[gnu::always_inline]] inline float logarithm(float x) {
    constexpr float ln2_high = 0x1.62e400p-1F;
    constexpr float ln2_low = 0x1.7f7d1cp-20F;
    constexpr std::uint32_t sqrt_half = 0x3f3504f3U;
    // x = m 2^n with m in [sqrt(1/2), sqrt(2)); subnormal numbers are scaled up first.
    const bool is_small = x < 0x1p-126F;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(is_small ? x * 0x1p23F : x) - sqrt_half;
    const auto exponent = static_cast<std::int32_t>(bits) >> 23;
    const float n = static_cast<float>(exponent) - (is_small ? 23.0F : 0.0F);
    const float f = std::bit_cast<float>((bits & 0x007fffffU) + sqrt_half) - 1.0F;
    // log(1 + f) = f - f^2 / 2 + f^3 P(f), relative error 2^-27
    float p = -0x1.38b514p-4F;
    p = p * f + 0x1.055b40p-3F;
    p = p * f - 0x1.0d8544p-3F;
    p = p * f + 0x1.22da24p-3F;
    p = p * f - 0x1.547244p-3F;
    p = p * f + 0x1.99a008p-3F;
    p = p * f - 0x1.000226p-2F;
    p = p * f + 0x1.555554p-2F;
    const float square = f * f;
    const float low = n * ln2_low + square * (f * p);
    float y = n * ln2_high + (f + (low - 0.5F * square));
    y = x == 0.0F ? -__builtin_inff() : y;
    y = x < 0.0F ? __builtin_nanf("") : y;
    return x < __builtin_inff() ? y : x + x * (x < 0.0F ? 0.0F : 1.0F);  // infinity and NaN are passed on
}
inline double logarithm(double x) { return std::log(x); }

/// 1 / (1 + exp(-x)) to 3 ulp, without overflow on either side.
template <class T>
[[gnu::always_inline]] inline T sigmoid(T x) {
    const T e = exponential(-std::fabs(x));
    return (x < T(0) ? e : T(1)) / (T(1) + e);
}

/// Hyperbolic tangent to 2 ulp.
[[gnu::always_inline]] inline float hyperbolic_tangent(float x) {
    const float a = std::fabs(x);
    const float square = x * x;
    // tanh(x) = x + x^3 P(x^2) below 0.625, relative error 2^-27
    float p = -0x1.722b36p-8F;
    p = p * square + 0x1.51580ap-6F;
    p = p * square - 0x1.b81dc4p-5F;
    p = p * square + 0x1.110646p-3F;
    p = p * square - 0x1.55552ep-2F;
    const float near = x + x * (square * p);
    const float far = std::copysign(1.0F - 2.0F / (exponential(2.0F * a) + 1.0F), x);
    return a < 0.625F ? near : far;
}
inline double hyperbolic_tangent(double x) { return std::tanh(x); }

/// The upper tail of the standard normal distribution at |x|, and exp(-x^2 / 2), an intermediate result.
struct NormalTail {
    float tail;
    float bell;
};
/// Both to 5 ulp, relative also far out in the tail. (constexpr, so that CUDA kernels may call it.)
[[gnu::always_inline]] constexpr NormalTail normal_tail(float x) {
    const float a = detail::cut(std::fabs(x), 14.5F);  // both are 0 beyond the limit
    // a^2 = high^2 + (a - high) (a + high), where high has 12 bits and so an exact square: this gives x^2 to more than
    // 24 bits.
    const float high = std::bit_cast<float>(std::bit_cast<std::uint32_t>(a) & 0xfffff000U);
    const float bell = detail::exponential_of_sum(-0.5F * high * high, -0.5F * (a - high) * (a + high));
    // tail = bell / (1 + a) Q(t) with t = (a - 4) / (a + 4), relative error 2^-29
    const float t = (a - 4.0F) / (a + 4.0F);
    float q = -0x1.2c30d6p-14F;
    q = q * t - 0x1.fb147ep-15F;
    q = q * t + 0x1.6b4bc4p-11F;
    q = q * t - 0x1.3e8cb2p-12F;
    q = q * t - 0x1.47f866p-8F;
    q = q * t + 0x1.25eea6p-6F;
    q = q * t - 0x1.07c28ep-5F;
    q = q * t + 0x1.d49504p-6F;
    q = q * t + 0x1.cabd1ep-7F;
    q = q * t - 0x1.8c18f0p-4F;
    q = q * t + 0x1.e361eap-2F;
    const float tail = bell * q / (a + 1.0F);
    return {x != x ? x : tail, x != x ? x : bell};
}

/// The error function to 2 ulp.
[[gnu::always_inline]] inline float error_function(float x) {
    const float square = x * x;
    // erf(x) = x + x P(x^2) below 1, relative error 2^-29
    float p = 0x1.496a16p-14F;
    p = p * square - 0x1.a3f6f6p-11F;
    p = p * square + 0x1.5405b0p-8F;
    p = p * square - 0x1.b7f90cp-6F;
    p = p * square + 0x1.ce2cf8p-4F;
    p = p * square - 0x1.81273ep-2F;
    p = p * square + 0x1.06eba8p-3F;
    const float near = x + x * p;
    const float far = std::copysign(1.0F - 2.0F * normal_tail(x * 0x1.6a09e6p+0F).tail, x);
    return std::fabs(x) < 1.0F ? near : far;
}
inline double error_function(double x) { return std::erf(x); }

}  // namespace potluck::cpu
