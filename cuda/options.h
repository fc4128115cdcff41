#pragma once

#include "core/device.h"

// Each function sets an option of one CUDA device. All throw Error when there is no such device.

namespace potluck::cuda {

/// Allows products and convolutions of f32 tensors to round their factors to TF32 (10 bits of mantissa instead of 23),
/// which tensor cores multiply several times faster. Off by default.
void set_tf32(bool allowed, Device device = Device::cuda());
bool tf32(Device device = Device::cuda());

/// Makes linear() add its bias inside the product's kernel (an epilogue of cuBLASLt) instead of initialising the output
/// with it: the same sum, rounded once in both ways, with two passes over the output less. On by default.
void set_bias_epilogue(bool enabled, Device device = Device::cuda());
bool bias_epilogue(Device device = Device::cuda());

/// The same for linear_gelu(): the product's kernel writes both the sum and its gelu, so that the sum is not read
/// again. Used where the number of outputs is a multiple of 8 (a requirement of cuBLASLt) and the dtype is f32 or a
/// half type. Off by default: it is not faster on every GPU. See tests/bench/bench_linear.cpp.
void set_gelu_epilogue(bool enabled, Device device = Device::cuda());
bool gelu_epilogue(Device device = Device::cuda());

/// Makes attention use cuDNN's fused kernels where they apply: half types, head and value sizes of up to 128 in steps
/// of 8, no mask, no dropout, and causal only with equally many queries and keys. All other calls use our own kernels
/// as before; each device reports once on stderr when a call takes the one path or the other. Plans are cached by
/// shape, and the first call of each shape takes longer, as the library compiles its kernel. It is deterministic, like
/// ours; for that its backward keeps the gradients of all scores (queries x keys for each head, in a half type) in
/// memory while it runs, which ours does not. Unlike ours, the library's kernels do not guarantee that infinity and NaN
/// in a key or value that causality hides do not affect a query. Off by default.
void set_fused_attention(bool allowed, Device device = Device::cuda());
bool fused_attention(Device device = Device::cuda());

}  // namespace potluck::cuda
