#pragma once

#include "core/copies.h"
#include "cuda/kernel_device.h"

namespace potluck::cuda {

/// x itself, or a row-major copy of this dtype, for kernels that do not merit a version for strides.
inline Tensor contiguous(KernelDevice&, const Tensor& x, DType dtype) {
    return potluck::detail::as_contiguous(potluck::detail::cast(x, dtype));
}
inline Tensor contiguous(KernelDevice&, const Tensor& x) { return potluck::detail::as_contiguous(x); }

}  // namespace potluck::cuda
