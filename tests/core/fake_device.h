#pragma once

#include <cstdint>

#include "core/device.h"

namespace potluck::test {

/// A device that is not the CPU: its addresses point nowhere in this process, so whoever touches its memory without
/// its backend crashes at once. It can copy, fill and draw random numbers; everything else throws.
Device fake_device();

/// How often its backend was asked for memory, and how many bytes it has given and not got back.
struct FakeMemory {
    std::int64_t allocations = 0;
    std::int64_t bytes = 0;
};
FakeMemory fake_memory();
/// From now on it has only so many bytes.
void set_fake_capacity(std::int64_t bytes);

}  // namespace potluck::test
