// Attention: by our own kernels (cuda/kernels/attention*.cu), or by cuDNN where the user has allowed it and it has a kernel
// for the shape. Both leave the same logsumexp behind, so either may follow the other.

#include "cuda/kernels/attention.h"

#include "cuda/fused_attention.h"
#include "cuda/resources.h"

namespace potluck {
namespace {

using cuda::FusedAttentionPlan;
using cuda::FusedAttentionShape;

/// False when the library has no kernel for the shape.
bool run_fused(CudaBackend& device, cuda::FusedAttentionPlans& plans, const FusedAttentionShape& shape,
               const cuda::FusedAttentionTensors& tensors, double scale, Device where) {
    const cudnnHandle_t library = device.cudnn();
    const auto plan = plans.get(shape, [&] { return std::make_shared<FusedAttentionPlan>(library, shape); });
    if (!plan->exists()) return false;
    const Tensor workspace = Tensor::empty({plan->workspace_bytes()}, {DType::u8, where});
    const Tensor row_sums = Tensor::empty({plan->row_sums()}, {DType::f32, where});
    plan->run(library, tensors, static_cast<float>(scale), row_sums.raw_data(), workspace.raw_data());
    return true;
}

}  // namespace

void CudaBackend::attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                            const AttentionSpec& options, Tensor& y, Tensor& logsumexp) {
    const cudaStream_t to_stream = stream();
    if (this->options().fused_attention)
        if (const auto shape = cuda::fused_attention_shape(q, k, v, mask_or_none, options, y))
            if (run_fused(*this, resources().attention_plans, *shape,
                          {q.raw_data(), k.raw_data(), v.raw_data(), y.raw_data(), logsumexp.raw_data()},
                          options.scale, q.device()))
                return;
    cuda::attention_by_kernels(q, k, v, mask_or_none, options, y, logsumexp,
                               random_advance(options.dropout_key), to_stream);
}

void CudaBackend::attention_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& mask_or_none, const Tensor& y, const Tensor& logsumexp,
                                     const Tensor& dy, const AttentionSpec& options, Tensor& dq, Tensor& dk,
                                     Tensor& dv, Tensor& dmask_or_none) {
    const cudaStream_t to_stream = stream();
    if (this->options().fused_attention)
        if (const auto shape = cuda::fused_attention_shape(q, k, v, mask_or_none, options, y, dy, dq, dk, dv))
            if (run_fused(*this, resources().attention_plans, *shape,
                          {q.raw_data(), k.raw_data(), v.raw_data(), y.raw_data(), logsumexp.raw_data(),
                           dy.raw_data(), dq.raw_data(), dk.raw_data(), dv.raw_data()},
                          options.scale, q.device()))
                return;
    if (dmask_or_none.defined() && options.causal) fill(dmask_or_none, 0.0);
    cuda::attention_backward_by_kernels(q, k, v, mask_or_none, y, logsumexp, dy, options, dq, dk, dv,
                                        dmask_or_none, random_advance(options.dropout_key), to_stream);
}

}  // namespace potluck
