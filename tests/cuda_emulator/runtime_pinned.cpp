// The CUDA runtime: pinned host memory, and queries about pointers.

#include <fmt/format.h>

#include <cstdlib>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/runtime.h"

using namespace potluck::emulator;

namespace {

using potluck::OpScope;

std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

extern "C" {

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
    const std::lock_guard lock(state().mutex);
    constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if (pointer == nullptr || (flags & ~known) != 0) return finish(cudaErrorInvalidValue);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    if (capture_forbids()) return finish(cudaErrorStreamCaptureUnsupported);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    constexpr std::size_t page = 4096;
    if (bytes > (std::size_t{1} << 46)) return finish(cudaErrorMemoryAllocation);
    *pointer = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (*pointer == nullptr) return finish(cudaErrorMemoryAllocation);
    state().pinned.add(address_of(*pointer), {bytes, OpScope::current()});
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
    return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* pointer) {
    const std::lock_guard lock(state().mutex);
    if (pointer == nullptr) return cudaSuccess;
    if (const std::uint32_t copy = state().pinned.copy_in_flight(address_of(pointer)); copy != 0)
        report(FaultKind::use_after_free,
               fmt::format(
                   "cudaFreeHost of {}: {} may still run on the memory, and the host did not wait for it",
                   OpScope::current(), describe_operation(copy)));
    if (!state().pinned.remove(address_of(pointer))) {
        report(FaultKind::host_pointer,
               fmt::format("cudaFreeHost of {}: the pointer is none of pinned memory", OpScope::current()));
        return finish(cudaErrorInvalidValue);
    }
    std::free(pointer);
    return finish(device_error());
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* host, unsigned flags) {
    const std::lock_guard lock(state().mutex);
    if (on_device == nullptr || flags != 0 || state().pinned.find(address_of(host)) == nullptr)
        return finish(cudaErrorInvalidValue);
    *on_device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const std::lock_guard lock(state().mutex);
    if (attributes == nullptr) return finish(cudaErrorInvalidValue);
    *attributes = cudaPointerAttributes{};
    const std::uintptr_t address = address_of(pointer);
    if (arena.contains(address) && device(arena.device_of(address)).memory.find(address) != nullptr) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = arena.device_of(address);
        attributes->devicePointer = const_cast<void*>(pointer);
    } else if (state().pinned.find(address) != nullptr) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = current_device();
        attributes->devicePointer = const_cast<void*>(pointer);
        attributes->hostPointer = const_cast<void*>(pointer);
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = const_cast<void*>(pointer);
    }
    return cudaSuccess;
}
}
