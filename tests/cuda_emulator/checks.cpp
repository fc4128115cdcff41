#include "tests/cuda_emulator/checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_emulator/kernel_atomics.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

const DeviceMemory& memory_of(std::uintptr_t address) {
    return state().devices[static_cast<std::size_t>(arena.device_of(address))]->memory;
}

/// `what` is empty for an access by a kernel.
[[noreturn]] void report_device(std::uintptr_t address, std::uint64_t bytes, bool write, const char* what,
                                std::uintptr_t first_bad) {
    const DeviceMemory& memory = memory_of(first_bad);
    const std::string did =
        fmt::format("{}{} {} {} bytes", describe_running(), *what == '\0' ? "" : fmt::format(" ({})", what),
                    write ? "writes" : "reads", bytes);
    const std::string place = first_bad == address
                                  ? describe(address)
                                  : fmt::format("{}, of which byte {} is {}", describe(address),
                                                first_bad - address, describe(first_bad));
    if (memory.find_freed(first_bad) != nullptr && memory.find(first_bad) == nullptr)
        stop(FaultKind::use_after_free, fmt::format("use after free: {} at {}", did, place));
    if (arena.shadow[first_bad - arena.begin] == unallocated)
        stop(FaultKind::out_of_bounds, fmt::format("out of bounds: {} at {}", did, place));
    stop(FaultKind::never_written,
         fmt::format("never written: {} at {}, and nothing was ever written there", did, place));
}

void check_device(std::uintptr_t address, std::uint64_t bytes, bool write, const char* what) {
    if (address - arena.begin + bytes > arena.span) bytes = arena.span - (address - arena.begin);
    std::uint8_t* shadow = arena.shadow + (address - arena.begin);
    if (write) {
        for (std::uint64_t i = 0; i < bytes; ++i)
            if (shadow[i] == unallocated) report_device(address, bytes, write, what, address + i);
        std::memset(shadow, written, bytes);
    } else {
        for (std::uint64_t i = 0; i < bytes; ++i)
            if (shadow[i] != written) report_device(address, bytes, write, what, address + i);
    }
}

}  // namespace

std::string describe(std::uintptr_t address) { return memory_of(address).describe(address); }

void report_misaligned(std::uintptr_t address, std::size_t bytes, bool write) {
    const Muted muted;
    stop(FaultKind::misaligned,
         fmt::format("misaligned: {} {} {} bytes at once at {}, whose address is no multiple of {}",
                     describe_running(), write ? "writes" : "reads", bytes, describe(address), bytes));
}

void check_device_slowly(std::uintptr_t address, std::size_t bytes, bool write) {
    const Muted muted;
    if (arena.device_of(address) != running.device)
        stop(FaultKind::wrong_device,
             fmt::format("wrong device: {} {} {}, which only that device's kernels reach", describe_running(),
                         write ? "writes" : "reads", describe(address)));
    check_device(address, bytes, write, "");
}

void check_access(std::uintptr_t address, std::size_t bytes, bool write) {
    const ActiveKernel& kernel = active;
    if (address - arena.begin < kernel.arena_span) {
        check_device_slowly(address, bytes, write);
        check_kernel_race(address - arena.begin, bytes, write);
        if (running.is_ordered)
            check_order((address - arena.begin) / 4, (address % 4 + bytes + 3) / 4, write);
    } else if (address - kernel.dynamic_begin < kernel.dynamic_bytes) {
        check_shared(kernel.worker->dynamic_shared, address, bytes, write);
    } else if (address - kernel.static_begin < kernel.static_bytes) {
        check_shared(kernel.worker->static_shared, address, bytes, write);
    } else if (kernel.worker != nullptr && address - stacks.begin >= stacks.bytes &&
               address - kernel.arguments_begin >= kernel.arguments_bytes) {
        check_host(address, bytes, write);
    }
}

void check_host(std::uintptr_t address, std::size_t bytes, bool write) {
    if (active.muted) return;
    const Muted muted;
    if (active.worker->is_open_to_kernels(address)) return;
    stop(FaultKind::host_pointer,
         fmt::format("host pointer: {} {} {} bytes at {}, which is memory of the host and not pinned",
                     describe_running(), write ? "writes" : "reads", bytes,
                     reinterpret_cast<const void*>(address)));
}

void fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    active.worker->note_fence();
}

void check_stretch(std::uintptr_t address, std::uint64_t bytes, bool write, const char* what) {
    if (bytes == 0 || !arena.contains(address)) return;
    check_device(address, bytes, write, what);
    if (running.is_ordered ||
        state().devices[static_cast<std::size_t>(arena.device_of(address))]->has_several_streams)
        check_order((address - arena.begin) / 4, (address % 4 + bytes + 3) / 4, write);
}

void check_atomic(const void* pointer, std::size_t bytes) {
    const Muted muted;
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const ActiveKernel& kernel = active;
    if (address - arena.begin < kernel.arena_span) {
        if (address % bytes != 0) report_misaligned(address, bytes, true);
        check_device_slowly(address, bytes, false);
        if (running.is_ordered) check_order((address - arena.begin) / 4, bytes / 4, true);
    } else if (address - kernel.dynamic_begin < kernel.dynamic_bytes) {
        check_shared_atomic(kernel.worker->dynamic_shared, address, bytes);
    } else if (address - kernel.static_begin < kernel.static_bytes) {
        check_shared_atomic(kernel.worker->static_shared, address, bytes);
    }
}

// ---- for library doubles ----

void check_read(const void* data, std::int64_t bytes, const char* what) {
    check_stretch(reinterpret_cast<std::uintptr_t>(data), static_cast<std::uint64_t>(bytes), false, what);
}
void check_write(void* data, std::int64_t bytes, const char* what) {
    check_stretch(reinterpret_cast<std::uintptr_t>(data), static_cast<std::uint64_t>(bytes), true, what);
}
void fail(FaultKind kind, std::string text) { stop(kind, std::move(text)); }

bool is_device_pointer(const void* data) { return arena.contains(reinterpret_cast<std::uintptr_t>(data)); }
int device_of(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return arena.contains(address) ? arena.device_of(address) : -1;
}

}  // namespace potluck::emulator
