#pragma once

// The random numbers of elements inside kernels: Philox, as core/random.h describes it. Number i of a sequence is lane
// i % 4 of block i / 4, so a thread can compute the numbers of its own elements, independently of other threads.

#include "core/philox.h"
#include "cuda/launch.h"

namespace potluck::cuda {

/// A RandomKey as a kernel parameter. In a replay of recorded work its sequence starts further on, or belongs to a
/// later update, see KernelDevice::random_advance().
struct MovingKey {
    RandomKey key;
    const std::uint64_t* advance;  // nullptr outside of recorded work

    __device__ operator RandomKey() const {
        RandomKey moved = key;
        if (advance != nullptr && key.update == 0) moved.offset += advance[0];
        if (advance != nullptr && key.update != 0) moved.update += advance[1];
        return moved;
    }
};

/// Lane `lane` of a block, without an array index at run time: registers cannot be indexed.
__device__ inline std::uint32_t lane_of(const std::array<std::uint32_t, 4>& block, int lane) {
    const std::uint32_t low = (lane & 1) != 0 ? block[1] : block[0];
    const std::uint32_t high = (lane & 1) != 0 ? block[3] : block[2];
    return (lane & 2) != 0 ? high : low;
}

/// The 32-bit number of one element. `stream` 1 gives independent numbers: the lower halves of 64-bit ones.
__device__ inline std::uint32_t random_word(RandomKey key, std::int64_t element, std::uint32_t stream = 0) {
    return lane_of(philox_block(key, static_cast<std::uint64_t>(element / 4), stream),
                   static_cast<int>(element % 4));
}

/// Those of elements [first, first + N), which begin a block or, for N = 2, the half of one. Floor: 10 rounds of 2 wide
/// products for four numbers.
template <int N>
__device__ inline void random_words(RandomKey key, std::int64_t first, std::uint32_t (&words)[N],
                                    std::uint32_t stream = 0) {
    const auto place = static_cast<std::uint64_t>(first / 4);
    if constexpr (N == 1) {
        words[0] = random_word(key, first, stream);
    } else if constexpr (N == 2) {
        const auto block = philox_block(key, place, stream);
        const bool second_half = first % 4 != 0;
        words[0] = second_half ? block[2] : block[0];
        words[1] = second_half ? block[3] : block[1];
    } else {
        static_assert(N % 4 == 0);
        for (int i = 0; i < N; i += 4) {
            const auto block = philox_block(key, place + static_cast<std::uint64_t>(i / 4), stream);
            for (int lane = 0; lane < 4; ++lane) words[i + lane] = block[static_cast<std::size_t>(lane)];
        }
    }
}

/// 64-bit numbers: stream 0 has their upper halves, stream 1 the lower ones.
template <int N>
__device__ inline void random_words(RandomKey key, std::int64_t first, std::uint64_t (&words)[N]) {
    std::uint32_t high[N], low[N];
    random_words(key, first, high, 0);
    random_words(key, first, low, 1);
    for (int i = 0; i < N; ++i) words[i] = std::uint64_t{high[i]} << 32 | low[i];
}

}  // namespace potluck::cuda
