#include "tests/cuda_emulator/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr) return otherwise;
    const long long value = std::atoll(text);
    return value < 0 ? otherwise : value;
}

std::uint64_t next_stream_number = 0;

}  // namespace

EmulatedDevice::EmulatedDevice(int own_index, std::uint64_t bytes)
    : index(own_index), memory(own_index, bytes) {
    default_pool.device = own_index;
    legacy_stream.device = own_index;
    legacy_stream.is_legacy = true;
    legacy_stream.slot = new_slot();
    legacy_stream.number = next_stream_number++;
}

State::State() {
    const auto count = from_environment("POTLUCK_EMULATED_DEVICES", 1);
    const auto bytes = from_environment("POTLUCK_EMULATED_MEMORY", std::int64_t{8} << 30);
    reserve_arena();
    for (int index = 0; index < std::min<std::int64_t>(count, most_devices); ++index)
        devices.push_back(std::make_unique<EmulatedDevice>(index, static_cast<std::uint64_t>(bytes)));
}

State& state() {
    static auto* all = new State;
    return *all;
}

CUstream_st* find_stream(cudaStream_t handle) {
    State& all = state();
    if (handle == nullptr || handle == cudaStreamLegacy) {
        if (all.devices.empty()) return nullptr;
        return &all.devices[static_cast<std::size_t>(current_device())]->legacy_stream;
    }
    return all.streams.count(handle) != 0 ? handle : nullptr;
}

void configure(int devices, std::int64_t bytes_of_each) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    if (devices < 0 || devices > most_devices || bytes_of_each < 0)
        throw std::logic_error(fmt::format("the emulator has 0 to {} devices", most_devices));
    const auto bytes = static_cast<std::uint64_t>(bytes_of_each);
    while (static_cast<int>(all.devices.size()) > devices) {
        const int last = static_cast<int>(all.devices.size()) - 1;
        const std::string name = fmt::format("cuda:{}", last);
        for (const std::string& line : live_allocations())
            if (line.find(name) != std::string::npos)
                throw std::logic_error(name + " cannot go while something of it is alive: " + line);
        free_slot(all.devices.back()->legacy_stream.slot);
        drop_pages(arena.begin + static_cast<std::uint64_t>(last) * arena_bytes, arena_bytes);
        all.devices.pop_back();
    }
    for (const auto& device : all.devices) {
        device->memory.trim(device->default_pool, 0);
        if (!device->memory.set_total_bytes(bytes))
            throw std::logic_error(
                fmt::format("more than {} bytes of cuda:{} are in use", bytes, device->index));
    }
    while (static_cast<int>(all.devices.size()) < devices)
        all.devices.push_back(std::make_unique<EmulatedDevice>(static_cast<int>(all.devices.size()), bytes));
}

int devices() { return static_cast<int>(state().devices.size()); }

std::vector<std::string> live_allocations() {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    std::vector<std::string> lines;
    for (const auto& device : all.devices)
        for (const auto& [offset, allocation] : device->memory.live())
            lines.push_back(fmt::format("allocation {}: {} bytes of cuda:{}, made by {}", allocation.number,
                                        allocation.bytes, device->index, allocation.op));
    for (const auto& [address, pinned] : all.pinned)
        lines.push_back(fmt::format("{} bytes of pinned host memory, made by {}", pinned.bytes, pinned.op));
    for (const CUstream_st* stream : all.streams)
        lines.push_back(fmt::format("stream {} of cuda:{}", stream->number, stream->device));
    for (const CUevent_st* event : all.events)
        lines.push_back(fmt::format("an event of cuda:{}", event->device));
    for (const CUmemPoolHandle_st* pool : all.pools)
        lines.push_back(fmt::format("a memory pool of cuda:{}", pool->device));
    if (!all.graphs.empty()) lines.push_back(fmt::format("graphs: {}", all.graphs.size()));
    if (!all.executables.empty())
        lines.push_back(fmt::format("executable graphs: {}", all.executables.size()));
    return lines;
}

cudaError_t library_call(cudaStream_t stream, const char* name, std::function<void()> body) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* queue = find_stream(stream);
    if (queue == nullptr) return cudaErrorInvalidResourceHandle;
    return start_operation(*queue, name, nullptr, std::move(body));
}

cudaError_t library_call(std::span<const cudaStream_t> streams, const char* name,
                         std::function<void()> body) {
    const std::lock_guard lock(state().mutex);
    std::vector<CUstream_st*> queues;
    for (cudaStream_t stream : streams) {
        CUstream_st* queue = find_stream(stream);
        if (queue == nullptr) return cudaErrorInvalidResourceHandle;
        if (queue->capture != nullptr) return cudaErrorStreamCaptureUnsupported;
        queues.push_back(queue);
    }
    return queues.empty() ? cudaErrorInvalidValue : run_operation(queues, name, nullptr, body);
}

int device_of_stream(cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    const CUstream_st* queue = find_stream(stream);
    return queue == nullptr ? -1 : queue->device;
}

std::uint64_t take_stream_number() { return next_stream_number++; }

std::uint64_t host_waits() {
    const std::lock_guard lock(state().mutex);
    return state().host_waits;
}

}  // namespace potluck::emulator
