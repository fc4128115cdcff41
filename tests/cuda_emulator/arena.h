#pragma once

// Internal: the addresses of device memory. Each device has a stretch of address space, far larger than its memory, so
// that freed addresses rest before they are used again. What the checks know of each byte stands in parallel mappings.

#include <cstddef>
#include <cstdint>

namespace potluck::emulator {

inline constexpr int arena_bits = 36;
inline constexpr std::uint64_t arena_bytes = std::uint64_t{1}
                                             << arena_bits;  // of each device: 64 GiB of addresses
inline constexpr int most_devices = 16;

/// One byte for each byte of device memory.
enum Shadow : std::uint8_t { unallocated = 0, allocated = 1, written = 3 };

struct Arena {
    std::uintptr_t begin = 0;
    std::uintptr_t span = 0;
    std::uint8_t* shadow = nullptr;
    // For each 4 bytes: the serial number of the operation that wrote last, and of the last readers (by streams with an
    // even and an odd slot). 0: before the device had several streams.
    std::uint32_t* writes = nullptr;
    std::uint32_t* reads[2] = {nullptr, nullptr};
    // For each 4 bytes: who touched them last in the kernel that runs (see kernel_races.h).
    struct KernelRecord {
        std::uint64_t write;
        std::uint64_t read;
    };
    KernelRecord* kernel_records = nullptr;

    // False once a kernel has run whose stores were not announced: from then on everything counts as written.
    bool tracks_writes = true;

    bool contains(std::uintptr_t address) const { return address - begin < span; }
    int device_of(std::uintptr_t address) const { return static_cast<int>((address - begin) >> arena_bits); }
};
extern Arena arena;

/// Reserves the addresses of all devices that there may be.
void reserve_arena();

/// How far the device's memory has ever been in use, from the begin of its stretch.
void extend_memory(int device, std::uint64_t bytes);
/// Gives the pages of a stretch back to the system.
void drop_pages(std::uintptr_t begin, std::uint64_t bytes);

/// While at least one lives, loads and stores reach device memory. At other times the addresses are closed: host code
/// that uses a pointer to device memory without a copy ends the process, with a report.
class OpenMemory {
public:
    OpenMemory();
    ~OpenMemory();
    OpenMemory(const OpenMemory&) = delete;
    OpenMemory& operator=(const OpenMemory&) = delete;
};

}  // namespace potluck::emulator
