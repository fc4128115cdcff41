#pragma once

// Checks whether indices are in range, for kernels that sort them.

#include <cstdint>
#include <utility>

#include "cuda/kernel_device.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

/// Reports the places of indices outside [0, size), and writes the indices with `size` in their place. Floor: reads and
/// writes every index once.
static __global__ void __launch_bounds__(256)
    check_indices_kernel(const std::int64_t* indices, std::int64_t count, std::int64_t size,
                         std::int64_t* checked, unsigned long long* fault_slot) {
    for (std::int64_t i = global_thread(); i < count; i += global_threads()) {
        const std::int64_t index = indices[i];
        const bool is_bad = index < 0 || index >= size;
        if (is_bad) atomicMin(fault_slot, static_cast<unsigned long long>(i));
        checked[i] = is_bad ? size : index;
    }
}

/// The indices (contiguous i64), with `size` in place of those outside [0, size), which `report` reports later.
inline Tensor checked_indices(KernelDevice& backend, const Tensor& indices, std::int64_t size,
                              FaultReporter report) {
    const Tensor checked = Tensor::empty(indices.shape(), {DType::i64, indices.device()});
    launch(&check_indices_kernel, blocks_for(indices.count(), 256, 8 * backend.multiprocessors()), 256, 0,
           backend.stream(), elements_of<std::int64_t>(indices), indices.count(), size,
           elements_of<std::int64_t>(checked), backend.fault_slot(std::move(report)));
    return checked;
}

}  // namespace potluck::cuda
