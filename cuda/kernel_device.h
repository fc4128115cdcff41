#pragma once

// Internal: the services of the device that a kernel family (cuda/kernels/<family>.cu) uses. It does not include the
// contract, core/backend.h, so that a kernel file is recompiled only when something that it uses has changed.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/kernel_specs.h"
#include "core/tensor.h"
#include "cuda/faults.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

class KernelDevice {
public:
    /// The stream for the kernels. Also makes the device the current one of this thread, so every kernel function calls
    /// it first.
    virtual cudaStream_t stream() = 0;
    /// Whether this thread's work is recorded for a replay instead of executed: then no value can be read on the host.
    virtual bool is_capturing() const = 0;
    /// The number that a kernel must add to the offset of its RandomKey: 0 except in a replay, which takes fresh
    /// numbers. Device memory; nullptr outside a capture.
    virtual const std::uint64_t* random_advance(const RandomKey& key) = 0;
    virtual int index() const = 0;
    virtual int multiprocessors() const = 0;

    /// The slot in which the kernels of an op report a bad element (an id outside the vocabulary, a divisor of 0): they
    /// write the smallest position there by atomicMin and continue with an arbitrary value instead. Device memory. When
    /// this thread next waits for the device, or after a replay of the recorded work, `report` throws the Error for the
    /// position; it may read tensor values for that, and returns normally if the element is no longer bad.
    virtual unsigned long long* fault_slot(FaultReporter report) = 0;
    /// All slots of this thread's ops that the host has not checked yet (while recording: those of the recording).
    virtual FaultRanges fault_ranges() = 0;

    /// As in the contract: the functions that other kernel families use.
    virtual void copy_to_host(void* to, const void* from, std::int64_t bytes) = 0;
    virtual void copy(const Tensor& from, Tensor& to) = 0;
    virtual void fill(Tensor& to, const Scalar& value) = 0;

protected:
    ~KernelDevice() = default;
};

}  // namespace potluck::cuda
