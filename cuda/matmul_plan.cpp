#include "cuda/matmul_plan.h"

#include "cuda/library_check.h"

// cuBLASLt matrices are column-major. Interpreted so, the memory of the row-major y (m, n) is the matrix y^T (n, m),
// and y^T = b^T a^T: the library's first operand is our b and its second our a, and the rows of its result, to which
// the bias belongs, are our columns.

namespace potluck::cuda {
namespace {

cudaDataType data_type(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return CUDA_R_64F;
        case DType::f16:
            return CUDA_R_16F;
        case DType::bf16:
            return CUDA_R_16BF;
        default:
            return CUDA_R_32F;
    }
}

/// Every sum is accumulated in f32; in f64 for f64.
cublasComputeType_t compute_type(const MatmulShape& shape) {
    if (shape.dtype == DType::f64) return CUBLAS_COMPUTE_64F;
    return shape.dtype == DType::f32 && shape.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

template <class Value>
void set(const MatmulDescriptor& descriptor, cublasLtMatmulDescAttributes_t attribute, Value value) {
    check(cublasLtMatmulDescSetAttribute(descriptor.get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
}
template <class Value>
void set(const MatrixLayout& layout, cublasLtMatrixLayoutAttribute_t attribute, Value value) {
    check(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof(value)),
          "cublasLtMatrixLayoutSetAttribute");
}
template <class Value>
void set(const MatmulPreference& preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
}

/// Our matrix with `rows` rows that are `leading` elements apart: for the library these are columns.
MatrixLayout layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t leading,
                    std::int64_t batch, std::int64_t batch_stride) {
    cublasLtMatrixLayout_t handle = nullptr;
    check(cublasLtMatrixLayoutCreate(&handle, data_type(dtype), static_cast<std::uint64_t>(columns),
                                     static_cast<std::uint64_t>(rows), leading),
          "cublasLtMatrixLayoutCreate");
    MatrixLayout made(handle);
    if (batch > 1) {
        set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
        set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, batch_stride);
    }
    return made;
}

MatrixLayout layout(const MatmulShape& shape, const MatmulOperand& operand, std::int64_t rows,
                    std::int64_t columns) {
    return operand.transposed
               ? layout(shape.dtype, columns, rows, operand.leading, shape.batch, operand.batch_stride)
               : layout(shape.dtype, rows, columns, operand.leading, shape.batch, operand.batch_stride);
}

std::int32_t transposition(const MatmulOperand& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

}  // namespace

MatmulPlan::MatmulPlan(cublasLtHandle_t library, const MatmulShape& shape, const Epilogue& epilogue)
    : dtype_(shape.dtype), has_bias_(shape.bias_alignment != 0), has_gelu_(shape.before_alignment != 0) {
    cublasLtMatmulDesc_t operation = nullptr;
    check(cublasLtMatmulDescCreate(&operation, compute_type(shape),
                                   shape.dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    operation_.reset(operation);
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, transposition(shape.b));
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, transposition(shape.a));
    if (has_bias_) {
        set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE,
            static_cast<std::uint32_t>(has_gelu_ ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS));
        if (has_gelu_) set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shape.n);
        set_pointers(epilogue);
    }
    a_ = layout(shape, shape.a, shape.m, shape.k);
    b_ = layout(shape, shape.b, shape.k, shape.n);
    y_ = layout(shape.y_dtype, shape.m, shape.n, shape.n, shape.batch, shape.y_batch_stride);

    cublasLtMatmulPreference_t wishes = nullptr;
    check(cublasLtMatmulPreferenceCreate(&wishes), "cublasLtMatmulPreferenceCreate");
    const MatmulPreference preference(wishes);
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace_bytes);
    // A sum that is split into pieces keeps them in f32: the other schemes round each piece to the type of y.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape.b.alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.a.alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.y_alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.y_alignment);

    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library, operation_.get(), b_.get(), a_.get(), y_.get(), y_.get(),
                                       preference.get(), 1, &best, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return;
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0 || best.state != CUBLAS_STATUS_SUCCESS) return;
    exists_ = true;
    algorithm_ = best.algo;
    workspace_bytes_ = best.workspaceSize;
}

void MatmulPlan::set_pointers(const Epilogue& epilogue) {
    set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
    if (has_gelu_) set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.before);
}

void MatmulPlan::run(cublasLtHandle_t library, const void* a, const void* b, const Epilogue& epilogue,
                     void* y, bool accumulate, void* workspace, cudaStream_t stream) {
    const double one = 1.0, zero = 0.0;
    const float one_f32 = 1.0F, zero_f32 = 0.0F;
    const bool is_f64 = dtype_ == DType::f64;
    const void* alpha = is_f64 ? static_cast<const void*>(&one) : &one_f32;
    const void* none = is_f64 ? static_cast<const void*>(&zero) : &zero_f32;
    std::unique_lock lock(pointers_mutex_, std::defer_lock);
    if (has_bias_) {
        lock.lock();
        set_pointers(epilogue);
    }
    check(
        cublasLtMatmul(library, operation_.get(), alpha, b, b_.get(), a, a_.get(), accumulate ? alpha : none,
                       y, y_.get(), y, y_.get(), &algorithm_, workspace, workspace_bytes_, stream),
        "cublasLtMatmul");
}

}  // namespace potluck::cuda
