#pragma once

// Internal: how random bits become numbers, the same on every device.

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/dtype.h"

namespace potluck {

/// Bits of precision of a dtype: so many random bits make a number in [0, 1) that the dtype represents exactly.
inline int precision_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return 53;
        case DType::f16:
            return 11;
        case DType::bf16:
            return 8;
        default:
            return 24;
    }
}

/// The largest number of the dtype that is less than `high`.
inline double below(double high, DType dtype) {
    if (dtype == DType::f64) return std::nextafter(high, -HUGE_VAL);
    // The distance to the next smaller number of the dtype; below a power of two it is half as large.
    int exponent = 0;
    const double mantissa = std::frexp(high, &exponent);
    if (dtype == DType::f32) return std::nextafter(static_cast<float>(high), -HUGE_VALF);
    const int step = exponent - precision_of(dtype) - (mantissa == 0.5 ? 1 : 0);
    return high == 0.0 ? -0x1p-24 : high - std::ldexp(1.0, step);
}

struct UnitVector {
    float cosine, sine;
};

/// Cosine and sine of a full turn times bits / 2^24, with an absolute error of at most 2 ulp of 1, without branches.
constexpr UnitVector unit_vector(std::uint32_t bits) {
    const std::uint32_t quarter =
        (bits + (1U << 21)) >> 22;  // the nearest quarter turn: the rest is within an eighth of a turn
    const auto rest = static_cast<float>(static_cast<std::int32_t>(bits - (quarter << 22)));
    const float x = rest * (0x1p-24F * 2 * std::numbers::pi_v<float>);
    const float z = x * x;
    // Taylor series: the first omitted term is below 2e-9.
    const float sine =
        x * (1 + z * (-1 / 6.0F + z * (1 / 120.0F + z * (-1 / 5040.0F + z * (1 / 362880.0F)))));
    const float cosine =
        1 +
        z * (-1 / 2.0F + z * (1 / 24.0F + z * (-1 / 720.0F + z * (1 / 40320.0F + z * (-1 / 3628800.0F)))));
    const bool swapped = (quarter & 1) != 0;
    const float across = swapped ? sine : cosine;
    const float up = swapped ? cosine : sine;
    return {((quarter + 1) & 2) != 0 ? -across : across, (quarter & 2) != 0 ? -up : up};
}

}  // namespace potluck
