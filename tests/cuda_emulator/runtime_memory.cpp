// The CUDA runtime: memory, pools and copies.

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/runtime.h"

using namespace potluck::emulator;

namespace {

using potluck::OpScope;

std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

/// nullptr, with a fault, for an invalid stream handle.
CUstream_st* stream_or_fault(cudaStream_t handle, const char* call) {
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr)
        report(FaultKind::bad_argument,
               fmt::format("{} of {}: the stream was destroyed, or never made", call, OpScope::current()));
    return stream;
}

CUmemPoolHandle_st* find_pool(cudaMemPool_t handle) {
    for (const auto& own : state().devices)
        if (&own->default_pool == handle) return handle;
    return state().pools.count(handle) != 0 ? handle : nullptr;
}

cudaError_t allocate_async(void** pointer, std::size_t bytes, cudaMemPool_t handle,
                           cudaStream_t stream_handle) {
    CUstream_st* stream = stream_or_fault(stream_handle, "cudaMallocAsync");
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (pointer == nullptr) return finish(cudaErrorInvalidValue);
    EmulatedDevice& own = device(stream->device);
    CUmemPoolHandle_st* pool = handle == nullptr ? &own.default_pool : find_pool(handle);
    if (pool == nullptr || pool->device != stream->device) return finish(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory = own.memory.allocate(bytes, pool, OpScope::current());
    if (memory == nullptr) return finish(cudaErrorMemoryAllocation);
    const std::uintptr_t address = address_of(memory);
    if (stream->capture != nullptr) {
        // Memory of a graph: its address is fixed, and it is present from this operation of a replay on.
        const Allocation allocation = *own.memory.find(address);
        own.memory.set_present(allocation, false);
        stream->capture->body->memory.push_back({stream->device, address});
        record_operation(*stream, "cudaMallocAsync", nullptr,
                         [&own, allocation] { own.memory.set_present(allocation, true); });
    } else if (own.has_several_streams) {
        // Until this operation of the stream, no other stream may access the memory.
        const std::uint64_t first = (address - arena.begin) / 4;
        const std::uint64_t count = (bytes + 3) / 4;
        const cudaError_t status = start_operation(*stream, "cudaMallocAsync", nullptr, [=] {
            std::fill_n(arena.writes + first, count, running.serial);
            for (std::uint32_t* reads : arena.reads) std::fill_n(reads + first, count, 0u);
        });
        if (status != cudaSuccess) return finish(status);
    } else {
        note_use(stream->device, *stream);
        // An event after it must refer to an operation, once there are several streams.
        if (stream->clock.size() <= stream->slot || stream->clock[stream->slot] == 0)
            if (const cudaError_t status = start_operation(*stream, "cudaMallocAsync", nullptr, [] {});
                status != cudaSuccess)
                return finish(status);
    }
    *pointer = memory;
    return cudaSuccess;
}

/// Reports a fault for a pointer that cannot be freed.
cudaError_t refuse_free(const char* call, std::uintptr_t address) {
    report(arena.contains(address) ? FaultKind::use_after_free : FaultKind::host_pointer,
           fmt::format("{} of {}: {} is no memory that could be freed{}", call, OpScope::current(),
                       reinterpret_cast<const void*>(address),
                       arena.contains(address) ? ": " + describe(address) : std::string()));
    return finish(cudaErrorInvalidValue);
}

/// Determines which side of a copy is on a device.
cudaError_t check_direction(const char* call, const void* to, const void* from, cudaMemcpyKind& kind) {
    const bool to_device = is_device_pointer(to);
    const bool from_device = is_device_pointer(from);
    const auto found = to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                                 : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    if (kind == cudaMemcpyDefault) kind = found;
    if (kind == found) return cudaSuccess;
    if (static_cast<unsigned>(kind) > cudaMemcpyDefault) return finish(cudaErrorInvalidMemcpyDirection);
    const auto side = [](bool is_device_side) { return is_device_side ? "device" : "host"; };
    report(FaultKind::host_pointer,
           fmt::format("{} of {}: the direction says {} to {}, but the pointers are of {} and {} memory",
                       call, OpScope::current(),
                       side(kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice),
                       side(kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice),
                       side(from_device), side(to_device)));
    return finish(cudaErrorInvalidValue);
}

/// A copy, as the body of an operation. Between devices the "never written" state is copied too.
void copy(void* to, const void* from, std::size_t bytes, const char* call) {
    const std::uintptr_t target = address_of(to);
    const std::uintptr_t source = address_of(from);
    if (bytes == 0) return;
    if (arena.contains(target) && arena.contains(source)) {
        std::vector<std::uint8_t> shadow(arena.shadow + (source - arena.begin),
                                         arena.shadow + (source - arena.begin) + bytes);
        const bool is_allocated = std::none_of(shadow.begin(), shadow.end(),
                                               [](std::uint8_t state) { return state == unallocated; });
        // Bytes that were never written may be copied and remain marked so; everything else is checked.
        if (is_allocated) std::memset(arena.shadow + (source - arena.begin), written, bytes);
        check_read(from, static_cast<std::int64_t>(bytes), call);
        std::memcpy(arena.shadow + (source - arena.begin), shadow.data(), bytes);
        check_write(to, static_cast<std::int64_t>(bytes), call);
        std::memmove(to, from, bytes);
        std::memcpy(arena.shadow + (target - arena.begin), shadow.data(), bytes);
        return;
    }
    check_read(from, static_cast<std::int64_t>(bytes), call);
    check_write(to, static_cast<std::int64_t>(bytes), call);
    state().pinned.read(from, bytes);
    if (arena.contains(target))
        std::memmove(to, from, bytes);
    else
        state().pinned.write(to, from, bytes);
}

/// Reports a fault unless this device's streams can access the memory at `pointer`.
cudaError_t check_peer(const void* pointer, int stream_device, const char* call) {
    const int owner = device_of(pointer);
    if (owner < 0 || owner == stream_device) return cudaSuccess;
    const Allocation* found = device(owner).memory.find(address_of(pointer));
    if (found == nullptr || found->pool == nullptr || found->pool->open_to.count(stream_device) != 0)
        return cudaSuccess;  // memory of cudaMalloc is copied through the host
    report(FaultKind::wrong_device,
           fmt::format(
               "wrong device: {} of {} on a stream of cuda:{} touches {}, whose pool is not open to that "
               "device. Call cudaMemPoolSetAccess first",
               call, OpScope::current(), stream_device, describe(address_of(pointer))));
    return finish(cudaErrorInvalidValue);
}

cudaError_t copy_in_stream(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                           cudaStream_t handle, const char* call) {
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    CUstream_st* stream = stream_or_fault(handle, call);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (bytes == 0) return cudaSuccess;
    if (to == nullptr || from == nullptr) return finish(cudaErrorInvalidValue);
    if (const cudaError_t status = check_direction(call, to, from, kind); status != cudaSuccess)
        return status;
    for (const void* side : {static_cast<const void*>(to), from}) {
        if (const cudaError_t status = check_peer(side, stream->device, call); status != cudaSuccess)
            return status;
        if (const int used = device_of(side); used >= 0) note_use(used, *stream);
    }
    return finish(start_operation(*stream, call, nullptr, [=] { copy(to, from, bytes, call); }));
}

cudaError_t fill_in_stream(void* to, int value, std::size_t bytes, cudaStream_t handle, const char* call) {
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    CUstream_st* stream = stream_or_fault(handle, call);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (bytes == 0) return cudaSuccess;
    if (!is_device_pointer(to)) {
        report(FaultKind::host_pointer,
               fmt::format("{} of {}: the pointer is none of device memory", call, OpScope::current()));
        return finish(cudaErrorInvalidValue);
    }
    return finish(start_operation(*stream, call, nullptr, [=] {
        check_write(to, static_cast<std::int64_t>(bytes), call);
        std::memset(to, value, bytes);
    }));
}

}  // namespace

extern "C" {

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    const std::lock_guard lock(state().mutex);
    if (free == nullptr || total == nullptr) return finish(cudaErrorInvalidValue);
    if (state().devices.empty()) return finish(cudaErrorNoDevice);
    const DeviceMemory& memory = device(current_device()).memory;
    *free = memory.free_bytes();
    *total = memory.total_bytes();
    return cudaSuccess;
}

// ---- device memory ----

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
    const std::lock_guard lock(state().mutex);
    if (pointer == nullptr) return finish(cudaErrorInvalidValue);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    if (capture_forbids()) return finish(cudaErrorStreamCaptureUnsupported);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    EmulatedDevice& own = device(current_device());
    *pointer = own.memory.allocate(bytes, nullptr, OpScope::current());
    if (*pointer == nullptr) return finish(cudaErrorMemoryAllocation);
    // The runtime returns it without pending accesses from an earlier use.
    const std::uint64_t first = (address_of(*pointer) - arena.begin) / 4;
    if (own.has_several_streams)
        for (std::uint32_t* records : {arena.writes, arena.reads[0], arena.reads[1]})
            std::fill_n(records + first, (bytes + 3) / 4, 0u);
    return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
    const std::lock_guard lock(state().mutex);
    if (pointer == nullptr) return cudaSuccess;
    const std::uintptr_t address = address_of(pointer);
    if (!arena.contains(address)) return refuse_free("cudaFree", address);
    const int index = arena.device_of(address);
    wait_for_device(index);
    if (!device(index).memory.release(address, OpScope::current())) return refuse_free("cudaFree", address);
    return finish(device_error());
}

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    return allocate_async(pointer, bytes, nullptr, stream);
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, std::size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    if (pool == nullptr) return finish(cudaErrorInvalidValue);
    return allocate_async(pointer, bytes, pool, stream);
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = stream_or_fault(handle, "cudaFreeAsync");
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    const std::uintptr_t address = address_of(pointer);
    if (!arena.contains(address)) return refuse_free("cudaFreeAsync", address);
    EmulatedDevice& own = device(arena.device_of(address));
    const Allocation* found = own.memory.find(address);
    if (found == nullptr ||
        arena.begin + static_cast<std::uint64_t>(own.index) * arena_bytes + found->offset != address)
        return refuse_free("cudaFreeAsync", address);
    const Allocation allocation = *found;
    if (stream->capture != nullptr) {
        record_operation(*stream, "cudaFreeAsync", nullptr,
                         [&own, allocation] { own.memory.set_present(allocation, false); });
        return cudaSuccess;
    }
    if (is_graph_memory(address)) {
        // The graph keeps the memory; it is only not present until the next replay.
        own.memory.set_present(allocation, false);
        return finish(device_error());
    }
    cudaError_t status = device_error();
    if (status == cudaSuccess && own.has_several_streams) {
        // All other streams must have finished with the memory.
        status = start_operation(*stream, "cudaFreeAsync", nullptr, [=] {
            check_order((address - arena.begin) / 4, (allocation.bytes + 3) / 4, true);
        });
    }
    own.memory.release(address, OpScope::current());
    return finish(status);
}

// ---- pools ----

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int index) {
    if (pool == nullptr) return finish(cudaErrorInvalidValue);
    if (!is_device(index)) return finish(cudaErrorInvalidDevice);
    *pool = &device(index).default_pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
    const std::lock_guard lock(state().mutex);
    if (pool == nullptr || properties == nullptr || properties->allocType != cudaMemAllocationTypePinned ||
        properties->location.type != cudaMemLocationTypeDevice)
        return finish(cudaErrorInvalidValue);
    if (!is_device(properties->location.id)) return finish(cudaErrorInvalidDevice);
    *pool = new CUmemPoolHandle_st{.device = properties->location.id};
    state().pools.insert(*pool);
    return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    const std::lock_guard lock(state().mutex);
    if (state().pools.count(pool) == 0) return finish(cudaErrorInvalidValue);
    DeviceMemory& memory = device(pool->device).memory;
    // The runtime keeps a pool until its last allocation is freed; our code never destroys one earlier.
    if (pool->used != 0) {
        report(FaultKind::bad_argument,
               fmt::format("cudaMemPoolDestroy: {} bytes of the pool are still in use", pool->used));
        return finish(cudaErrorInvalidValue);
    }
    memory.trim(*pool, 0);
    state().pools.erase(pool);
    delete pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
    const std::lock_guard lock(state().mutex);
    CUmemPoolHandle_st* pool = find_pool(handle);
    if (pool == nullptr || value == nullptr) return finish(cudaErrorInvalidValue);
    switch (attribute) {
        case cudaMemPoolReuseFollowEventDependencies:
        case cudaMemPoolReuseAllowOpportunistic:
        case cudaMemPoolReuseAllowInternalDependencies:
            pool->reuse_flags[attribute - cudaMemPoolReuseFollowEventDependencies] =
                *static_cast<int*>(value);
            return cudaSuccess;
        case cudaMemPoolAttrReleaseThreshold:
            std::memcpy(&pool->release_threshold, value, sizeof(std::uint64_t));
            return cudaSuccess;
        case cudaMemPoolAttrReservedMemHigh:
        case cudaMemPoolAttrUsedMemHigh: {
            std::uint64_t number = 0;
            std::memcpy(&number, value, sizeof(number));
            if (number != 0) return finish(cudaErrorInvalidValue);  // they may only be reset
            if (attribute == cudaMemPoolAttrReservedMemHigh)
                pool->most_reserved = pool->reserved;
            else
                pool->most_used = pool->used;
            return cudaSuccess;
        }
        default:
            return finish(cudaErrorInvalidValue);
    }
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
    const std::lock_guard lock(state().mutex);
    const CUmemPoolHandle_st* pool = find_pool(handle);
    if (pool == nullptr || value == nullptr) return finish(cudaErrorInvalidValue);
    const auto give = [&](std::uint64_t number) {
        std::memcpy(value, &number, sizeof(number));
        return cudaSuccess;
    };
    switch (attribute) {
        case cudaMemPoolReuseFollowEventDependencies:
        case cudaMemPoolReuseAllowOpportunistic:
        case cudaMemPoolReuseAllowInternalDependencies:
            *static_cast<int*>(value) =
                pool->reuse_flags[attribute - cudaMemPoolReuseFollowEventDependencies];
            return cudaSuccess;
        case cudaMemPoolAttrReleaseThreshold:
            return give(pool->release_threshold);
        case cudaMemPoolAttrReservedMemCurrent:
            return give(pool->reserved);
        case cudaMemPoolAttrReservedMemHigh:
            return give(pool->most_reserved);
        case cudaMemPoolAttrUsedMemCurrent:
            return give(pool->used);
        case cudaMemPoolAttrUsedMemHigh:
            return give(pool->most_used);
        default:
            return finish(cudaErrorInvalidValue);
    }
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t handle, const cudaMemAccessDesc* accesses, std::size_t count) {
    const std::lock_guard lock(state().mutex);
    CUmemPoolHandle_st* pool = find_pool(handle);
    if (pool == nullptr || accesses == nullptr) return finish(cudaErrorInvalidValue);
    for (std::size_t i = 0; i < count; ++i) {
        const cudaMemAccessDesc& access = accesses[i];
        const int index = access.location.id;
        if (access.location.type != cudaMemLocationTypeDevice) return finish(cudaErrorInvalidValue);
        if (!is_device(index) || !state().has_peers) return finish(cudaErrorInvalidDevice);
        if (access.flags == cudaMemAccessFlagsProtReadWrite)
            pool->open_to.insert(index);
        else if (access.flags == cudaMemAccessFlagsProtNone && index != pool->device)
            pool->open_to.erase(index);
        else
            return finish(
                cudaErrorInvalidValue);  // a pool is always open to its own device, and never read-only
    }
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, std::size_t keep) {
    const std::lock_guard lock(state().mutex);
    CUmemPoolHandle_st* pool = find_pool(handle);
    if (pool == nullptr) return finish(cudaErrorInvalidValue);
    device(pool->device).memory.trim(*pool, keep);
    return cudaSuccess;
}

// ---- copies ----

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    return copy_in_stream(to, from, bytes, kind, stream, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    const std::lock_guard lock(state().mutex);
    if (capture_forbids()) {
        invalidate_captures();
        return finish(cudaErrorStreamCaptureImplicit);
    }
    const cudaError_t status = copy_in_stream(to, from, bytes, kind, nullptr, "cudaMemcpy");
    ++state().host_waits;
    if (status == cudaSuccess) host_waits(device(current_device()).legacy_stream.clock, current_device());
    return status;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    if (!is_device(to_device) || !is_device(from_device)) return finish(cudaErrorInvalidDevice);
    if (bytes != 0 && (device_of(to) != to_device || device_of(from) != from_device)) {
        report(FaultKind::host_pointer,
               fmt::format(
                   "cudaMemcpyPeerAsync of {}: the pointers are of devices {} and {} (-1: the host), the "
                   "arguments say {} and {}",
                   OpScope::current(), device_of(from), device_of(to), from_device, to_device));
        return finish(cudaErrorInvalidValue);
    }
    return copy_in_stream(to, from, bytes, cudaMemcpyDeviceToDevice, stream, "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    return fill_in_stream(to, value, bytes, stream, "cudaMemsetAsync");
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    const std::lock_guard lock(state().mutex);
    if (capture_forbids()) {
        invalidate_captures();
        return finish(cudaErrorStreamCaptureImplicit);
    }
    return fill_in_stream(to, value, bytes, nullptr, "cudaMemset");
}
}
