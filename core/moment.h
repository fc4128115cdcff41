#pragma once

#include <memory>

#include "core/device.h"

namespace potluck {

/// A moment in the compute stream of a device: it comes when everything that was put there before has ended.
class Moment {
public:
    virtual ~Moment() = default;

    /// Seconds from `earlier`, a moment of the same device, to this one, by the device's clock. Waits for nothing: both
    /// must have come, so ask when the host has waited for the device. Throws Error otherwise.
    virtual double seconds_since(const Moment& earlier) const = 0;
};

/// Marks a moment in the compute stream of `device` and goes on. On a device that does everything at once, such as the CPU,
/// it is now, by the host's clock.
std::unique_ptr<const Moment> mark_moment(Device device);

/// What a backend is besides when its device runs beside the host and has a clock.
class HasClock {
public:
    virtual ~HasClock() = default;

    virtual std::unique_ptr<const Moment> mark_moment() = 0;
};

}  // namespace potluck
