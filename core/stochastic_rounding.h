#pragma once

// Internal: the rule of stochastic rounding that all devices share.

#include <cstdint>

namespace potluck {

/// Rounds an f32 (given by its bits) to the bits of a bf16: up with a probability equal to the cut-off part of the
/// fraction, so that the mean of many roundings is the value. The upper 16 bits of `random` are added to the lower 16
/// bits of `value`, and the lower 16 bits of the sum are cut off. Infinities and values that bf16 can represent do not
/// change; NaN stays NaN. A finite value above the largest bf16 may become infinite, as in rounding to nearest.
///
/// Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited Numerical Precision", ICML 2015.
constexpr std::uint16_t round_stochastically(std::uint32_t value, std::uint32_t random) {
    const std::uint32_t magnitude = value & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>((value >> 16) | 0x40u);
    if (magnitude == 0x7f800000u) return static_cast<std::uint16_t>(value >> 16);
    return static_cast<std::uint16_t>((value + (random >> 16)) >> 16);
}

}  // namespace potluck
