#pragma once

#include <cstdint>
#include <string>

namespace potluck {

class Backend;

enum class DeviceKind : std::uint8_t { cpu, cuda };

/// Where a tensor lives and where its ops run.
struct Device {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;

    static Device cpu() { return {DeviceKind::cpu, 0}; }
    static Device cuda(int index = 0) { return {DeviceKind::cuda, index}; }

    friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:0".
std::string name_of(Device device);
/// Reads "cpu", "cuda", "cuda:1"; throws Error for any other text.
Device parse_device(const std::string& text);

/// The fastest device that this build and this machine offer: cuda:0 where there is one, else the CPU.
Device best_device();

/// What a device is, on one line: its name, memory and versions. Throws Error when there is no such device.
std::string describe(Device device);

/// Waits until everything that was started on `device` has ended (on the CPU nothing is ever left running). Throws the
/// Error of what failed.
void synchronize(Device device);

/// The kernels of a device (see core/backend.h). Throws Error when the build has no such device.
Backend& backend(Device device);

/// Threads that the CPU device uses, for the whole process; 0 asks for one per core (the default, unless the
/// environment's OMP_NUM_THREADS says otherwise). No result depends on it.
void set_threads(int count);
int threads();

}  // namespace potluck
