#include "core/cpu/random_words.h"

#include <algorithm>
#include <array>

#include "core/philox.h"

namespace potluck::cpu {
namespace {

constexpr std::int64_t blocks_at_once = 64;  // several registers hide the latency of multiplication
constexpr std::int64_t words_at_once = 4 * blocks_at_once;

/// Blocks place .. place + 63: the rounds of philox4x32(), each operation over 64 blocks, so that the compiler
/// vectorises it.
void philox_many(RandomKey key, std::uint64_t place, std::uint32_t stream, std::uint32_t* words) {
    const std::array<std::uint32_t, 2> upper = philox_upper_counter(key, stream);
    std::array<std::uint32_t, blocks_at_once> c0, c1, c2, c3;
    for (std::size_t i = 0; i < blocks_at_once; ++i) {
        c0[i] = static_cast<std::uint32_t>(place + i);
        c1[i] = static_cast<std::uint32_t>((place + i) >> 32);
        c2[i] = upper[0];
        c3[i] = upper[1];
    }
    auto key0 = static_cast<std::uint32_t>(key.seed);
    auto key1 = static_cast<std::uint32_t>(key.seed >> 32);
    for (int round = 0; round < philox_rounds; ++round) {
#pragma omp simd  // otherwise the compiler unrolls the rounds first and no longer vectorises
        for (std::size_t i = 0; i < blocks_at_once; ++i) {
            const std::uint64_t a = std::uint64_t{philox_first_multiplier} * c0[i];
            const std::uint64_t b = std::uint64_t{philox_second_multiplier} * c2[i];
            c0[i] = static_cast<std::uint32_t>(b >> 32) ^ c1[i] ^ key0;
            c1[i] = static_cast<std::uint32_t>(b);
            c2[i] = static_cast<std::uint32_t>(a >> 32) ^ c3[i] ^ key1;
            c3[i] = static_cast<std::uint32_t>(a);
        }
        key0 += philox_first_key_step;
        key1 += philox_second_key_step;
    }
    for (std::size_t i = 0; i < blocks_at_once; ++i) {
        words[4 * i + 0] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

}  // namespace

void random_words(RandomKey key, std::int64_t first, std::int64_t n, std::uint32_t* words,
                  std::uint32_t stream) {
    while (n > 0) {
        const std::uint64_t place = key.offset + static_cast<std::uint64_t>(first / 4);
        const std::int64_t skip = first % 4;
        if (skip == 0 && n >= words_at_once) {
            philox_many(key, place, stream, words);
            first += words_at_once;
            words += words_at_once;
            n -= words_at_once;
            continue;
        }
        std::array<std::uint32_t, words_at_once> some;
        philox_many(key, place, stream, some.data());
        const std::int64_t count = std::min(n, words_at_once - skip);
        std::copy_n(some.begin() + skip, count, words);
        first += count;
        words += count;
        n -= count;
    }
}

}  // namespace potluck::cpu
