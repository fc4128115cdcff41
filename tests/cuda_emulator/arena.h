#pragma once

// Internal: the addresses of device memory. Each device has a range of address space that is far larger than its
// memory, so that freed addresses need not be reused soon. The checks keep the state of each byte in parallel mappings.

#include <cstddef>
#include <cstdint>

namespace potluck::emulator {

inline constexpr int arena_bits = 36;
inline constexpr std::uint64_t arena_bytes = std::uint64_t{1}
                                             << arena_bits;  // of each device: 64 GiB of addresses
inline constexpr int most_devices = 16;

/// The state of each byte of device memory.
enum Shadow : std::uint8_t { unallocated = 0, allocated = 1, written = 3 };

struct Arena {
    std::uintptr_t begin = 0;
    std::uintptr_t span = 0;
    std::uint8_t* shadow = nullptr;
    // For each 4 bytes: the serial number of the operation that wrote last, and of the last readers (in streams with
    //
    // even and odd slots). 0: before the device had several streams.
    std::uint32_t* writes = nullptr;
    std::uint32_t* reads[2] = {nullptr, nullptr};
    // For each 4 bytes: the last accesses of the running kernel (see kernel_races.h).
    struct KernelRecord {
        std::uint64_t write;
        std::uint64_t read;
    };
    KernelRecord* kernel_records = nullptr;

    // False once a kernel without instrumented stores has run: from then on everything counts as written.
    bool tracks_writes = true;

    bool contains(std::uintptr_t address) const { return address - begin < span; }
    int device_of(std::uintptr_t address) const { return static_cast<int>((address - begin) >> arena_bits); }
};
extern Arena arena;

/// Reserves the addresses of all possible devices.
void reserve_arena();

/// Extends the range of the device's memory that has ever been in use, counted from its start.
void extend_memory(int device, std::uint64_t bytes);
/// Returns the pages of a range to the system.
void drop_pages(std::uintptr_t begin, std::uint64_t bytes);

/// While at least one object exists, loads and stores can access device memory. Otherwise the addresses are closed:
/// host code that dereferences a device pointer ends the process with a report.
class OpenMemory {
public:
    OpenMemory();
    ~OpenMemory();
    OpenMemory(const OpenMemory&) = delete;
    OpenMemory& operator=(const OpenMemory&) = delete;
};

}  // namespace potluck::emulator
