#pragma once

#include "cuda/kernel_device.h"

namespace potluck::cuda {

/// x itself, or a copy of it in row-major order and of this dtype, for kernels that are not worth a version for strides.
inline Tensor contiguous(KernelDevice& backend, const Tensor& x, DType dtype) {
    if (x.is_contiguous() && x.dtype() == dtype) return x;
    Tensor copied = Tensor::empty(x.shape(), {dtype, x.device()});
    backend.copy(x, copied);
    return copied;
}
inline Tensor contiguous(KernelDevice& backend, const Tensor& x) { return contiguous(backend, x, x.dtype()); }

}  // namespace potluck::cuda
