// The double of cuBLASLt: handles, descriptors, and the combinations that the library accepts, according to the
// comments of cublasLt.h of CUDA 13.0 and the cuBLAS manual, section cublasLtMatmul.

#include <array>
#include <cstring>
#include <string>

#include "tests/cuda_emulator/cublaslt.h"
#include "tests/cuda_emulator/library_refusal.h"

// Opaque in the header. According to the manual a handle is bound to the device that is current when it is created.
struct cublasLtContext {
    int device;
};

namespace potluck::emulator {
namespace {

constexpr const char* handle_kind = "cublasLt handle";
constexpr const char* layout_kind = "cublasLt matrix layout";
constexpr const char* operation_kind = "cublasLt matmul descriptor";

/// Copies the value of an attribute, whose size must match exactly.
template <class Value>
cublasStatus_t read_attribute(Value& value, const void* buffer, std::size_t bytes) {
    if (buffer == nullptr) return refused(CUBLAS_STATUS_INVALID_VALUE, "the attribute's buffer is NULL");
    if (bytes != sizeof(Value))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "an attribute of " + std::to_string(sizeof(Value)) +
                                                        " bytes was given in " + std::to_string(bytes));
    std::memcpy(&value, buffer, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/// A row of the manual's table of types for matrices in plain order, the only one that we use.
struct Types {
    cublasComputeType_t compute;
    cudaDataType scale, operands, result;
    bool takes_bias;
};
constexpr std::array table{
    Types{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF, true},
    Types{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F, true},
    Types{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16F, true},
    Types{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16F, CUDA_R_32F, true},
    Types{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, true},
    Types{CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, true},
    // The manual lists no bias type in the rows of 64-bit types: interpreted as no epilogue.
    Types{CUBLAS_COMPUTE_64F, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, false},
};

cublasStatus_t check_layout(const MatrixLayoutState& layout, const std::string& name) {
    // Other orders are for integers and narrow floats only.
    if (layout.order != CUBLASLT_ORDER_COL && layout.order != CUBLASLT_ORDER_ROW)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                       name + " has order " + std::to_string(layout.order) +
                           ", which is for other types than floats of 16, 32 or 64 bits");
    // The manual does not mention sizes of 0. Nothing is computed then, so the call is treated as a mistake.
    if (layout.rows == 0 || layout.columns == 0)
        return refused(CUBLAS_STATUS_INVALID_VALUE, name + " has a size of 0");
    // cublasLt.h: "usually only values that can be expressed as int32_t are supported".
    if (layout.rows > INT32_MAX || layout.columns > INT32_MAX)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED, name + " has a size beyond 32 bits");
    const std::uint64_t least = layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.columns;
    if (layout.leading < 0 || static_cast<std::uint64_t>(layout.leading) < least)
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the leading dimension of " + name + " is " + std::to_string(layout.leading) +
                           ", less than its " + std::to_string(least) +
                           (layout.order == CUBLASLT_ORDER_COL ? " rows" : " columns"));
    if (layout.batch_count < 1)
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       name + " has a batch count of " + std::to_string(layout.batch_count));
    // Not in the manual: tensorflow pull request 44175 and later jax report that batches beyond 2^16 - 1 are refused.
    if (layout.batch_count > 65535)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                       name + " has a batch count of " + std::to_string(layout.batch_count) + ", over 65535");
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

std::int64_t bytes_of(cudaDataType type) {
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : type == CUDA_R_8I ? 1 : 2;
}

std::int64_t MatrixLayoutState::span() const {
    const auto last_row = static_cast<std::int64_t>(rows) - 1,
               last_column = static_cast<std::int64_t>(columns) - 1;
    return last_row * row_step() + last_column * column_step() + 1;
}

cublasStatus_t read_problem(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                            MatmulProblem& problem) {
    if (!is_library_object(handle, handle_kind))
        return refused(CUBLAS_STATUS_NOT_INITIALIZED, "the handle was never created, or was destroyed");
    if (!is_handle_of_this_thread(handle))
        return refused(CUBLAS_STATUS_INVALID_VALUE, handle_of_another_thread);
    int device = -1;
    cudaGetDevice(&device);
    if (handle->device != device)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the handle was created on device " +
                                                        std::to_string(handle->device) + ", current is " +
                                                        std::to_string(device));
    if (!is_library_object(operation, operation_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the matmul descriptor was never created, or was destroyed");
    for (const cublasLtMatrixLayout_t layout : {a, b, c, d})
        if (!is_library_object(layout, layout_kind))
            return refused(CUBLAS_STATUS_INVALID_VALUE,
                           "a matrix layout was never created, or was destroyed");
    problem = {static_cast<const MatmulDescState*>(operation),
               static_cast<const MatrixLayoutState*>(a),
               static_cast<const MatrixLayoutState*>(b),
               static_cast<const MatrixLayoutState*>(c),
               static_cast<const MatrixLayoutState*>(d),
               0,
               0,
               0};
    const MatmulProblem& p = problem;

    const Types* types = nullptr;
    for (const Types& row : table)
        if (row.compute == p.operation->compute && row.scale == p.operation->scale &&
            row.operands == p.a->type && row.operands == p.b->type && row.result == p.c->type &&
            row.result == p.d->type)
            types = &row;
    if (types == nullptr)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                       "no row of the table of types has compute type " +
                           std::to_string(p.operation->compute) + ", scale type " +
                           std::to_string(p.operation->scale) + " and matrices of types " +
                           std::to_string(p.a->type) + ", " + std::to_string(p.b->type) + ", " +
                           std::to_string(p.c->type) + ", " + std::to_string(p.d->type));
    if (p.operation->pointer_mode != CUBLASLT_POINTER_MODE_HOST)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED, "this double reads alpha and beta on the host only");
    if (p.operation->adds_bias()) {
        if (!types->takes_bias) return refused(CUBLAS_STATUS_NOT_SUPPORTED, "64-bit types have no epilogue");
        if (p.operation->bias == nullptr)
            return refused(CUBLAS_STATUS_INVALID_VALUE, "the bias epilogue has no bias pointer");
    } else if (p.operation->epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
        return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                       "this double has no epilogue " + std::to_string(p.operation->epilogue));
    }
    if (p.operation->applies_gelu()) {
        // cublasLt.h, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD.
        const std::int64_t leading = p.operation->auxiliary_leading;
        if (p.operation->auxiliary == nullptr)
            return refused(CUBLAS_STATUS_INVALID_VALUE, "the epilogue has no auxiliary pointer");
        if (leading % 8 != 0 || leading < static_cast<std::int64_t>(p.d->rows))
            return refused(CUBLAS_STATUS_INVALID_VALUE,
                           "the auxiliary leading dimension " + std::to_string(leading) +
                               " is no multiple of 8 or less than the rows of D");
        if (p.d->batch_count != 1)
            return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                           "this double has no batches with an auxiliary output");
    }

    const std::array layouts{p.a, p.b, p.c, p.d};
    const std::array names{"A", "B", "C", "D"};
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        if (const cublasStatus_t status = check_layout(*layouts[i], names[i]);
            status != CUBLAS_STATUS_SUCCESS)
            return status;
        // According to the library's log: "batch count must be equal to all other matrices batch counts".
        if (layouts[i]->batch_count != p.d->batch_count)
            return refused(CUBLAS_STATUS_INVALID_VALUE, std::string("the batch count of ") + names[i] +
                                                            " is " + std::to_string(layouts[i]->batch_count) +
                                                            ", that of D is " +
                                                            std::to_string(p.d->batch_count));
    }
    // Overlapping results have undefined content.
    if (p.d->batch_count > 1 && p.d->batch_stride < p.d->span())
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the matrices of D overlap: their stride is " +
                                                        std::to_string(p.d->batch_stride) + ", each spans " +
                                                        std::to_string(p.d->span()) + " elements");

    const bool a_turned = p.operation->transpose_a != CUBLAS_OP_N,
               b_turned = p.operation->transpose_b != CUBLAS_OP_N;
    problem.m = static_cast<std::int64_t>(a_turned ? p.a->columns : p.a->rows);
    problem.k = static_cast<std::int64_t>(a_turned ? p.a->rows : p.a->columns);
    problem.n = static_cast<std::int64_t>(b_turned ? p.b->rows : p.b->columns);
    const auto inner = static_cast<std::int64_t>(b_turned ? p.b->columns : p.b->rows);
    const auto fits = [&](const MatrixLayoutState& x) {
        return static_cast<std::int64_t>(x.rows) == p.m && static_cast<std::int64_t>(x.columns) == p.n;
    };
    if (inner != p.k || !fits(*p.c) || !fits(*p.d))
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the sizes do not fit: op(A) is " + std::to_string(p.m) + " x " + std::to_string(p.k) +
                           ", op(B) " + std::to_string(inner) + " x " + std::to_string(p.n) + ", C " +
                           std::to_string(p.c->rows) + " x " + std::to_string(p.c->columns) + ", D " +
                           std::to_string(p.d->rows) + " x " + std::to_string(p.d->columns));
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (handle == nullptr) return refused(CUBLAS_STATUS_INVALID_VALUE, "no place for the handle");
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess)
        return refused(CUBLAS_STATUS_NOT_INITIALIZED, "there is no device");
    *handle = new cublasLtContext{device};
    library_object_created(*handle, handle_kind);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!library_object_destroyed(handle, handle_kind))
        return refused(CUBLAS_STATUS_NOT_INITIALIZED, "the handle was never created, or was destroyed");
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusName(cublasStatus_t status) { return cublasLtGetStatusString(status); }

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "CUBLAS_STATUS_NOT_SUPPORTED";
        default:
            return "a status that this double never returns";
    }
}

std::size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
    if (layout == nullptr) return refused(CUBLAS_STATUS_INVALID_VALUE, "no place for the layout");
    auto* made = new MatrixLayoutState{{}, type, rows, columns, leading};
    library_object_created(static_cast<cublasLtMatrixLayout_t>(made), layout_kind);
    *layout = made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    if (!library_object_destroyed(layout, layout_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the matrix layout was never created, or was destroyed");
    delete static_cast<MatrixLayoutState*>(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* buffer,
                                                std::size_t bytes) {
    if (!is_library_object(layout, layout_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the matrix layout was never created, or was destroyed");
    auto& state = *static_cast<MatrixLayoutState*>(layout);
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_ORDER:
            return read_attribute(state.order, buffer, bytes);
        case CUBLASLT_MATRIX_LAYOUT_LD:
            return read_attribute(state.leading, buffer, bytes);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
            return read_attribute(state.batch_count, buffer, bytes);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
            return read_attribute(state.batch_stride, buffer, bytes);
        default:
            return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                           "this double has no layout attribute " + std::to_string(attribute));
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (operation == nullptr) return refused(CUBLAS_STATUS_INVALID_VALUE, "no place for the descriptor");
    auto* made = new MatmulDescState{{}, compute, scale};
    library_object_created(static_cast<cublasLtMatmulDesc_t>(made), operation_kind);
    *operation = made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    if (!library_object_destroyed(operation, operation_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the matmul descriptor was never created, or was destroyed");
    delete static_cast<MatmulDescState*>(operation);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* buffer,
                                              std::size_t bytes) {
    if (!is_library_object(operation, operation_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the matmul descriptor was never created, or was destroyed");
    auto& state = *static_cast<MatmulDescState*>(operation);
    const auto set_transpose = [&](std::int32_t& place) {
        std::int32_t value = 0;
        if (const cublasStatus_t status = read_attribute(value, buffer, bytes);
            status != CUBLAS_STATUS_SUCCESS)
            return status;
        if (value != CUBLAS_OP_N && value != CUBLAS_OP_T && value != CUBLAS_OP_C)
            return refused(CUBLAS_STATUS_INVALID_VALUE, "no such transposition: " + std::to_string(value));
        place = value;
        return CUBLAS_STATUS_SUCCESS;
    };
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_POINTER_MODE:
            return read_attribute(state.pointer_mode, buffer, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSA:
            return set_transpose(state.transpose_a);
        case CUBLASLT_MATMUL_DESC_TRANSB:
            return set_transpose(state.transpose_b);
        case CUBLASLT_MATMUL_DESC_EPILOGUE:
            return read_attribute(state.epilogue, buffer, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
            return read_attribute(state.bias, buffer, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
            return read_attribute(state.auxiliary, buffer, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
            return read_attribute(state.auxiliary_leading, buffer, bytes);
        default:
            return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                           "this double has no matmul attribute " + std::to_string(attribute));
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    if (preference == nullptr) return refused(CUBLAS_STATUS_INVALID_VALUE, "no place for the preference");
    auto* made = new MatmulPreferenceState;
    library_object_created(static_cast<cublasLtMatmulPreference_t>(made), preference_kind);
    *preference = made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    if (!library_object_destroyed(preference, preference_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the preference was never created, or was destroyed");
    delete static_cast<MatmulPreferenceState*>(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* buffer, std::size_t bytes) {
    if (!is_library_object(preference, preference_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the preference was never created, or was destroyed");
    auto& state = *static_cast<MatmulPreferenceState*>(preference);
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
            return read_attribute(state.workspace_bytes, buffer, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
            return read_attribute(state.reduction_schemes, buffer, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
            return read_attribute(state.alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
                                  buffer, bytes);
        default:
            return refused(CUBLAS_STATUS_NOT_SUPPORTED,
                           "this double has no preference " + std::to_string(attribute));
    }
}

}  // extern "C"
