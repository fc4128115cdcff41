#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "core/options.h"

namespace potluck {

class Backend;

enum class DeviceKind : std::uint8_t { cpu, cuda };

/// Where a tensor lives and where its ops run.
struct Device {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;

    /// Index 0 is always there; add_cpu_device() makes others.
    static Device cpu(int index = 0) { return {DeviceKind::cpu, index}; }
    static Device cuda(int index = 0) { return {DeviceKind::cuda, index}; }

    /// Whether its memory is the host's.
    bool is_cpu() const { return kind == DeviceKind::cpu; }

    friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cpu:1", "cuda:0".
std::string name_of(Device device);
/// Prints its name.
std::ostream& operator<<(std::ostream& stream, Device device);
/// Reads "cpu", "cpu:1", "cuda", "cuda:1" (without a number: 0); throws Error for any other text.
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

/// How many devices this build and this machine offer, those of add_cpu_device() included.
int device_count();

/// Threads that a CPU device uses for each of its kernels; 0 asks for one per core (the default, unless the
/// environment's OMP_NUM_THREADS says otherwise). No result depends on it.
void set_threads(int count, Device device = Device::cpu());
int threads(Device device = Device::cpu());

struct CpuDeviceOptions {
    int threads = 0;              // of its kernels, as in set_threads()
    std::int64_t memory_cap = 0;  // in bytes, as in set_memory_cap(); 0: none
};
/// Adds a CPU device beside "cpu" and returns it: "cpu:1", then "cpu:2", and so on, until the process ends. All compute
/// with the same kernels, so with the same bits, but each has its own threads, memory statistics and cap, and its own
/// default generator (which begins with the seed of cpu's). So one process can play several machines, or keep two
/// trainings out of each other's way. Throws Error for options that cannot be, and after 63.
Device add_cpu_device(CpuDeviceOptions options = {});
template <std::size_t N>
Device add_cpu_device(MistypedOptions<N>, Refused<"no such option: see CpuDeviceOptions", N> = {});

}  // namespace potluck
