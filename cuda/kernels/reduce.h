#pragma once

#include "cuda/kernel_device.h"

namespace potluck::cuda {

// The reductions of the contract, which batch norm also uses.
void reduce(KernelDevice& device, ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y);
void variance(KernelDevice& device, const Tensor& x, std::int64_t axes, double correction, bool root,
              Tensor& y);

}  // namespace potluck::cuda
