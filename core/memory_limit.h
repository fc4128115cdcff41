#pragma once

#include <cstdint>

#include "core/device.h"

namespace potluck {

/// The most that live tensors could hold on `device` as things stand, in bytes: what they hold already and what the system
/// can still give, and never more than the cap; the largest number when nobody says.
std::int64_t memory_limit(Device device = Device::cpu());

/// What a backend is, too, when its device has memory of its own and can say how much of it is left.
class KnowsFreeMemory {
public:
    virtual ~KnowsFreeMemory() = default;
    /// Bytes that the system can still give, without those that a pool of the device keeps.
    virtual std::int64_t free_memory() = 0;
};

}  // namespace potluck
