#include "tests/cuda_emulator/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/error.h"
#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {
namespace {

std::uint64_t next_stream_number = 0;

Card card_of(std::int64_t capability) {
    for (const Card& card : {Card{80, std::size_t{163} << 10}, Card{86, std::size_t{99} << 10},
                             Card{89, std::size_t{99} << 10}, Card{90, most_shared_bytes}})
        if (card.capability == capability) return card;
    throw Error("emulator", fmt::format("there is no card of compute capability {}. Choose 80, 86, 89 or 90.",
                                        capability));
}

}  // namespace

std::int64_t setting(const char* name, std::int64_t least, std::int64_t most, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr) return otherwise;
    std::int64_t value = 0;
    const char* end = text + std::strlen(text);
    const auto [stopped, fault] = std::from_chars(text, end, value);
    if (fault != std::errc() || stopped != end || value < least || value > most)
        throw Error("emulator",
                    fmt::format("{} is \"{}\". Give a whole number from {} to {}, without a unit.", name,
                                text, least, most));
    return value;
}

EmulatedDevice::EmulatedDevice(int own_index, std::uint64_t bytes)
    : index(own_index), memory(own_index, bytes) {
    default_pool.device = own_index;
    legacy_stream.device = own_index;
    legacy_stream.is_legacy = true;
    legacy_stream.slot = new_slot();
    legacy_stream.number = next_stream_number++;
}

State::State() {
    const std::int64_t count = setting("POTLUCK_EMULATED_DEVICES", 0, most_devices, 1);
    const std::int64_t bytes = setting("POTLUCK_EMULATED_MEMORY", 0, arena_bytes, std::int64_t{8} << 30);
    card = card_of(setting("POTLUCK_EMULATED_CARD", 80, 90, 80));
    reserve_arena();
    for (int index = 0; index < count; ++index)
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

void set_card(int capability) {
    const std::lock_guard lock(state().mutex);
    state().card = card_of(capability);
}

void set_memory_pools(bool supported) {
    const std::lock_guard lock(state().mutex);
    state().has_memory_pools = supported;
}

void set_peer_access(bool possible) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    all.has_peers = possible;
    if (possible) return;
    for (const auto& device : all.devices) device->default_pool.open_to.clear();
    for (CUmemPoolHandle_st* pool : all.pools) pool->open_to.clear();
}

void set_late_answers(bool late) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    all.answers_late = late;
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
    for (const auto& [address, pinned] : all.pinned.blocks())
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
