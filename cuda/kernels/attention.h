#pragma once

// Internal: attention by our own kernels, for cuda/attention.cpp. The operands are those of Backend::attention and
// attention_backward; random_advance is that of KernelDevice.

#include "core/kernel_specs.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

void attention_by_kernels(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                          const AttentionSpec& options, Tensor& y, Tensor& logsumexp,
                          const std::uint64_t* random_advance, cudaStream_t stream);

/// dmask, if defined and causal, must be initialised to zeros: tiles that no query sees are skipped.
void attention_backward_by_kernels(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& mask_or_none, const Tensor& y, const Tensor& logsumexp,
                                   const Tensor& dy, const AttentionSpec& options, Tensor& dq, Tensor& dk,
                                   Tensor& dv, Tensor& dmask_or_none, const std::uint64_t* random_advance,
                                   cudaStream_t stream);

}  // namespace potluck::cuda
