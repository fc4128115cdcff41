#include "tests/cuda_emulator/streams.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {

RunningOperation running;

void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size(), 0);
    for (std::size_t slot = 0; slot < other.size(); ++slot) clock[slot] = std::max(clock[slot], other[slot]);
}

namespace {

struct Past {
    const char* name;
    const void* kernel;
    std::uint64_t stream;  // its number
    int device;
};
std::uint32_t newest_serial = 0;
std::vector<std::uint16_t> slot_of_serial(1, 0);
std::array<Past, 1 << 16> past;  // of the newest operations

std::vector<std::uint16_t> free_slots;
std::uint16_t slots = 0;

std::string name_of_kernel(const void* kernel) {
    Dl_info information;
    if (kernel == nullptr || dladdr(kernel, &information) == 0 || information.dli_sname == nullptr) return {};
    int status = 0;
    char* readable = abi::__cxa_demangle(information.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? readable : information.dli_sname;
    std::free(readable);
    return name;
}

std::string describe(const char* name, const void* kernel, std::uint64_t stream, int device) {
    const std::string symbol = name_of_kernel(kernel);
    return fmt::format("{}{}{} on stream {} of cuda:{}", kernel == nullptr ? "" : "kernel of op ", name,
                       symbol.empty() ? "" : ", " + symbol, stream, device);
}

bool happened_before(std::uint32_t serial) {
    return serial == running.serial || running.clock[slot_of_serial[serial]] >= serial;
}

}  // namespace

std::uint16_t new_slot() {
    if (!free_slots.empty()) {
        const std::uint16_t slot = free_slots.back();
        free_slots.pop_back();
        return slot;
    }
    return slots++;
}
void free_slot(std::uint16_t slot) { free_slots.push_back(slot); }

std::string describe_operation(std::uint32_t serial) {
    if (newest_serial - serial >= past.size()) return "an operation long ago";
    const Past& operation = past[serial % past.size()];
    return describe(operation.name, operation.kernel, operation.stream, operation.device);
}
std::string describe_running() { return describe_operation(running.serial); }

void note_use(int device, const CUstream_st& stream) {
    EmulatedDevice& used = *state().devices[static_cast<std::size_t>(device)];
    if (used.first_slot < 0) {
        used.first_slot = stream.slot;
        used.first_stream = stream.number;
    } else if (used.first_stream != stream.number) {
        used.has_several_streams = true;
    }
}

cudaError_t run_operation(std::span<CUstream_st* const> streams, const char* name, const void* kernel,
                          const std::function<void()>& body) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    CUstream_st& first = *streams.front();
    EmulatedDevice& device = *all.devices[static_cast<std::size_t>(first.device)];
    if (device.sticky != cudaSuccess) return device.sticky;

    // The legacy stream and the streams that are not non-blocking wait for one another.
    Clock clock = all.host_clock;
    for (const CUstream_st* stream : streams) {
        join(clock, stream->clock);
        if (stream->is_legacy) {
            for (const CUstream_st* other : all.streams)
                if (other->device == stream->device && other->waits_for_legacy) join(clock, other->clock);
        } else if (stream->waits_for_legacy) {
            join(clock, all.devices[static_cast<std::size_t>(stream->device)]->legacy_stream.clock);
        }
        note_use(stream->device, *stream);
    }
    clock.resize(std::max<std::size_t>(clock.size(), slots), 0);

    const std::uint32_t serial = ++newest_serial;
    slot_of_serial.push_back(first.slot);
    past[serial % past.size()] = {name, kernel, first.number, first.device};
    const RunningOperation outer = running;
    running = {name, kernel, first.device, serial, first.slot, clock.data(), device.has_several_streams};
    cudaError_t status = cudaSuccess;
    try {
        const OpenMemory open;
        body();
    } catch (const StoppedOperation& stopped) {
        status = stopped.status;
    }
    running = outer;
    clock[first.slot] = serial;
    for (CUstream_st* stream : streams) stream->clock = clock;
    return status;
}

cudaError_t start_operation(CUstream_st& stream, const char* name, const void* kernel,
                            std::function<void()> body) {
    const std::lock_guard lock(state().mutex);
    if (stream.capture != nullptr) {
        record_operation(stream, name, kernel, std::move(body));
        return cudaSuccess;
    }
    CUstream_st* const only[] = {&stream};
    return run_operation(only, name, kernel, body);
}

void check_order(std::uint64_t first_granule, std::uint64_t granules, bool write) {
    const auto refuse = [&](std::uint64_t granule, std::uint32_t serial, const char* did) {
        const Muted muted;
        const std::uintptr_t address = arena.begin + granule * 4;
        const std::string other =
            serial == 0 ? fmt::format("an earlier operation on stream {} of cuda:{}",
                                      state().devices[granule >> (arena_bits - 2)]->first_stream,
                                      granule >> (arena_bits - 2))
                        : describe_operation(serial);
        stop(FaultKind::missing_order,
             fmt::format(
                 "missing order between streams: {} {} {}, which {} {}, and nothing makes the one wait for "
                 "the other. Record an event after the first and let the second stream wait for it",
                 describe_running(), write ? "writes" : "reads", describe(address), other, did));
    };
    // Before the device had several streams nothing was recorded, except that the first stream made the accesses.
    const auto is_unknown_and_unordered = [&](std::uint64_t granule) {
        const EmulatedDevice& device = *state().devices[granule >> (arena_bits - 2)];
        if (device.first_slot < 0 || running.slot == device.first_slot ||
            running.clock[device.first_slot] != 0)
            return false;
        const Allocation* allocation = device.memory.find(arena.begin + granule * 4);
        return allocation != nullptr && allocation->pool != nullptr;
    };
    const int slot_parity = running.slot & 1;
    for (std::uint64_t granule = first_granule; granule < first_granule + granules; ++granule) {
        const std::uint32_t writer = __atomic_load_n(&arena.writes[granule], __ATOMIC_RELAXED);
        if (writer != running.serial) {
            if (writer == 0 ? is_unknown_and_unordered(granule) : !happened_before(writer))
                refuse(granule, writer, "wrote");
        }
        if (write) {
            for (const std::uint32_t* reads : arena.reads) {
                const std::uint32_t reader = __atomic_load_n(&reads[granule], __ATOMIC_RELAXED);
                if (reader != 0 && !happened_before(reader)) refuse(granule, reader, "reads");
            }
            __atomic_store_n(&arena.writes[granule], running.serial, __ATOMIC_RELAXED);
        } else {
            std::uint32_t* reads = arena.reads[slot_parity];
            const std::uint32_t reader = __atomic_load_n(&reads[granule], __ATOMIC_RELAXED);
            if (reader != running.serial && (reader == 0 || happened_before(reader)))
                __atomic_store_n(&reads[granule], running.serial, __ATOMIC_RELAXED);
        }
    }
}

}  // namespace potluck::emulator
