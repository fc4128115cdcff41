#pragma once

// Internal: what a kernel family (cuda/kernels/<family>.cu) needs of the device that it runs on. It does not know the
// contract, core/backend.h, so that a kernel file is compiled anew only when something that it uses has changed.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/kernel_specs.h"
#include "core/tensor.h"
#include "cuda/faults.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

class KernelDevice {
public:
    /// Where work goes. Also makes the device the current one of this thread, so every kernel function begins with it.
    virtual cudaStream_t stream() = 0;
    /// Whether this thread's work is being recorded for a replay instead of done: no value can be read on the host then.
    virtual bool is_capturing() const = 0;
    /// Added to the offset of every RandomKey that a kernel is given: 0 but in a replay, which takes fresh numbers.
    /// Device memory; nullptr outside a capture.
    virtual const std::uint64_t* random_advance(const RandomKey& key) = 0;
    virtual int index() const = 0;
    virtual int multiprocessors() const = 0;

    /// Where the kernels of an op report a bad element (an id outside the vocabulary, a divisor of 0): they put the
    /// smallest position there by atomicMin, and go on with any value in its place. Device memory. When this thread next
    /// waits for the device, or after a replay of what is being recorded, `tell` throws the Error of the position; it may
    /// read values then, and returns when what it finds is not bad any more.
    virtual unsigned long long* fault_slot(FaultTeller tell) = 0;
    /// All slots that this thread's ops were given and that the host has not looked at (while recording: those of what
    /// is being recorded).
    virtual FaultRanges fault_ranges() = 0;

    /// As in the contract; the kernels are those that other families use.
    virtual void copy_to_host(void* to, const void* from, std::int64_t bytes) = 0;
    virtual void copy(const Tensor& from, Tensor& to) = 0;
    virtual void fill(Tensor& to, const Scalar& value) = 0;

protected:
    ~KernelDevice() = default;
};

}  // namespace potluck::cuda
