#pragma once

// Internal: attention by cuDNN, as an option (set_fused_attention in cuda/options.h). Attention is expressed as a graph
// of its individual operations, which the library recognises and executes as one kernel.

#include <cudnn.h>

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/kernel_specs.h"
#include "cuda/cudnn_graph.h"
#include "cuda/plan_cache.h"

namespace potluck::cuda {

/// All parameters that determine the library's kernel.
struct FusedAttentionShape {
    bool is_backward = false;
    bool causal = false;
    DType dtype = DType::bf16;
    std::int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, head_size = 0, value_size = 0;
    /// Strides of q k v y, and in backward of dy dq dk dv.
    std::array<FourSizes, 8> strides{};

    auto operator<=>(const FusedAttentionShape&) const = default;
};

/// Pointers to all tensors of one call; the last four are for backward.
struct FusedAttentionTensors {
    void *q, *k, *v, *y, *logsumexp;
    void *dy = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

/// A graph of attention with the library's engine for it.
class FusedAttentionPlan {
public:
    FusedAttentionPlan(cudnnHandle_t library, const FusedAttentionShape& shape);

    /// Whether the library has a deterministic engine; without one, call no other function.
    bool exists() const { return plan_ != nullptr; }
    std::int64_t workspace_bytes() const { return plan_->workspace_bytes(); }
    /// Number of f32 elements that run() needs in addition to the workspace.
    std::int64_t row_sums() const { return row_sums_; }

    void run(cudnnHandle_t library, const FusedAttentionTensors& tensors, float scale, void* row_sums,
             void* workspace) const;

private:
    void build_forward(const FusedAttentionShape& shape);
    void build_backward(const FusedAttentionShape& shape);
    GraphTensor masked(const FusedAttentionShape& shape, const GraphTensor& scores);

    OperationGraph graph_;
    GraphTensor q_, k_, v_, y_, logsumexp_, dy_, dq_, dk_, dv_, row_sum_, scale_, one_, hidden_;
    std::int64_t row_sums_ = 0;
    bool is_backward_ = false, causal_ = false;
    std::unique_ptr<GraphPlan> plan_;
};

using FusedAttentionPlans = PlanCache<FusedAttentionShape, FusedAttentionPlan>;

/// The shape for a call that meets the library's requirements: half types, sizes up to 128 in steps of 8, aligned rows,
/// no mask, no dropout, and causal only with equally many keys and queries. nullopt for all others.
std::optional<FusedAttentionShape> fused_attention_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& mask_or_none,
                                                         const AttentionSpec& options, const Tensor& y);
/// The same for backward.
std::optional<FusedAttentionShape> fused_attention_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& mask_or_none,
                                                         const AttentionSpec& options, const Tensor& y,
                                                         const Tensor& dy, const Tensor& dq, const Tensor& dk,
                                                         const Tensor& dv);

}  // namespace potluck::cuda
