#pragma once

#include <cstdint>

#include "core/random.h"

namespace potluck::cpu {

/// The 32-bit random numbers of elements [first, first + n) of the sequence at `key` (many blocks of Philox at once).
/// Element i has lane i % 4 of block i / 4. `stream` 1 gives independent numbers: the lower halves of 64-bit ones.
void random_words(RandomKey key, std::int64_t first, std::int64_t n, std::uint32_t* words,
                  std::uint32_t stream = 0);

}  // namespace potluck::cpu
