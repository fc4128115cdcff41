#pragma once

// Internal: the devices of this process. A device's backend registers itself here; everything above asks for it by
// Device. This is the only global mutable state of the library.

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/memory_book.h"
#include "core/random.h"

namespace potluck {

/// What belongs to one device. Entries live until the process ends, so that tensors in static variables may die late.
struct DeviceEntry {
    DeviceEntry(Device which, std::unique_ptr<Backend> kernels);
    ~DeviceEntry();

    Device device;
    std::unique_ptr<Backend> backend;
    MemoryBook memory;
    Generator generator;
};

/// Of each kind.
inline constexpr int most_devices = 64;

/// Throws Error when there is no such device.
DeviceEntry& device_entry(Device device);
/// Adds a device. Throws Error when it is there already, or its index is not below most_devices.
void register_device(Device device, std::unique_ptr<Backend> backend);
/// A floor above says how its devices are found. `discover` registers them and returns an empty text, or why there are
/// none; it is called once, when a device other than a CPU is first asked for.
void set_device_discovery(std::string (*discover)());
/// All devices: those of the CPU first, then by number.
std::vector<Device> registered_devices();

}  // namespace potluck
