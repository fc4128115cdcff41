#pragma once

// Internal: the one rule of stochastic rounding that all devices share.

#include <cstdint>

namespace potluck {

/// The bits of the bf16 that an f32 (given by its bits) is rounded to: up with the probability that the cut-off half of
/// the fraction says, so that the mean of many roundings is the value. The upper 16 bits of `random` are added below the
/// kept fraction, and what remains there is cut off. A value that bf16 holds stays as it is, and so do infinities; NaN
/// stays NaN. A finite value above the largest bf16 may become infinite, as it may when it is rounded to nearest.
///
/// Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited Numerical Precision", ICML 2015.
constexpr std::uint16_t round_stochastically(std::uint32_t value, std::uint32_t random) {
    const std::uint32_t magnitude = value & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>((value >> 16) | 0x40u);
    if (magnitude == 0x7f800000u) return static_cast<std::uint16_t>(value >> 16);
    return static_cast<std::uint16_t>((value + (random >> 16)) >> 16);
}

}  // namespace potluck
