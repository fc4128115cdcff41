#pragma once

#include "core/tensor.h"

namespace potluck {

/// max(x, 0); NaN stays NaN; gradient 0 at 0.
Tensor relu(const Tensor& x);
enum class GeluKind { erf, tanh };
/// x times the normal distribution's cumulative probability at x (Hendrycks and Gimpel, 2016), exact by erf (the default)
/// or by the tanh approximation that GPT-2 uses.
Tensor gelu(const Tensor& x, GeluKind kind = GeluKind::erf);
/// x * sigmoid(x), also called swish.
Tensor silu(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);

}  // namespace potluck
