#include "core/cpu/convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace potluck::cpu {
namespace {

template <class T>
constexpr bool is_half = std::same_as<T, float16> || std::same_as<T, bfloat16>;

/// Rounds to float; an inexact result is rounded to the neighbour whose last bit is odd. Rounding that once more to a
/// narrower type gives the same result as rounding `value` directly.
/// Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd", 2008.
float to_float_odd(double value) {
    const auto nearest = static_cast<float>(value);
    const auto back = static_cast<double>(nearest);
    const auto bits = std::bit_cast<std::uint32_t>(nearest);
    if (back == value || std::isnan(value) || (bits & 1u) != 0) return nearest;
    return std::bit_cast<float>(std::fabs(back) > std::fabs(value) ? bits - 1 : bits + 1);
}

/// The same for integers with more than the 53 bits of a double: the lost bits are OR-ed into the last one kept.
double to_double_odd(std::int64_t value) {
    auto magnitude = static_cast<std::uint64_t>(value);
    if (value < 0) magnitude = 0 - magnitude;
    if (magnitude >> 53 != 0)
        magnitude = (magnitude & ~std::uint64_t{0xfff}) | ((magnitude & 0xfff) != 0 ? 0x1000u : 0u);
    const auto result = static_cast<double>(magnitude);
    return value < 0 ? -result : result;
}

template <class To, class From>
To to_integer(From value) {
    // The upper limits of i64 and i32 are not representable as floats: compare with the power of two above.
    constexpr auto low = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From high = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * From{2};
    if (!(value == value)) return 0;
    if (value >= high) return std::numeric_limits<To>::max();
    if (value <= low) return std::numeric_limits<To>::min();
    return static_cast<To>(value);
}

template <class To, class From>
To convert_one(From value) {
    if constexpr (std::same_as<To, From>) {
        return value;
    } else if constexpr (is_half<From>) {
        return convert_one<To>(static_cast<float>(value));
    } else if constexpr (std::same_as<To, bool>) {
        return value != From{};
    } else if constexpr (is_half<To>) {
        if constexpr (std::same_as<From, float>) return To(value);
        if constexpr (std::same_as<From, double>) return To(to_float_odd(value));
        if constexpr (std::is_integral_v<From>) return To(to_float_odd(to_double_odd(std::int64_t{value})));
    } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
        return to_integer<To>(value);
    } else {
        return static_cast<To>(value);
    }
}

/// Converts dense runs that the compiler does not vectorise by itself. Returns the number of elements converted.
template <class From, class To>
std::int64_t convert_dense_prefix(const From*, To*, std::int64_t) {
    return 0;
}

#ifdef __x86_64__
// Asked for at run time: a build for any x86-64 has these instructions where the processor has them, as every one with
// AVX2 does.
bool has_f16c() { return __builtin_cpu_supports("avx2") != 0; }

[[gnu::target("avx,f16c")]] std::int64_t convert_by_f16c(const float16* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i,
                         _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    return i;
}

[[gnu::target("avx,f16c")]] std::int64_t convert_by_f16c(const float* from, float16* to, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

template <>
std::int64_t convert_dense_prefix(const float16* from, float* to, std::int64_t n) {
    return has_f16c() ? convert_by_f16c(from, to, n) : 0;
}

template <>
std::int64_t convert_dense_prefix(const float* from, float16* to, std::int64_t n) {
    return has_f16c() ? convert_by_f16c(from, to, n) : 0;
}
#endif

template <class From, class To>
void convert_run(const From* from, std::int64_t from_stride, To* to, std::int64_t to_stride, std::int64_t n) {
    if (from_stride == 0) {
        const To value = convert_one<To>(*from);
        if (to_stride == 1)
            std::fill_n(to, n, value);
        else
            for (std::int64_t i = 0; i < n; ++i) to[i * to_stride] = value;
    } else if (from_stride == 1 && to_stride == 1) {
        for (std::int64_t i = convert_dense_prefix(from, to, n); i < n; ++i) to[i] = convert_one<To>(from[i]);
    } else if (to_stride == 1) {
        for (std::int64_t i = 0; i < n; ++i) to[i] = convert_one<To>(from[i * from_stride]);
    } else {
        for (std::int64_t i = 0; i < n; ++i) to[i * to_stride] = convert_one<To>(from[i * from_stride]);
    }
}

}  // namespace

void convert(const void* from, DType from_dtype, std::int64_t from_stride, void* to, DType to_dtype,
             std::int64_t to_stride, std::int64_t n) {
    if (n <= 0) return;
    if (from_dtype == to_dtype && from_stride == 1 && to_stride == 1) {
        std::memmove(to, from, static_cast<std::size_t>(n * size_of(from_dtype)));
        return;
    }
    visit(from_dtype, [&](auto from_zero) {
        visit(to_dtype, [&](auto to_zero) {
            using From = decltype(from_zero);
            using To = decltype(to_zero);
            convert_run(static_cast<const From*>(from), from_stride, static_cast<To*>(to), to_stride, n);
        });
    });
}

}  // namespace potluck::cpu
