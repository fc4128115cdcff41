#pragma once

// Which elements dropout keeps: the rule that dropout and attention share.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "core/cpu/random_words.h"

namespace potluck::cpu {

/// An element is dropped when its random number (lane i % 4 of block i / 4) is below this threshold.
inline std::uint64_t dropout_threshold(double p) {
    return static_cast<std::uint64_t>(std::llround(std::clamp(p, 0.0, 1.0) * 0x1p32));
}

/// The dropout factors of elements [first, first + count) of the sequence at a key: 0 or 1 / (1 - p).
template <class T>
void write_dropout_factors(RandomKey key, double p, std::int64_t first, std::int64_t count, T* factors) {
    const std::uint64_t threshold = dropout_threshold(p);
    if (threshold >> 32 != 0) {  // p = 1
        std::fill_n(factors, count, T{0});
        return;
    }
    const auto lowest_kept = static_cast<std::uint32_t>(threshold);
    const T scale = static_cast<T>(1 / (1 - p));
    std::array<std::uint32_t, 64> words;
    for (std::int64_t at = 0; at < count; at += 64) {
        const std::int64_t n = std::min<std::int64_t>(64, count - at);
        random_words(key, first + at, n, words.data());
        for (std::int64_t i = 0; i < n; ++i)
            factors[at + i] = words[static_cast<std::size_t>(i)] >= lowest_kept ? scale : T{0};
    }
}

}  // namespace potluck::cpu
