// Attention: by our own kernels (cuda/kernels/attention*.cu), or by cuDNN where the user allows it and it has a kernel
// for the shape. Both save the same logsumexp, so the backward of one may follow the forward of the other.

#include "cuda/kernels/attention.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <optional>

#include "core/format.h"
#include "cuda/fused_attention.h"
#include "cuda/resources.h"

namespace potluck {
namespace {

using cuda::FusedAttentionPlan;
using cuda::FusedAttentionShape;

/// How a call of attention is executed when cuDNN's kernels are allowed.
enum class Path : std::uint8_t { fused, refused, unfit };

/// Reports once per device and path which path attention takes, so that a user who has enabled the library's kernels
/// learns where they are not used.
void tell(std::array<std::atomic<bool>, 3>& told, Path path, const Tensor& q, const Tensor& k) {
    if (told[static_cast<std::size_t>(path)].exchange(true)) return;
    const char* story = path == Path::fused ? "runs by cuDNN's fused kernels"
                        : path == Path::refused
                            ? "runs by our own kernels: cuDNN has no deterministic engine for it"
                            : "runs by our own kernels: cuDNN's do not fit it, see cuda/options.h";
    fmt::print(stderr, "[attention] {} attention of queries {} and keys {} {}. This is said once on {}.\n",
               q.dtype(), pretty(q.shape()), pretty(k.shape()), story, q.device());
}

/// False when the call does not meet the requirements of the library's kernels, or there is none for the shape.
bool run_fused(CudaBackend& device, cuda::FusedAttentionPlans& plans, std::array<std::atomic<bool>, 3>& told,
               const std::optional<FusedAttentionShape>& shape, const cuda::FusedAttentionTensors& tensors,
               double scale, const Tensor& q, const Tensor& k) {
    if (!shape) {
        tell(told, Path::unfit, q, k);
        return false;
    }
    const cudnnHandle_t library = device.cudnn();
    const auto plan =
        plans.get(*shape, [&] { return std::make_shared<FusedAttentionPlan>(library, *shape); });
    tell(told, plan->exists() ? Path::fused : Path::refused, q, k);
    if (!plan->exists()) return false;
    const Tensor workspace = Tensor::empty({plan->workspace_bytes()}, {DType::u8, q.device()});
    const Tensor row_sums = Tensor::empty({plan->row_sums()}, {DType::f32, q.device()});
    plan->run(library, tensors, static_cast<float>(scale), row_sums.raw_data(), workspace.raw_data());
    return true;
}

}  // namespace

void CudaBackend::attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                            const AttentionSpec& options, Tensor& y, Tensor& logsumexp) {
    const cudaStream_t to_stream = stream();
    if (this->options().fused_attention &&
        run_fused(*this, resources().attention_plans, resources().told_attention_paths,
                  cuda::fused_attention_shape(q, k, v, mask_or_none, options, y),
                  {q.raw_data(), k.raw_data(), v.raw_data(), y.raw_data(), logsumexp.raw_data()},
                  options.scale, q, k))
        return;
    cuda::attention_by_kernels(q, k, v, mask_or_none, options, y, logsumexp,
                               random_advance(options.dropout_key), to_stream);
}

void CudaBackend::attention_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& mask_or_none, const Tensor& y, const Tensor& logsumexp,
                                     const Tensor& dy, const AttentionSpec& options, Tensor& dq, Tensor& dk,
                                     Tensor& dv, Tensor& dmask_or_none) {
    const cudaStream_t to_stream = stream();
    if (this->options().fused_attention &&
        run_fused(*this, resources().attention_plans, resources().told_attention_paths,
                  cuda::fused_attention_shape(q, k, v, mask_or_none, options, y, dy, dq, dk, dv),
                  {q.raw_data(), k.raw_data(), v.raw_data(), y.raw_data(), logsumexp.raw_data(),
                   dy.raw_data(), dq.raw_data(), dk.raw_data(), dv.raw_data()},
                  options.scale, q, k))
        return;
    if (dmask_or_none.defined() && options.causal) fill(dmask_or_none, 0.0);
    cuda::attention_backward_by_kernels(q, k, v, mask_or_none, y, logsumexp, dy, options, dq, dk, dv,
                                        dmask_or_none, random_advance(options.dropout_key), to_stream);
}

}  // namespace potluck
