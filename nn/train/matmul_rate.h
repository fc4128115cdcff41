#pragma once

// Internal: how fast a device multiplies matrices, the reference for a training run's FLOP/s.

#include <cstdint>

#include "core/device.h"
#include "core/dtype.h"
#include "nn/module.h"

namespace potluck {

struct MatmulRate {
    double flops_per_second = 0.0;
    DType dtype = DType::f32;
    std::int64_t size = 0;  // of the square matrices
};

/// The rate of a product of two square matrices of `dtype`, the best of several. The size grows, up to 8192 or what
/// memory allows, until a product takes milliseconds, so that the launch overhead is negligible. Takes well under a
/// second and draws no random numbers. Throws Error when the dtype is not floating.
MatmulRate measure_matmul_rate(DType dtype, Device device);

/// The dtype of most of the module's parameters, by number of elements. The module must have parameters.
DType dtype_of_most_parameters(const nn::Module& module);

}  // namespace potluck
