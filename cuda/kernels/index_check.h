#pragma once

// Whether indices name something, for kernels that could not leave a bad one out without a trace.

#include <cstdint>
#include <optional>

#include "cuda/cuda_backend.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

/// Reports the places of indices outside [0, size). Floor: reads every index once.
static __global__ void __launch_bounds__(256)
    check_indices_kernel(const std::int64_t* indices, std::int64_t count, std::int64_t size,
                         unsigned long long* fault_position) {
    for (std::int64_t i = global_thread(); i < count; i += global_threads())
        if (indices[i] < 0 || indices[i] >= size)
            atomicMin(fault_position, static_cast<unsigned long long>(i));
}

/// The place of the first index outside [0, size). `indices` are contiguous i64. Waits for the device.
inline std::optional<std::int64_t> first_bad_index(CudaBackend& backend, const Tensor& indices,
                                                   std::int64_t size) {
    launch(&check_indices_kernel, blocks_for(indices.count(), 256, 8 * backend.multiprocessors()), 256, 0,
           backend.stream(), elements_of<std::int64_t>(indices), indices.count(), size,
           backend.fault_position());
    return backend.take_fault();
}

}  // namespace potluck::cuda
