#pragma once

#include "core/tensor.h"

namespace potluck {

struct BatchNormMode {
    bool training = true;   // normalise by the statistics of this batch, and update the running ones
    double momentum = 0.1;  // weight of this batch in the running statistics
    double epsilon = 1e-5;
};

/// Normalises every channel over batch and positions, then scales and shifts it: (x - mean) / sqrt(variance + epsilon) *
/// weight + bias (Ioffe and Szegedy, 2015). x (batch, channels, ..) of 2 to 5 axes; weight, bias, running_mean and
/// running_variance (channels) or undefined. Statistics are two-pass, in f32 or better.
///
/// In training, mean and biased variance are those of the batch, and each running statistic becomes (1 - momentum) *
/// running + momentum * (mean or unbiased variance), in place. Fewer than 2 values per channel are an Error that leaves
/// the running statistics unchanged. With `training` false the running statistics are used and must be given.
Tensor batch_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {},
                  const Tensor& running_mean = {}, const Tensor& running_variance = {},
                  const BatchNormMode& mode = {});

}  // namespace potluck
