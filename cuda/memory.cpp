// Memory of the device, and copies to and from the host.

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cuda/recording.h"
#include "cuda/resources.h"

namespace potluck {

using cuda::check;

namespace {

constexpr const char* unreadable =
    "no value can be read on the host while work is being recorded. Read it after the replay.";

}  // namespace

void* CudaBackend::allocate(std::int64_t bytes) {
    const cudaStream_t queue = stream();
    if (is_capturing()) return allocate_recorded(bytes);
    void* data = nullptr;
    const cudaError_t status = cudaMallocAsync(&data, static_cast<std::size_t>(bytes), queue);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // reported by nullptr
        return nullptr;
    }
    check(status, "cudaMallocAsync");
    return data;
}

void CudaBackend::release(void* data, std::int64_t) noexcept {
    if (release_recorded(data)) return;
    // Tensors in static variables may be destroyed after the driver: then there is nothing to free, as the status
    // shows.
    if (cudaSetDevice(index_) == cudaSuccess) cudaFreeAsync(data, resources_->stream.get());
}

std::int64_t CudaBackend::pooled_bytes() const {
    if (resources_ == nullptr) return 0;
    std::uint64_t reserved = 0;
    std::uint64_t used = 0;
    check(cudaMemPoolGetAttribute(resources_->pool, cudaMemPoolAttrReservedMemCurrent, &reserved),
          "cudaMemPoolGetAttribute");
    check(cudaMemPoolGetAttribute(resources_->pool, cudaMemPoolAttrUsedMemCurrent, &used),
          "cudaMemPoolGetAttribute");
    return static_cast<std::int64_t>(reserved - used);
}

void CudaBackend::release_pool() {
    if (is_capturing()) return;
    synchronize();
    check(cudaMemPoolTrimTo(resources().pool, 0), "cudaMemPoolTrimTo");
}

std::int64_t CudaBackend::free_memory() {
    (void)stream();  // makes this device the current one
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free);
}

// Copies alternate between page-locked buffers: while the device copies from one, the host fills the other. Small
// copies to the device do not wait at all.

void CudaBackend::copy_from_host(void* to, const void* from, std::int64_t bytes) {
    const cudaStream_t queue = stream();
    if (is_capturing()) {  // each replay copies the same bytes again
        const auto length = static_cast<std::size_t>(bytes);
        if (length > 0)
            check(cudaMemcpyAsync(to, recording_->host_copy(from, length), length, cudaMemcpyHostToDevice,
                                  queue),
                  "cudaMemcpyAsync");
        return;
    }
    Resources& own = resources();
    const std::lock_guard lock(own.staging_mutex);
    const bool is_small = bytes <= static_cast<std::int64_t>(Resources::small_staging_bytes);
    for (std::int64_t done = 0; done < bytes;) {
        const auto length = std::min(static_cast<std::size_t>(bytes - done), Resources::staging_bytes);
        Resources::Staging& staging = is_small ? own.small_staging.next() : own.staging.next();
        staging.used.wait_unless_done();
        std::memcpy(staging.memory.data(), static_cast<const std::byte*>(from) + done, length);
        check(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, staging.memory.data(), length,
                              cudaMemcpyHostToDevice, queue),
              "cudaMemcpyAsync");
        staging.used.record(queue);
        done += static_cast<std::int64_t>(length);
    }
}

void CudaBackend::copy_to_host(void* to, const void* from, std::int64_t bytes) {
    const cudaStream_t queue = stream();
    if (is_capturing()) throw Error(OpScope::current(), unreadable);
    if (bytes == 0) return;
    const bool checks = start_fault_check();
    copy_through_staging(to, from, bytes, queue);
    if (checks) finish_fault_check();
}

void CudaBackend::copy_through_staging(void* to, const void* from, std::int64_t bytes, cudaStream_t queue) {
    Resources& own = resources();
    const std::lock_guard lock(own.staging_mutex);
    // A transfer into a buffer that has not been taken out of it yet.
    struct Started {
        Resources::Staging* staging = nullptr;
        std::byte* to = nullptr;
        std::size_t length = 0;
    } previous;
    const auto take_out = [](const Started& started) {
        if (started.staging == nullptr) return;
        started.staging->used.synchronize();
        std::memcpy(started.to, started.staging->memory.data(), started.length);
    };
    for (std::int64_t done = 0; done < bytes;) {
        Started next;
        next.length = std::min(static_cast<std::size_t>(bytes - done), Resources::staging_bytes);
        next.to = static_cast<std::byte*>(to) + done;
        next.staging = &own.staging.next();
        next.staging->used.wait_unless_done();
        check(cudaMemcpyAsync(next.staging->memory.data(), static_cast<const std::byte*>(from) + done,
                              next.length, cudaMemcpyDeviceToHost, queue),
              "cudaMemcpyAsync");
        next.staging->used.record(queue);
        take_out(previous);
        previous = next;
        done += static_cast<std::int64_t>(next.length);
    }
    take_out(previous);
}

}  // namespace potluck
