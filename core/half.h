#pragma once

#include <bit>
#include <cstdint>

namespace potluck {

/// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits. Storage only: arithmetic happens in float.
struct float16 {
    std::uint16_t bits = 0;

    float16() = default;
    /// Rounds to nearest, ties to even; a value out of range becomes infinity, NaN stays NaN.
    explicit float16(float value) : bits(round(value)) {}
    explicit operator float() const { return widen(bits); }
    static float16 from_bits(std::uint16_t bits) {
        float16 h;
        h.bits = bits;
        return h;
    }

    friend bool operator==(float16 a, float16 b) { return float(a) == float(b); }

private:
    static std::uint16_t round(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
        const std::uint32_t magnitude = word & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
        if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds past 65504
        if (magnitude < 0x38800000u) {  // subnormal in binary16: let the float adder round at 2^-24
            const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
            return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
        }
        const std::uint32_t odd = (magnitude >> 13) & 1u;
        return static_cast<std::uint16_t>(sign | ((magnitude + 0x0fffu + odd - 0x38000000u) >> 13));
    }
    static float widen(std::uint16_t bits) {
        const std::uint32_t sign = (bits & 0x8000u) << 16;
        const std::uint32_t exponent = (bits >> 10) & 0x1fu;
        const std::uint32_t fraction = bits & 0x3ffu;
        if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
        if (exponent == 0) {  // zero and subnormals: fraction * 2^-24 is exact in float
            const float value = static_cast<float>(fraction) * 0x1p-24F;
            return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
        }
        return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
    }
};

/// bfloat16: the upper half of a float (1 sign, 8 exponent, 7 fraction bits). Storage only.
struct bfloat16 {
    std::uint16_t bits = 0;

    bfloat16() = default;
    /// Rounds to nearest, ties to even; NaN stays NaN.
    explicit bfloat16(float value) : bits(round(value)) {}
    explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
    static bfloat16 from_bits(std::uint16_t bits) {
        bfloat16 h;
        h.bits = bits;
        return h;
    }

    friend bool operator==(bfloat16 a, bfloat16 b) { return float(a) == float(b); }

private:
    static std::uint16_t round(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
        return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
};

}  // namespace potluck
