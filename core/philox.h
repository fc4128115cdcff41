#pragma once

// Internal: the Philox rounds, as core/random.h describes them, for code that computes many blocks at once.

#include <array>
#include <cstdint>

#include "core/random.h"

namespace potluck {

// Four constants, not arrays: CUDA kernels call these functions, and a host array has no address on the device.
inline constexpr std::uint32_t philox_first_multiplier = 0xD2511F53u;
inline constexpr std::uint32_t philox_second_multiplier = 0xCD9E8D57u;
inline constexpr std::uint32_t philox_first_key_step = 0x9E3779B9u;
inline constexpr std::uint32_t philox_second_key_step = 0xBB67AE85u;
inline constexpr int philox_rounds = 10;

/// The four random numbers of one counter value.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < philox_rounds; ++round) {
        const std::uint64_t a = std::uint64_t{philox_first_multiplier} * counter[0];
        const std::uint64_t b = std::uint64_t{philox_second_multiplier} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key[0] += philox_first_key_step;
        key[1] += philox_second_key_step;
    }
    return counter;
}

/// The upper half of a counter, whose lower half is the block number. Its lowest bit separates the two words of an
/// element that needs more than 32 bits: stream 0 holds the upper bits, stream 1 the lower ones. The other bits hold
/// the update.
constexpr std::array<std::uint32_t, 2> philox_upper_counter(RandomKey key, std::uint32_t stream) {
    const std::uint64_t upper = key.update << 1 | stream;
    return {static_cast<std::uint32_t>(upper), static_cast<std::uint32_t>(upper >> 32)};
}

constexpr std::array<std::uint32_t, 4> philox_block(RandomKey key, std::uint64_t block,
                                                    std::uint32_t stream) {
    const std::uint64_t place = key.offset + block;
    const std::array<std::uint32_t, 2> upper = philox_upper_counter(key, stream);
    return philox4x32(
        {static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32), upper[0], upper[1]},
        {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
}

}  // namespace potluck
