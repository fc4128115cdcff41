#pragma once

// Internal: races in device memory within one kernel. Blocks run in any order and beside one another on a card, so two
// threads may only touch the same bytes, one of them writing, if they belong to one block and a barrier stands between
// (or to one warp: what its lanes do to one another through device memory is not checked). Atomics are exempt, and so is a
// kernel that calls __threadfence: blocks that hand over data by a fence and a counter are beyond these records.

#include <cstdint>

namespace potluck::emulator {

/// The last access to four bytes. `operation` and the others are cut to their bits; only what was done by the operation
/// that runs now counts.
struct KernelAccess {
    std::uint64_t operation : 22;
    std::uint64_t block : 12;
    std::uint64_t time : 10;  // barriers of the block
    std::uint64_t thread : 10;
    std::uint64_t crowd : 2;  // of reads: 0 one warp, 1 several of this block, 2 several blocks
    std::uint64_t bytes : 4;  // which of the four
};
static_assert(sizeof(KernelAccess) == 8);

void check_kernel_race(std::uint64_t offset, std::uint64_t bytes, bool write);

}  // namespace potluck::emulator
