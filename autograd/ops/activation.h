#pragma once

#include "core/tensor.h"

namespace potluck {

/// max(x, 0); NaN stays NaN; gradient 0 at 0.
Tensor relu(const Tensor& x);
enum class GeluKind { erf, tanh };
/// x * Phi(x), where Phi is the cumulative distribution function of the normal distribution (Hendrycks and Gimpel,
/// 2016): exact by erf (the default), or by the tanh approximation that GPT-2 uses.
Tensor gelu(const Tensor& x);
Tensor gelu(const Tensor& x, GeluKind kind);
/// x * sigmoid(x), also called swish.
Tensor silu(const Tensor& x);
/// silu(gate) * up in one pass, with broadcasting: the gated unit of Llama (Shazeer, "GLU Variants Improve
/// Transformer", 2020). Saves gate and up for backward, but not silu(gate).
Tensor swiglu(const Tensor& gate, const Tensor& up);
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);

}  // namespace potluck
