#pragma once

// Internal: races in device memory within one kernel. On a GPU blocks run concurrently and in any order, so two threads
// may only access the same bytes, one of them writing, if they belong to one block and a barrier separates the accesses
// (or to one warp: accesses of its lanes to device memory are not checked against each other). Atomics are exempt, and
// so is a kernel that calls __threadfence: these records cannot represent blocks that pass data by a fence and a
// counter.

#include <cstdint>

namespace potluck::emulator {

/// The last access to four bytes. `operation` and the other fields are truncated to their bits; only accesses of the
/// current operation count.
struct KernelAccess {
    std::uint64_t operation : 22;
    std::uint64_t block : 12;
    std::uint64_t time : 10;  // number of barriers of the block
    std::uint64_t thread : 10;
    std::uint64_t crowd : 2;  // for reads: 0 one warp, 1 several of this block, 2 several blocks
    std::uint64_t bytes : 4;  // which of the four
};
static_assert(sizeof(KernelAccess) == 8);

void check_kernel_race(std::uint64_t offset, std::uint64_t bytes, bool write);

}  // namespace potluck::emulator
