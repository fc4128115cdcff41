#pragma once

// What the double of cuBLASLt keeps behind the handles of the real header, and how it reads them.

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
    /// Elements from the first to behind the last.
    std::int64_t span() const;
};

struct MatmulDescState : cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType scale;
    std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    std::int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    void* auxiliary = nullptr;  // of the type of D
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

/// One product as the descriptors say it: sizes of op(A) op(B), and the operands' layouts.
struct MatmulProblem {
    const MatmulDescState* operation;
    const MatrixLayoutState *a, *b, *c, *d;
    std::int64_t m, n, k;
};

/// Fills `problem`, or says why the library would refuse the descriptors.
cublasStatus_t read_problem(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                            MatmulProblem& problem);

std::int64_t bytes_of(cudaDataType type);

}  // namespace potluck::emulator
