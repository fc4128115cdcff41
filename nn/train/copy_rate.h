#pragma once

// Internal: how fast a device moves memory: what the bytes that a training moves are compared with.

#include <cstdint>

#include "core/device.h"

namespace potluck {

struct CopyRate {
    double bytes_per_second = 0.0;  // read and written, together
    std::int64_t size = 0;          // bytes of the tensor that was copied
};

/// The rate of copying a tensor on the device, the best of several. The tensor grows, up to 512 MiB or what memory allows,
/// until a copy takes milliseconds and no cache holds it. Takes well under a second.
CopyRate measure_copy_rate(Device device);

}  // namespace potluck
