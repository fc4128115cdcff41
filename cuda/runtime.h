#pragma once

// Internal: the CUDA runtime with errors as exceptions, and RAII handles.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/op_scope.h"

namespace potluck::cuda {

/// Throws Error(the running op) that names the call and the runtime's reason, unless `status` is success.
void check(cudaError_t status, const char* call);

/// Allows launches of a kernel to use this many bytes of dynamic shared memory on the current device. Without it a
/// block is limited to 48 KiB, including the kernel's static variables. Throws Error(the running op) when the device
/// does not have that much.
void allow_shared_memory(const void* kernel, std::size_t dynamic_bytes);

/// Makes a device the current one of this thread while the object lives.
class CurrentDevice {
public:
    explicit CurrentDevice(int index);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

private:
    int before_ = 0;
};

/// A CUDA stream on the current device. It does not wait for the legacy default stream.
class Stream {
public:
    Stream();
    ~Stream();
    Stream(Stream&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
    Stream& operator=(Stream&&) = delete;

    cudaStream_t get() const { return handle_; }
    void synchronize() const;

private:
    cudaStream_t handle_ = nullptr;
};

/// A CUDA event.
class Event {
public:
    /// `timing`: enables elapsed_ms().
    explicit Event(bool timing = false);
    ~Event();
    Event(Event&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
    Event& operator=(Event&&) = delete;

    cudaEvent_t get() const { return handle_; }
    void record(cudaStream_t stream) const;
    /// Work that is enqueued in `stream` from now on runs after everything that was recorded.
    void block(cudaStream_t stream) const;
    void synchronize() const;
    /// Waits only if the recorded work has not completed yet.
    void wait_unless_done() const;
    /// Whether all recorded work has completed or failed.
    bool is_done() const noexcept;
    /// Milliseconds from `start` to this event; both must have been recorded and made with timing.
    double elapsed_ms(const Event& start) const;

private:
    cudaEvent_t handle_ = nullptr;
};

/// Page-locked host memory: copies to and from the device do not block the host.
class PinnedMemory {
public:
    explicit PinnedMemory(std::size_t bytes);
    ~PinnedMemory();
    PinnedMemory(PinnedMemory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
        other.data_ = nullptr;
        other.bytes_ = 0;
    }
    PinnedMemory& operator=(PinnedMemory&&) = delete;

    void* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace potluck::cuda
