#pragma once

// Internal: the devices of this process. A device's backend registers itself here; all other code looks it up by
// Device. This is the only global mutable state of the library.

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/memory_book.h"
#include "core/random.h"

namespace potluck {

/// The state of one device. Entries live until the process ends, so that tensors in static variables may be destroyed
/// late.
struct DeviceEntry {
    DeviceEntry(Device which, std::unique_ptr<Backend> kernels);
    ~DeviceEntry();

    Device device;
    std::unique_ptr<Backend> backend;
    MemoryBook memory;
    Generator generator;
};

/// Per kind of device.
inline constexpr int most_devices = 64;

/// Throws Error when there is no such device.
DeviceEntry& device_entry(Device device);
/// Adds a device. Throws Error when it already exists, or when its index is not below most_devices.
void register_device(Device device, std::unique_ptr<Backend> backend);
/// Lets a higher layer define how its devices are found. `discover` registers them and returns an empty text, or the
/// reason why there are none; it is called once, when a device other than a CPU is first requested.
void set_device_discovery(std::string (*discover)());
/// All devices: CPU devices first, then by index.
std::vector<Device> registered_devices();

}  // namespace potluck
