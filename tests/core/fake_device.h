#pragma once

#include <cstdint>

#include "core/device.h"

namespace potluck::test {

/// A device that is not the CPU: its addresses are invalid in this process, so any access to its memory other than
/// through its backend crashes at once. It can copy, fill and draw random numbers; everything else throws.
Device fake_device();

/// The number of allocations by its backend, and the number of bytes that are allocated now.
struct FakeMemory {
    std::int64_t allocations = 0;
    std::int64_t bytes = 0;
};
FakeMemory fake_memory();
/// Limits its memory to this many bytes.
void set_fake_capacity(std::int64_t bytes);

}  // namespace potluck::test
