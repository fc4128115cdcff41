#pragma once

// Internal: the resources of work that is being recorded or has been. Part of CudaBackend.

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cuda/cuda_backend.h"

namespace potluck {

/// The memory of recorded work. A replay uses the addresses of the recording, so none of it may return to the pool
/// while a replay is possible or a tensor holds a result. Within the recording, freed blocks are reused.
class CudaBackend::Recording {
public:
    /// `pool_stream`: the stream in which blocks are allocated and freed; not the stream that records.
    explicit Recording(cudaStream_t pool_stream);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

    /// nullptr when the device has no memory left.
    void* allocate(std::int64_t bytes);
    /// Allows work that is recorded later to reuse the block.
    void reuse(void* data);
    /// Keeps a block that was allocated before the recording: the recorded work may read it.
    void keep(void* data);
    /// Page-locked memory for data that the recorded work copies from the host.
    void* host_copy(const void* from, std::size_t bytes);

    std::uint64_t* random_advance() const { return words_; }  // of a generator and of the update
    unsigned long long* fault_slots() const { return reinterpret_cast<unsigned long long*>(words_ + 2); }

    std::int64_t update = -1;  // the RandomUpdateScope around the recording, if there is one
    std::atomic<bool> ended = false;

private:
    cudaStream_t pool_stream_;
    std::mutex mutex_;  // for the lists of blocks: any thread may free a tensor
    std::uint64_t* words_ =
        nullptr;  // how far random numbers advance, then where kernels report bad elements
    std::unordered_map<void*, std::int64_t> blocks_;                 // all, with their sizes
    std::unordered_map<std::int64_t, std::vector<void*>> reusable_;  // by size
    std::vector<cuda::PinnedMemory> host_copies_;
};

/// The bad elements that recorded ops may report. Separate from the recording, as it holds tensors, which would keep
/// the recording alive.
struct CudaBackend::RecordedFaults {
    explicit RecordedFaults(std::shared_ptr<Recording> recording)
        : list(recording->fault_slots()), recording(std::move(recording)) {}

    cuda::FaultList list;
    std::shared_ptr<Recording> recording;
};

}  // namespace potluck
