#pragma once

// Internal: what is checked at each load and store of a kernel. The quick way is here; what it does not let pass is looked
// at in checks.cpp.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/kernel_races.h"
#include "tests/cuda_emulator/streams.h"

namespace potluck::emulator {

/// Any access of a kernel: device memory, shared memory, or what needs no check.
void check_access(std::uintptr_t address, std::size_t bytes, bool write);
/// An access to device memory of at most 16 bytes, byte by byte: faults, or marks what is written.
void check_device_slowly(std::uintptr_t address, std::size_t bytes, bool write);
/// An access to memory of the host: faults unless kernels may touch it.
void check_host(std::uintptr_t address, std::size_t bytes, bool write);
[[noreturn]] void report_misaligned(std::uintptr_t address, std::size_t bytes, bool write);

/// The bytes of shadow that say "written", for an access of Bytes bytes.
template <std::size_t Bytes>
bool is_all_written(const std::uint8_t* shadow) {
    if constexpr (Bytes == 1) {
        return *shadow == written;
    } else if constexpr (Bytes == 16) {
        return is_all_written<8>(shadow) && is_all_written<8>(shadow + 8);
    } else {
        std::uint64_t state = 0;
        std::memcpy(&state, shadow, Bytes);
        return state == (0x0303030303030303ull >> (64 - 8 * Bytes));
    }
}

template <std::size_t Bytes, bool Write>
inline void check(void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const ActiveKernel& kernel = active;
    const std::uintptr_t offset = address - arena.begin;
    if (offset < kernel.arena_span) {
        if (Bytes > 1 && address % Bytes != 0) report_misaligned(address, Bytes, Write);
        if (static_cast<int>(offset >> arena_bits) != kernel.device ||
            !is_all_written<Bytes>(arena.shadow + offset))
            check_device_slowly(address, Bytes, Write);
        check_kernel_race(offset, Bytes, Write);
        if (running.is_ordered) check_order(offset / 4, (Bytes + 3) / 4, Write);
    } else if (address - kernel.dynamic_begin < kernel.dynamic_bytes) {
        check_shared(kernel.worker->dynamic_shared, address, Bytes, Write);
    } else if (address - kernel.static_begin < kernel.static_bytes) {
        check_shared(kernel.worker->static_shared, address, Bytes, Write);
    } else if (kernel.worker != nullptr && address - stacks.begin >= stacks.bytes &&
               address - kernel.arguments_begin >= kernel.arguments_bytes) {
        check_host(address, Bytes, Write);
    }
}

}  // namespace potluck::emulator
