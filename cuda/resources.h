#pragma once

// Internal: the open resources of one CUDA device. Part of CudaBackend.

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cuda/convolution_plan.h"
#include "cuda/cuda_backend.h"
#include "cuda/fused_attention.h"
#include "cuda/matmul_plan.h"

namespace potluck {

/// Created at the device's first use and never closed: devices live until the process ends, and a static destructor
/// must not call CUDA, when the driver may already be gone.
struct CudaBackend::Resources {
    static constexpr std::size_t staging_bytes = std::size_t{4} << 20;
    static constexpr std::size_t small_staging_bytes = std::size_t{64} << 10;

    /// A page-locked buffer for copies, and an event after the last copy that used it.
    struct Staging {
        explicit Staging(std::size_t bytes) : memory(bytes) {}

        cuda::PinnedMemory memory;
        cuda::Event used;
    };
    /// Several such buffers, used in turn.
    class StagingRing {
    public:
        StagingRing(std::size_t count, std::size_t bytes) {
            for (std::size_t i = 0; i < count; ++i) ring_.emplace_back(bytes);
        }
        Staging& next() { return ring_[next_++ % ring_.size()]; }

    private:
        std::vector<Staging> ring_;
        std::size_t next_ = 0;
    };

    /// A stream that most programs never use: it is created at its first use.
    class SideStream {
    public:
        bool is_made() const { return made_.load(); }
        cudaStream_t get() {  // the device must be the current one
            std::call_once(once_, [this] {
                stream_.emplace();
                made_ = true;
            });
            return stream_->get();
        }

    private:
        std::once_flag once_;
        std::optional<cuda::Stream> stream_;
        std::atomic<bool> made_{false};
    };

    explicit Resources(int index);

    cuda::Stream stream;
    SideStream communication_stream;
    SideStream copy_stream;
    cuda::Stream capture_stream;  // work in it is recorded, never executed
    cudaMemPool_t pool = nullptr;
    std::mutex reached_mutex;
    std::unordered_map<int, bool> reached;  // by device, see reaches()
    StagingRing staging{2, staging_bytes};
    // Small copies to the device (batches of ids, the numbers of an update) have their own buffers, enough of them that
    // the host rarely has to wait for one.
    StagingRing small_staging{32, small_staging_bytes};
    std::mutex staging_mutex;
    /// A library handle may be used by one thread at a time, so each thread has its own, created at their first use. A
    /// thread that gets the id of a finished one takes over its handles.
    struct LibraryHandles {
        cublasLtHandle_t cublas = nullptr;
        cudnnHandle_t cudnn = nullptr;
    };
    LibraryHandles& handles_of_this_thread() {
        const std::lock_guard lock(handles_mutex);
        return handles[std::this_thread::get_id()];
    }
    std::mutex handles_mutex;
    std::unordered_map<std::thread::id, LibraryHandles> handles;
    cuda::MatmulPlans matmul_plans{1024};
    cuda::ConvolutionPlans convolution_plans{512};
    cuda::FusedAttentionPlans attention_plans{256};
    std::array<std::atomic<bool>, 3> told_attention_paths{};  // see cuda/attention.cpp

    /// Where the kernels of one thread report bad elements, and where the host reads the reports.
    static constexpr std::size_t fault_block_bytes = cuda::fault_slots * sizeof(unsigned long long);
    struct FaultBlock {
        unsigned long long* slots = nullptr;
        cuda::PinnedMemory host{cuda::FaultRanges::most * fault_block_bytes};
        bool is_clean = false;
    };
    std::unique_ptr<FaultBlock> take_fault_block(cudaStream_t queue);
    void give_fault_block(std::unique_ptr<FaultBlock> block);
    std::mutex fault_mutex;
    std::vector<std::unique_ptr<FaultBlock>> free_fault_blocks;
};

}  // namespace potluck
