// The double of cuBLASLt: the heuristic and the product. It checks what the real library is documented to check, and
// computes without tricks: sums in f32 (f64 for f64), rounded once.

#include "tests/cuda_emulator/cublaslt.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/cpu/gemm.h"
#include "core/half.h"
#include "tests/cuda_emulator/library_refusal.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {
namespace {

using cpu::Matrix;

// The double's content of a cublasLtMatmulAlgo_t. The real one is opaque too, and is only valid for the problem for
// which the heuristic was called.
struct Algorithm {
    std::uint64_t magic;
    std::uint64_t problem;  // a hash of sizes, types and layouts
    std::uint64_t workspace_bytes;
    std::uint32_t alignment[4];  // A B C D
    std::uint64_t unused[3];
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
constexpr std::uint64_t magic = 0x706f746c75636b21;

std::uint64_t fingerprint(const MatmulProblem& p) {
    std::uint64_t hash = 14695981039346656037u;
    const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
    for (const MatrixLayoutState* x : {p.a, p.b, p.c, p.d})
        for (const std::uint64_t value :
             {static_cast<std::uint64_t>(x->type), x->rows, x->columns,
              static_cast<std::uint64_t>(x->leading), static_cast<std::uint64_t>(x->order),
              static_cast<std::uint64_t>(x->batch_count), static_cast<std::uint64_t>(x->batch_stride)})
            add(value);
    for (const std::int64_t value :
         {std::int64_t{p.operation->compute}, std::int64_t{p.operation->scale},
          std::int64_t{p.operation->transpose_a}, std::int64_t{p.operation->transpose_b},
          std::int64_t{p.operation->epilogue}})
        add(static_cast<std::uint64_t>(value));
    return hash;
}

bool is_multiple(std::int64_t elements, cudaDataType type, std::int64_t bytes) {
    return elements * bytes_of(type) % bytes == 0;
}

/// The operands of a product, at the addresses of one call.
struct Call {
    MatmulDescState operation;
    MatrixLayoutState a, b, c, d;
    std::int64_t m, n, k;
    const void *a_data, *b_data, *c_data;
    void* d_data;
    double alpha, beta;
};

/// Checks column by column (row by row), or everything at once if there are no gaps.
template <class Check>
void for_each_run(const MatrixLayoutState& x, const void* data, const Check& check) {
    const std::int64_t element = bytes_of(x.type);
    auto length = static_cast<std::int64_t>(x.order == CUBLASLT_ORDER_COL ? x.rows : x.columns);
    auto runs = static_cast<std::int64_t>(x.order == CUBLASLT_ORDER_COL ? x.columns : x.rows);
    if (length == x.leading) {
        length *= runs;
        runs = 1;
    }
    // A matrix that all batches share is checked once.
    const std::int64_t batches = x.batch_stride == 0 ? 1 : x.batch_count;
    for (std::int64_t batch = 0; batch < batches; ++batch)
        for (std::int64_t run = 0; run < runs; ++run)
            check(reinterpret_cast<std::uintptr_t>(data) +
                      static_cast<std::uintptr_t>((batch * x.batch_stride + run * x.leading) * element),
                  length * element);
}

void check_matrix_read(const MatrixLayoutState& x, const void* data, const char* name) {
    for_each_run(x, data, [&](std::uintptr_t address, std::int64_t bytes) {
        check_read(reinterpret_cast<const void*>(address), bytes, name);
    });
}
void check_matrix_write(const MatrixLayoutState& x, void* data, const char* name) {
    for_each_run(x, data, [&](std::uintptr_t address, std::int64_t bytes) {
        check_write(reinterpret_cast<void*>(address), bytes, name);
    });
}

/// TF32 keeps 10 bits of the mantissa, rounded to nearest.
float to_tf32(float value) {
    if (!std::isfinite(value)) return value;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = (bits + 0x0fffu + ((bits >> 13) & 1u)) & ~0x1fffu;
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
}

double element_at(cudaDataType type, const void* data, std::int64_t index) {
    switch (type) {
        case CUDA_R_64F:
            return static_cast<const double*>(data)[index];
        case CUDA_R_32F:
            return static_cast<double>(static_cast<const float*>(data)[index]);
        case CUDA_R_16F:
            return static_cast<double>(static_cast<float>(static_cast<const float16*>(data)[index]));
        default:
            return static_cast<double>(static_cast<float>(static_cast<const bfloat16*>(data)[index]));
    }
}

void store_at(cudaDataType type, void* data, std::int64_t index, double value) {
    switch (type) {
        case CUDA_R_64F:
            static_cast<double*>(data)[index] = value;
            return;
        case CUDA_R_32F:
            static_cast<float*>(data)[index] = static_cast<float>(value);
            return;
        case CUDA_R_16F:
            static_cast<float16*>(data)[index] = float16(static_cast<float>(value));
            return;
        default:
            static_cast<bfloat16*>(data)[index] = bfloat16(static_cast<float>(value));
    }
}

/// op(X) of one batch in the compute type: the memory itself, or a contiguous copy in the same order.
template <class T>
Matrix<const T> operand(const MatrixLayoutState& x, const void* data, std::int64_t batch, bool turned,
                        bool tf32, std::vector<T>& copy) {
    const auto rows = static_cast<std::int64_t>(x.rows), columns = static_cast<std::int64_t>(x.columns);
    Matrix<const T> seen{nullptr, rows, columns, x.row_step(), x.column_step()};
    const std::int64_t first = batch * x.batch_stride;
    if (bytes_of(x.type) == sizeof(T) && !tf32) {
        seen.data = static_cast<const T*>(data) + first;
    } else {
        const bool by_columns = x.order == CUBLASLT_ORDER_COL;
        const std::int64_t length = by_columns ? rows : columns, runs = by_columns ? columns : rows;
        copy.resize(static_cast<std::size_t>(length * runs));
        for (std::int64_t run = 0; run < runs; ++run)
            for (std::int64_t i = 0; i < length; ++i) {
                const auto value = static_cast<T>(element_at(x.type, data, first + run * x.leading + i));
                copy[static_cast<std::size_t>(run * length + i)] =
                    tf32 ? static_cast<T>(to_tf32(static_cast<float>(value))) : value;
            }
        seen.data = copy.data();
        (by_columns ? seen.column_stride : seen.row_stride) = length;
    }
    return turned ? seen.transposed() : seen;
}

/// GELU by its tanh approximation. The manual only says "GELU"; llm.c and PyTorch use it as the tanh approximation.
template <class T>
T gelu(T x) {
    const double v = static_cast<double>(x);
    return static_cast<T>(0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
}

// Columns of D in tiles, so that the sums do not depend on the number of threads.
constexpr std::int64_t tile_columns = 96;

template <class T>
void multiply(const Call& call) {
    const bool tf32 = call.operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const std::int64_t m = call.m, n = call.n, tiles = (n + tile_columns - 1) / tile_columns;
    for (std::int64_t batch = 0; batch < call.d.batch_count; ++batch) {
        std::vector<T> a_copy, b_copy;
        const Matrix<const T> a =
            operand<T>(call.a, call.a_data, batch, call.operation.transpose_a != CUBLAS_OP_N, tf32, a_copy);
        const Matrix<const T> b =
            operand<T>(call.b, call.b_data, batch, call.operation.transpose_b != CUBLAS_OP_N, tf32, b_copy);
#pragma omp parallel for schedule(dynamic) if (m * n * call.k > 1 << 16)
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
            const std::int64_t first = tile * tile_columns, columns = std::min(tile_columns, n - first);
            // D^T = op(B)^T op(A)^T, which has the order of rows that gemm() writes.
            std::vector<T> sums(static_cast<std::size_t>(columns * m));
            cpu::gemm(b.block(0, first, call.k, columns).transposed(), a.transposed(),
                      Matrix<T>{sums.data(), columns, m, m, 1}, /*accumulate=*/false);
            for (std::int64_t j = 0; j < columns; ++j) {
                for (std::int64_t i = 0; i < m; ++i) {
                    T value = static_cast<T>(call.alpha) * sums[static_cast<std::size_t>(j * m + i)];
                    const auto place = [&](const MatrixLayoutState& x) {
                        return batch * x.batch_stride + i * x.row_step() + (first + j) * x.column_step();
                    };
                    if (call.beta != 0)
                        value += static_cast<T>(call.beta) *
                                 static_cast<T>(element_at(call.c.type, call.c_data, place(call.c)));
                    if (call.operation.adds_bias())
                        value += static_cast<T>(element_at(call.d.type, call.operation.bias, i));
                    if (call.operation.applies_gelu()) {
                        store_at(call.d.type, call.operation.auxiliary,
                                 (first + j) * call.operation.auxiliary_leading + i,
                                 static_cast<double>(value));
                        value = gelu(value);
                    }
                    store_at(call.d.type, call.d_data, place(call.d), static_cast<double>(value));
                }
            }
        }
    }
}

void run(const Call& call) {
    check_matrix_read(call.a, call.a_data, "A");
    check_matrix_read(call.b, call.b_data, "B");
    // With beta = 0 the manual allows any content of C.
    if (call.beta != 0) check_matrix_read(call.c, call.c_data, "C");
    if (call.operation.adds_bias()) check_read(call.operation.bias, call.m * bytes_of(call.d.type), "bias");
    check_matrix_write(call.d, call.d_data, "D");
    if (call.operation.applies_gelu()) {
        MatrixLayoutState auxiliary = call.d;
        auxiliary.order = CUBLASLT_ORDER_COL;
        auxiliary.leading = call.operation.auxiliary_leading;
        check_matrix_write(auxiliary, call.operation.auxiliary, "auxiliary output");
    }
    if (call.operation.scale == CUDA_R_64F)
        multiply<double>(call);
    else
        multiply<float>(call);
}

/// Whether two matrices overlap in memory (taken as whole ranges).
bool overlap(const MatrixLayoutState& x, const void* x_data, const MatrixLayoutState& y, const void* y_data) {
    const auto range = [](const MatrixLayoutState& matrix, const void* data) {
        const auto begin = reinterpret_cast<std::uintptr_t>(data);
        const std::int64_t elements = (matrix.batch_count - 1) * matrix.batch_stride + matrix.span();
        return std::pair{begin, begin + static_cast<std::uintptr_t>(elements * bytes_of(matrix.type))};
    };
    const auto [x_begin, x_end] = range(x, x_data);
    const auto [y_begin, y_end] = range(y, y_data);
    return x_begin < y_end && y_begin < x_end;
}

bool is_aligned(const void* pointer, std::uint64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace
}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

// Replaces the real heuristic: where the caller promises 16 bytes and all column strides are multiples of that, the
// algorithm requires them (like kernels with vector loads); a long sum is split into pieces that are combined in the
// workspace.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned) {
    if (requested <= 0 || results == nullptr || returned == nullptr)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "no algorithm was asked for");
    if (!is_library_object(preference, preference_kind))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the preference was never created, or was destroyed");
    const auto& wishes = *static_cast<const MatmulPreferenceState*>(preference);
    MatmulProblem p{};
    if (const cublasStatus_t status = read_problem(handle, operation, a, b, c, d, p);
        status != CUBLAS_STATUS_SUCCESS)
        return status;
    Algorithm algorithm{magic, fingerprint(p), 0, {}, {}};
    const MatrixLayoutState* layouts[] = {p.a, p.b, p.c, p.d};
    for (int i = 0; i < 4; ++i) {
        const MatrixLayoutState& layout = *layouts[i];
        const auto element = static_cast<std::uint32_t>(bytes_of(layout.type));
        const bool steps = is_multiple(layout.leading, layout.type, 16) &&
                           (layout.batch_count == 1 || is_multiple(layout.batch_stride, layout.type, 16));
        algorithm.alignment[i] = wishes.alignment[i] >= 16 && steps ? 16 : element;
        if (wishes.alignment[i] < element) {
            *returned = 0;
            return refused(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm reads elements across their own size");
        }
    }
    const bool may_cut = (wishes.reduction_schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
    const auto pieces = static_cast<std::uint64_t>(2 * p.m * p.n * p.d->batch_count) *
                        static_cast<std::uint64_t>(bytes_of(p.operation->scale));
    if (may_cut && p.k >= 1024 && pieces <= wishes.workspace_bytes) algorithm.workspace_bytes = pieces;
    results[0] = {};
    std::memcpy(&results[0].algo, &algorithm, sizeof(algorithm));
    results[0].workspaceSize = algorithm.workspace_bytes;
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *returned = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, std::size_t workspace_bytes,
                              cudaStream_t stream) {
    MatmulProblem p{};
    if (const cublasStatus_t status =
            read_problem(handle, operation, a_layout, b_layout, c_layout, d_layout, p);
        status != CUBLAS_STATUS_SUCCESS)
        return status;
    if (alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr || d == nullptr)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "alpha, beta, A, B or D is NULL");
    const auto scalar = [&](const void* pointer) {
        return p.operation->scale == CUDA_R_64F ? *static_cast<const double*>(pointer)
                                                : static_cast<double>(*static_cast<const float*>(pointer));
    };
    if (scalar(beta) != 0 && c == nullptr)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "C is NULL and beta is not 0");
    // Without an algorithm the library calls its heuristic itself, with default preferences: no workspace.
    Algorithm algorithm{magic, fingerprint(p), 0, {}, {}};
    for (std::uint32_t& alignment : algorithm.alignment) alignment = 1;
    if (algo != nullptr) std::memcpy(&algorithm, algo, sizeof(algorithm));
    if (algorithm.magic != magic || algorithm.problem != fingerprint(p))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was made for another product");
    if (workspace_bytes < algorithm.workspace_bytes)
        return refused(CUBLAS_STATUS_INVALID_VALUE,
                       "the algorithm needs a workspace of " + std::to_string(algorithm.workspace_bytes) +
                           " bytes and was given " + std::to_string(workspace_bytes));
    if (algorithm.workspace_bytes > 0 && workspace == nullptr)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the workspace is NULL");
    // The manual, cublasSetWorkspace(): "must be aligned to at least 256 bytes"; cublasLtMatmul() does not repeat it.
    if (algorithm.workspace_bytes > 0 && !is_aligned(workspace, 256))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the workspace is not aligned to 256 bytes");
    // The status for a misaligned operand is not documented; the header's "parameters in conflict" fits best.
    const void* operands[] = {a, b, scalar(beta) != 0 ? c : d, d};
    const char* names[] = {"A", "B", "C", "D"};
    for (int i = 0; i < 4; ++i)
        if (!is_aligned(operands[i], algorithm.alignment[i]))
            return refused(CUBLAS_STATUS_INVALID_VALUE, std::string(names[i]) + " is not aligned to the " +
                                                            std::to_string(algorithm.alignment[i]) +
                                                            " bytes that the algorithm was chosen for");
    // In place, C and D must be the same matrix; other overlaps have an undefined result.
    if (c == d &&
        (p.c->leading != p.d->leading || p.c->order != p.d->order || p.c->batch_stride != p.d->batch_stride))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "C and D are one address with different layouts");
    if (scalar(beta) != 0 && c != d && overlap(*p.c, c, *p.d, d))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "C and D overlap");
    if (overlap(*p.a, a, *p.d, d) || overlap(*p.b, b, *p.d, d))
        return refused(CUBLAS_STATUS_INVALID_VALUE, "D overlaps an operand that is read");
    int device = -1;
    cudaGetDevice(&device);
    if (device_of_stream(stream) != device)
        return refused(CUBLAS_STATUS_INVALID_VALUE, "the stream is one of device " +
                                                        std::to_string(device_of_stream(stream)) +
                                                        ", current is device " + std::to_string(device));
    const Call call{*p.operation, *p.a, *p.b, *p.c, *p.d, p.m,           p.n,
                    p.k,          a,    b,    c,    d,    scalar(alpha), scalar(beta)};
    const std::uint64_t used = algorithm.workspace_bytes;
    const cudaError_t status = library_call(stream, "cublasLtMatmul", [call, workspace, used] {
        if (used > 0) {
            check_write(workspace, static_cast<std::int64_t>(used), "workspace");
            std::memset(workspace, 0xff, used);  // destroys the previous content
        }
        run(call);
    });
    return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                 : refused(CUBLAS_STATUS_EXECUTION_FAILED, last_fault_text());
}

}  // extern "C"
