#pragma once

// Internal: the checks at each load and store of a kernel. The fast path is here; what it does not accept is checked in
// detail in checks.cpp.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/kernel_races.h"
#include "tests/cuda_emulator/streams.h"

namespace potluck::emulator {

/// Checks any access of a kernel: to device memory, shared memory, or memory that needs no check.
void check_access(std::uintptr_t address, std::size_t bytes, bool write);
/// Checks an access to device memory of at most 16 bytes, byte by byte: reports a fault, or marks the bytes as written.
void check_device_slowly(std::uintptr_t address, std::size_t bytes, bool write);
/// Checks an access to host memory: a fault unless kernels may access it.
void check_host(std::uintptr_t address, std::size_t bytes, bool write);
[[noreturn]] void report_misaligned(std::uintptr_t address, std::size_t bytes, bool write);

/// The shadow value of an access of Bytes bytes that are all "written".
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
