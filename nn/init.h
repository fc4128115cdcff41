#pragma once

#include <numbers>

#include "core/random.h"
#include "core/tensor.h"

/// Initial values of parameters. Each function overwrites a floating tensor in place (parameters too: nothing is
/// recorded) with random numbers from `generator`, or from the device's default generator.
namespace potluck::nn::init {

void normal(const Tensor& tensor, double mean = 0.0, double std = 1.0, Generator* generator = nullptr);
/// Uniform in [low, high).
void uniform(const Tensor& tensor, double low, double high, Generator* generator = nullptr);

// In the rules below a weight has the shape (out, in, ..) as in Linear: fan_in = in * .., fan_out = out * .. .

/// Preserves the scale of signals through layers with relu: standard deviation gain / sqrt(fan_in) (He et al., 2015).
void kaiming_normal(const Tensor& weight, double gain = std::numbers::sqrt2, Generator* generator = nullptr);
/// The same standard deviation with a uniform distribution.
void kaiming_uniform(const Tensor& weight, double gain = std::numbers::sqrt2, Generator* generator = nullptr);
/// Preserves the scale of both activations and gradients: standard deviation gain * sqrt(2 / (fan_in + fan_out))
/// (Glorot and Bengio, 2010).
void xavier_normal(const Tensor& weight, double gain = 1.0, Generator* generator = nullptr);
/// The same standard deviation with a uniform distribution.
void xavier_uniform(const Tensor& weight, double gain = 1.0, Generator* generator = nullptr);

}  // namespace potluck::nn::init
