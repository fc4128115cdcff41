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

    /// Index 0 always exists; add_cpu_device() creates others.
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

/// The fastest device that this build and this machine offer: cuda:0 if there is one, else the CPU.
Device best_device();

/// A one-line description of a device: its name, memory and versions. Throws Error when there is no such device.
std::string describe(Device device);

/// Waits until all work started on `device` has ended (CPU ops always end before they return). Throws the Error of what
/// failed.
void synchronize(Device device);

/// The kernels of a device (see core/backend.h). Throws Error when the build has no such device.
Backend& backend(Device device);

/// The number of devices that this build and this machine offer, including those of add_cpu_device().
int device_count();

/// Sets the number of threads that a CPU device uses for each kernel; 0 means one per core (the default, unless the
/// environment variable OMP_NUM_THREADS says otherwise). No result depends on it.
void set_threads(int count, Device device = Device::cpu());
int threads(Device device = Device::cpu());

struct CpuDeviceOptions {
    int threads = 0;              // per kernel, as in set_threads()
    std::int64_t memory_cap = 0;  // in bytes, as in set_memory_cap(); 0: no cap
};
/// Adds a CPU device beside "cpu" and returns it: "cpu:1", then "cpu:2", and so on. It exists until the process ends.
/// All CPU devices run the same kernels and give the same bits, but each has its own threads, memory statistics, memory
/// cap and default generator (which starts with the seed of cpu's). So one process can simulate several machines, or
/// separate two trainings. Throws Error for invalid options and after 63 devices.
Device add_cpu_device(CpuDeviceOptions options = {});
template <std::size_t N>
Device add_cpu_device(MistypedOptions<N>, Refused<"no such option: see CpuDeviceOptions", N> = {});

}  // namespace potluck
