#pragma once

#include <utility>

#include "core/tensor.h"

namespace potluck {

/// Normalises the last axis to mean 0 and variance 1, then scales and shifts: (x - mean) / sqrt(var + epsilon) * weight
/// + bias (Ba, Kiros, Hinton, 2016). weight, bias (width) or undefined. Statistics are two-pass, in f32 or better.
Tensor layer_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double epsilon = 1e-5);
/// x / sqrt(mean(x^2) + epsilon) * weight along the last axis (Zhang and Sennrich, 2019).
Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double epsilon = 1e-6);

/// Add and norm: (x + residual, layer_norm(x + residual, ..)), fused, so that x + residual is not read again from
/// memory. Shapes must agree.
std::pair<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight = {},
                                         const Tensor& bias = {}, double epsilon = 1e-5);
/// (x + residual, rms_norm(x + residual, ..)). Shapes must agree.
std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight = {},
                                       double epsilon = 1e-6);

}  // namespace potluck
