#pragma once

#include "core/device.h"

// Each is an option of one CUDA device. All throw Error when there is no such device.

namespace potluck::cuda {

/// Lets products and convolutions of f32 tensors round their factors to TF32 (10 bits of mantissa in place of 23), which
/// tensor cores multiply several times faster. Off by default.
void set_tf32(bool allowed, Device device = Device::cuda());
bool tf32(Device device = Device::cuda());

/// Lets linear() add its bias inside the product's kernel (an epilogue of cuBLASLt) in place of laying it down first:
/// the same sum, rounded once in both ways, with two passes less over the output. On by default.
void set_bias_epilogue(bool enabled, Device device = Device::cuda());
bool bias_epilogue(Device device = Device::cuda());

/// The same for linear_gelu(): the product's kernel writes both the sum and its gelu, so that the sum is not read again,
/// where the outputs of the layer are a multiple of 8 (cuBLASLt's demand) and of f32 or a half type. Off by default: not
/// faster on every card. See tests/bench/bench_linear.cpp.
void set_gelu_epilogue(bool enabled, Device device = Device::cuda());
bool gelu_epilogue(Device device = Device::cuda());

/// Lets attention go through cuDNN's fused kernels where they fit: half types, head and value sizes of up to 128 in steps
/// of 8, no mask, no dropout, and causal only with as many queries as keys. What does not fit goes through our own kernels
/// as before; each device says once on stderr when a call takes the one path or the other. Plans are kept by shape, and the first call of each shape takes longer: the library compiles its kernel.
/// Deterministic, as ours; for that its backward keeps the gradients of all scores (queries x keys for each head, in
/// halves) in memory while it runs, which ours does not. Unlike ours, the library's kernels do not promise that infinity
/// and NaN in a key or value stay hidden from the queries that causality keeps from seeing it. Off by default.
void set_fused_attention(bool allowed, Device device = Device::cuda());
bool fused_attention(Device device = Device::cuda());

}  // namespace potluck::cuda
