#pragma once

#include <string>
#include <vector>

#include "core/tensor.h"
#include "nn/module.h"

namespace potluck {

/// The norm over all gradients of these parameters taken as one long vector: p = 1, 2 or infinity. Squares are summed in
/// f64, so that it is right wherever it fits an f64. Parameters without a gradient count as 0. The same elements given
/// twice (a tensor and a view of all of it) are one parameter with the sum of their gradients, as for an optimizer.
/// Infinity or NaN when a gradient holds one. Throws Error for another p.
double gradient_norm(const std::vector<Tensor>& parameters, double p = 2.0);

/// Scales the gradients so that their common norm is at most `max_norm`, and returns the norm before scaling. When that
/// is not finite, throws Error that names a parameter responsible for it and leaves all gradients unchanged. An empty
/// list has norm 0 and gives a warning on standard error: nothing would ever be clipped.
double clip_grad_norm(const nn::Module& module, double max_norm, double p = 2.0);
double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, double p = 2.0);

/// The name of the first parameter whose gradient contains an infinity or NaN, or an empty text.
std::string first_non_finite_gradient(const nn::Module& module);

}  // namespace potluck
