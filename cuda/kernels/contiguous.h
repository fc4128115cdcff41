#pragma once

#include "core/copies.h"
#include "cuda/kernel_device.h"

namespace potluck::cuda {

/// x itself, or a copy of it in row-major order and of this dtype, for kernels that are not worth a version for strides.
inline Tensor contiguous(KernelDevice&, const Tensor& x, DType dtype) {
    return potluck::detail::as_contiguous(potluck::detail::cast(x, dtype));
}
inline Tensor contiguous(KernelDevice&, const Tensor& x) { return potluck::detail::as_contiguous(x); }

}  // namespace potluck::cuda
