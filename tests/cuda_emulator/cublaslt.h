#pragma once

// The objects behind the handles of the real header in the double of cuBLASLt, and functions that read them.

#include <cublasLt.h>

#include <cstdint>
#include <string>

namespace potluck::emulator {

inline constexpr const char* preference_kind = "cublasLt preference";

struct MatrixLayoutState : cublasLtMatrixLayoutOpaque_t {
    cudaDataType type;
    std::uint64_t rows, columns;
    std::int64_t leading;
    std::int32_t order = CUBLASLT_ORDER_COL;
    std::int32_t batch_count = 1;
    std::int64_t batch_stride = 0;

    std::int64_t row_step() const { return order == CUBLASLT_ORDER_ROW ? leading : 1; }
    std::int64_t column_step() const { return order == CUBLASLT_ORDER_ROW ? 1 : leading; }
    /// Number of elements from the first to the last, including gaps.
    std::int64_t span() const;
};

struct MatmulDescState : cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType scale;
    std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    std::int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    void* auxiliary = nullptr;  // with the type of D
    std::int64_t auxiliary_leading = 0;

    bool adds_bias() const {
        return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    }
    bool applies_gelu() const { return epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
};

struct MatmulPreferenceState : cublasLtMatmulPreferenceOpaque_t {
    std::uint64_t workspace_bytes = 0;
    std::uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    std::uint32_t alignment[4] = {256, 256, 256, 256};  // A B C D
};

/// One product as described by the descriptors: sizes of op(A) op(B), and the layouts of the operands.
struct MatmulProblem {
    const MatmulDescState* operation;
    const MatrixLayoutState *a, *b, *c, *d;
    std::int64_t m, n, k;
};

/// Fills `problem`, or records why the library would refuse the descriptors.
cublasStatus_t read_problem(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                            MatmulProblem& problem);

std::int64_t bytes_of(cudaDataType type);

}  // namespace potluck::emulator
