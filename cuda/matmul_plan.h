#pragma once

// Internal: descriptors and the algorithm that cuBLASLt needs for a product, determined once per shape.

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/dtype.h"
#include "cuda/plan_cache.h"

namespace potluck::cuda {

/// One operand in memory: rows that are `leading` elements apart, or columns when transposed; the matrices are
/// `batch_stride` elements apart.
struct MatmulOperand {
    bool transposed = false;
    std::int64_t leading = 0;
    std::int64_t batch_stride = 0;
    std::uint32_t alignment = 256;  // of its first element, in bytes

    auto operator<=>(const MatmulOperand&) const = default;
};

/// What the product's kernel does at its end: it adds a vector (n) to every row and, if `before` is not nullptr, writes
/// that sum to `before` and its gelu (tanh approximation) to y. `before` has the layout of y.
struct Epilogue {
    const void* bias = nullptr;
    void* before = nullptr;
};

/// All parameters that determine the library's kernel: y (batch, m, n) = a (batch, m, k) b (batch, k, n), and the
/// alignments of an epilogue's pointers (0: no epilogue). The rows of y are contiguous.
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

/// The library's descriptors for one shape, and its heuristic's first choice of an algorithm.
class MatmulPlan {
public:
    /// The most workspace that an algorithm may use.
    static constexpr std::uint64_t most_workspace_bytes = std::uint64_t{32} << 20;

    /// Only the alignment of the epilogue's pointers is used.
    MatmulPlan(cublasLtHandle_t library, const MatmulShape& shape, const Epilogue& epilogue);

    /// Whether the library has an algorithm; without one, call no other function.
    bool exists() const { return exists_; }
    std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_bytes_); }

    /// Enqueues y = a b, or y += a b when `accumulate`, with the epilogue of the shape. `workspace` has
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
    std::mutex pointers_mutex_;  // the epilogue's pointers are stored in operation_
};

using MatmulPlans = PlanCache<MatmulShape, MatmulPlan>;

}  // namespace potluck::cuda
