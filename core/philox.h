#pragma once

// Internal: the Philox rounds, as core/random.h describes them, for whoever computes many blocks at once.

#include <array>
#include <cstdint>

#include "core/random.h"

namespace potluck {

inline constexpr std::uint32_t philox_multipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr std::uint32_t philox_key_steps[2] = {0x9E3779B9u, 0xBB67AE85u};
inline constexpr int philox_rounds = 10;

/// The four numbers of one counter.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < philox_rounds; ++round) {
        const std::uint64_t a = std::uint64_t{philox_multipliers[0]} * counter[0];
        const std::uint64_t b = std::uint64_t{philox_multipliers[1]} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key[0] += philox_key_steps[0];
        key[1] += philox_key_steps[1];
    }
    return counter;
}

/// The counter of a block has the block's number in its lower half; the upper half tells apart the words that need
/// more than 32 bits for one element: stream 0 holds their upper bits, stream 1 the lower ones.
constexpr std::array<std::uint32_t, 4> philox_block(RandomKey key, std::uint64_t block,
                                                    std::uint32_t stream) {
    const std::uint64_t place = key.offset + block;
    return philox4x32({static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32), stream, 0},
                      {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
}

}  // namespace potluck
