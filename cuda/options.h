#pragma once

namespace potluck::cuda {

/// Lets products and convolutions of f32 tensors round their factors to TF32 (10 bits of mantissa in place of 23), which
/// tensor cores multiply several times faster. For all CUDA devices; off by default.
void set_tf32(bool allowed);
bool tf32();

/// Lets linear() add its bias inside the product's kernel (an epilogue of cuBLASLt) in place of laying it down first:
/// the same sum, rounded once in both ways, with two passes less over the output. For all CUDA devices; on by default.
void set_bias_epilogue(bool enabled);
bool bias_epilogue();

}  // namespace potluck::cuda
