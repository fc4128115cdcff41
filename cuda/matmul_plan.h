#pragma once

// Internal: what cuBLASLt wants to know about a product, asked once for each shape.

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/dtype.h"
#include "cuda/plan_cache.h"

namespace potluck::cuda {

/// One operand in memory: rows of `leading` elements, or, when transposed, columns of them; one matrix after the other
/// in steps of `batch_stride` elements.
struct MatmulOperand {
    bool transposed = false;
    std::int64_t leading = 0;
    std::int64_t batch_stride = 0;
    std::uint32_t alignment = 256;  // of its first element, in bytes

    auto operator<=>(const MatmulOperand&) const = default;
};

/// Everything that decides which kernel of the library fits: y (batch, m, n) = a (batch, m, k) b (batch, k, n), and a
/// vector (n) added to every row when `bias_alignment` is not 0. The rows of y are contiguous.
struct MatmulShape {
    DType dtype = DType::f32;
    bool tf32 = false;
    std::int64_t batch = 1, m = 0, n = 0, k = 0;
    MatmulOperand a, b;
    std::int64_t y_batch_stride = 0;
    std::uint32_t y_alignment = 256;
    std::uint32_t bias_alignment = 0;

    auto operator<=>(const MatmulShape&) const = default;
};

struct CloseMatmulDescriptor {
    void operator()(cublasLtMatmulDesc_t handle) const { cublasLtMatmulDescDestroy(handle); }
};
struct CloseMatrixLayout {
    void operator()(cublasLtMatrixLayout_t handle) const { cublasLtMatrixLayoutDestroy(handle); }
};
struct CloseMatmulPreference {
    void operator()(cublasLtMatmulPreference_t handle) const { cublasLtMatmulPreferenceDestroy(handle); }
};
using MatmulDescriptor = std::unique_ptr<cublasLtMatmulDescOpaque_t, CloseMatmulDescriptor>;
using MatrixLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, CloseMatrixLayout>;
using MatmulPreference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, CloseMatmulPreference>;

/// The library's descriptors for one shape, and the algorithm that its heuristic put first.
class MatmulPlan {
public:
    /// The most that an algorithm may use beside the operands.
    static constexpr std::uint64_t most_workspace_bytes = std::uint64_t{32} << 20;

    /// `bias` is looked at for its alignment only.
    MatmulPlan(cublasLtHandle_t library, const MatmulShape& shape, const void* bias);

    /// Whether the library knows an algorithm; without one only this may be asked.
    bool exists() const { return exists_; }
    std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_bytes_); }

    /// Puts y = a b, y += a b when `accumulate`, or y = a b + bias for a shape with one, into the stream. `workspace`
    /// holds workspace_bytes().
    void run(cublasLtHandle_t library, const void* a, const void* b, const void* bias, void* y,
             bool accumulate, void* workspace, cudaStream_t stream);

private:
    void set_bias(const void* bias);

    DType dtype_;
    bool has_bias_;
    bool exists_ = false;
    MatmulDescriptor operation_;
    MatrixLayout a_, b_, y_;
    cublasLtMatmulAlgo_t algorithm_{};
    std::size_t workspace_bytes_ = 0;
    std::mutex bias_mutex_;  // the pointer to the bias is part of operation_
};

using MatmulPlans = PlanCache<MatmulShape, MatmulPlan>;

}  // namespace potluck::cuda
