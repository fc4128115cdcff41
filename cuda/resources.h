#pragma once

// Internal: what one CUDA device keeps open. Part of CudaBackend.

#include <array>
#include <cstddef>
#include <mutex>

#include "cuda/convolution_plan.h"
#include "cuda/cuda_backend.h"
#include "cuda/fused_attention.h"
#include "cuda/matmul_plan.h"

namespace potluck {

/// Made at the device's first use and never closed: devices live until the process ends, and no CUDA call may come from
/// a static destructor, when the driver may be gone.
struct CudaBackend::Resources {
    static constexpr std::size_t staging_bytes = std::size_t{4} << 20;

    /// A page-locked buffer that copies pass through, and the mark behind the last copy that used it.
    struct Staging {
        cuda::PinnedMemory memory{staging_bytes};
        cuda::Event used;
    };

    explicit Resources(int index);

    cuda::Stream stream;
    cuda::Stream capture_stream;  // what is put into it is recorded, never run
    cudaMemPool_t pool = nullptr;
    std::array<Staging, 2> staging;
    std::size_t next_staging = 0;
    std::mutex staging_mutex;
    cublasLtHandle_t cublas = nullptr;
    cudnnHandle_t cudnn = nullptr;
    cuda::MatmulPlans matmul_plans{1024};
    cuda::ConvolutionPlans convolution_plans{512};
    cuda::FusedAttentionPlans attention_plans{256};
    // Threads that use the device at once find their bad elements in different places.
    static constexpr unsigned fault_places = 64;
    unsigned long long* fault_positions = nullptr;
};

}  // namespace potluck
