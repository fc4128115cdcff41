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

/// What the product's kernel does at its end, and where: a vector (n) is added to every row, and, when `before` is not
/// nullptr, that sum goes there and its gelu (tanh approximation) to y. `before` lies as y does.
struct Epilogue {
    const void* bias = nullptr;
    void* before = nullptr;
};

/// Everything that decides which kernel of the library fits: y (batch, m, n) = a (batch, m, k) b (batch, k, n), and the
/// alignments of an epilogue's pointers (0: it has none). The rows of y are contiguous.
struct MatmulShape {
    DType dtype = DType::f32;    // of a and b
    DType y_dtype = DType::f32;  // the same, or f32 where that is a half type
    bool tf32 = false;
    std::int64_t batch = 1, m = 0, n = 0, k = 0;
    MatmulOperand a, b;
    std::int64_t y_batch_stride = 0;
    std::uint32_t y_alignment = 256;
    std::uint32_t bias_alignment = 0, before_alignment = 0;

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

    /// The epilogue's pointers are looked at for their alignment only.
    MatmulPlan(cublasLtHandle_t library, const MatmulShape& shape, const Epilogue& epilogue);

    /// Whether the library knows an algorithm; without one only this may be asked.
    bool exists() const { return exists_; }
    std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_bytes_); }

    /// Puts y = a b, or y += a b when `accumulate`, and the epilogue of the shape into the stream. `workspace` holds
    /// workspace_bytes().
    void run(cublasLtHandle_t library, const void* a, const void* b, const Epilogue& epilogue, void* y,
             bool accumulate, void* workspace, cudaStream_t stream);

private:
    void set_pointers(const Epilogue& epilogue);

    DType dtype_;
    bool has_bias_, has_gelu_;
    bool exists_ = false;
    MatmulDescriptor operation_;
    MatrixLayout a_, b_, y_;
    cublasLtMatmulAlgo_t algorithm_{};
    std::size_t workspace_bytes_ = 0;
    std::mutex pointers_mutex_;  // the epilogue's pointers are part of operation_
};

using MatmulPlans = PlanCache<MatmulShape, MatmulPlan>;

}  // namespace potluck::cuda
