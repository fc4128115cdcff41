#pragma once

// Conversion of one element between any two types inside kernels. The rules are those of core/cpu/convert.h:
//
//   floating -> floating   rounds once, to nearest, ties to even (f64 -> f16 too: never through f32)
//   integer  -> floating   rounds once
//   floating -> integer    truncates towards zero; NaN gives 0, out of range gives the nearest limit of the type
//   integer  -> integer    keeps the low bits
//   anything -> bool       value != 0 (NaN gives true)

#include <limits>

#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

template <class To, class From>
__device__ inline To cut_to_integer(From value) {
    // The upper limits of 64 and 32 bits are not representable as floats: compare with the power of two above.
    constexpr auto low = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From high = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * From{2};
    if (!(value == value)) return 0;
    if (value >= high) return std::numeric_limits<To>::max();
    if (value <= low) return std::numeric_limits<To>::min();
    return static_cast<To>(value);
}

template <class To, class From>
__device__ inline To convert_element(From value) {
    constexpr bool from_floating = is_half<From> || std::is_floating_point_v<From>;
    if constexpr (std::is_same_v<To, From>) {
        return value;
    } else if constexpr (is_half<From>) {
        return convert_element<To>(to_compute(value));
    } else if constexpr (std::is_same_v<To, bool>) {
        return value != From{};
    } else if constexpr (is_half<To> && from_floating) {
        constexpr bool wide = std::is_same_v<From, double>;
        if constexpr (std::is_same_v<To, __half>)
            return wide ? __double2half(static_cast<double>(value))
                        : __float2half_rn(static_cast<float>(value));
        else
            return wide ? __double2bfloat16(static_cast<double>(value))
                        : __float2bfloat16_rn(static_cast<float>(value));
    } else if constexpr (is_half<To>) {
        if constexpr (std::is_same_v<To, __half>)
            return __ll2half_rn(static_cast<long long>(value));
        else
            return __ll2bfloat16_rn(static_cast<long long>(value));
    } else if constexpr (from_floating && std::is_integral_v<To>) {
        return cut_to_integer<To>(value);
    } else {
        return static_cast<To>(value);
    }
}

}  // namespace potluck::cuda
