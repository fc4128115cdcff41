// The emulator's double of cuBLASLt refuses what the real library refuses: each test plants one fault.

#include <cublasLt.h>
#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "autograd/ops/matmul.h"
#include "core/factories.h"
#include "tests/cuda/library_calls.h"
#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/emulator.h"
#include "tests/cuda_emulator/library_refusal.h"

namespace potluck::test {
namespace {

/// A valid product of the library: D (m, n) = A (m, k) B (k, n), column-major. Each test breaks one thing.
struct Product {
    std::int64_t m = 8, n = 4, k = 16;
    std::int64_t a_leading = 8, b_leading = 16, d_leading = 8;
    cudaDataType type = CUDA_R_32F;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    cudaDataType scale = CUDA_R_32F;
    std::int32_t a_order = CUBLASLT_ORDER_COL;
    std::int32_t a_batch = 1, batch = 1;
    std::int64_t d_batch_stride = 0;
    std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    const void* auxiliary = nullptr;
    std::int64_t auxiliary_leading = 8;
    std::uint32_t alignment = 256;
    float beta = 0.0F;

    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulHeuristicResult_t result{};

    ~Product() {
        cublasLtMatrixLayoutDestroy(a);
        cublasLtMatrixLayoutDestroy(b);
        cublasLtMatrixLayoutDestroy(d);
        cublasLtMatmulDescDestroy(operation);
        cublasLtDestroy(handle);
    }

    cublasStatus_t prepare() {
        const auto layout = [&](cublasLtMatrixLayout_t& place, std::int64_t rows, std::int64_t columns,
                                std::int64_t leading, std::int32_t count, std::int64_t stride) {
            cublasLtMatrixLayoutCreate(&place, type, static_cast<std::uint64_t>(rows),
                                       static_cast<std::uint64_t>(columns), leading);
            cublasLtMatrixLayoutSetAttribute(place, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                             sizeof(count));
            cublasLtMatrixLayoutSetAttribute(place, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                             sizeof(stride));
        };
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&operation, compute, scale);
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &auxiliary,
                                       sizeof(auxiliary));
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &auxiliary_leading,
                                       sizeof(auxiliary_leading));
        layout(a, m, k, a_leading, a_batch, 0);
        layout(b, k, n, b_leading, batch, 0);
        layout(d, m, n, d_leading, batch, d_batch_stride);
        cublasLtMatrixLayoutSetAttribute(a, CUBLASLT_MATRIX_LAYOUT_ORDER, &a_order, sizeof(a_order));
        cublasLtMatmulPreference_t preference = nullptr;
        cublasLtMatmulPreferenceCreate(&preference);
        const std::uint64_t workspace = 1 << 20;
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                             sizeof(workspace));
        for (const auto attribute :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment));
        int found = 0;
        const cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, d, d, preference, 1, &result, &found);
        cublasLtMatmulPreferenceDestroy(preference);
        return status;
    }

    cublasStatus_t run(const float* a_data, const float* b_data, float* d_data, void* workspace = nullptr,
                       std::size_t workspace_bytes = 0) {
        const float one = 1.0F;
        return cublasLtMatmul(handle, operation, &one, a_data, a, b_data, b, &beta, d_data, d, d_data, d,
                              &result.algo, workspace, workspace_bytes, nullptr);
    }
};

/// Checks that the heuristic refuses the descriptors because of the change by `spoil`.
void expect_refusal(cublasStatus_t status, const std::string& reason,
                    const std::function<void(Product&)>& spoil) {
    Product product;
    spoil(product);
    CHECK(product.prepare() == status);
    CAPTURE(emulator::last_library_refusal());
    CHECK(refused_because(reason));
}

}  // namespace

TEST_CASE("cuBLASLt double: a right product is computed") {
    DeviceMemory a(8 * 16), b(16 * 4), d(8 * 4, /*written=*/false);
    Product product;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    CHECK(product.run(a.get(), b.get(), d.get()) == CUBLAS_STATUS_SUCCESS);
    CHECK(d.read(32) == std::vector<float>(32, 16.0F));
}

TEST_CASE("cuBLASLt double: refuses a handle that another thread created") {
    Product product;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    DeviceMemory a(8 * 16), b(16 * 4), d(8 * 4, /*written=*/false);
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    std::string reason;
    std::thread([&] {
        status = product.run(a.get(), b.get(), d.get());
        reason = emulator::last_library_refusal();
    }).join();
    CHECK(status == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(reason.find("another thread") != std::string::npos);
}

TEST_CASE("cuBLASLt double: refuses bad descriptors") {
    const auto invalid = CUBLAS_STATUS_INVALID_VALUE, unsupported = CUBLAS_STATUS_NOT_SUPPORTED;
    expect_refusal(invalid, "leading dimension of A is 7", [](Product& p) { p.a_leading = 7; });
    expect_refusal(invalid, "leading dimension of B", [](Product& p) { p.b_leading = -16; });
    expect_refusal(unsupported, "order", [](Product& p) { p.a_order = CUBLASLT_ORDER_COL32; });
    // As row-major matrices, the same leading dimension is too small.
    expect_refusal(invalid, "16 columns", [](Product& p) { p.a_order = CUBLASLT_ORDER_ROW; });
    expect_refusal(unsupported, "table of types", [](Product& p) { p.scale = CUDA_R_64F; });
    expect_refusal(unsupported, "table of types", [](Product& p) { p.compute = CUBLAS_COMPUTE_64F; });
    expect_refusal(unsupported, "table of types", [](Product& p) { p.type = CUDA_R_64F; });
    expect_refusal(invalid, "batch count of A", [](Product& p) {
        p.batch = 2;
        p.d_batch_stride = 32;
    });
    expect_refusal(invalid, "overlap", [](Product& p) {
        p.a_batch = p.batch = 2;
        p.d_batch_stride = 31;
    });
    expect_refusal(unsupported, "65535", [](Product& p) {
        p.a_batch = p.batch = 65536;
        p.d_batch_stride = 32;
    });
    expect_refusal(invalid, "size of 0", [](Product& p) { p.k = 0; });
    expect_refusal(invalid, "no bias pointer", [](Product& p) { p.epilogue = CUBLASLT_EPILOGUE_BIAS; });
    const auto gelu = [](Product& p) {
        p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        p.bias = p.auxiliary = &p;
    };
    expect_refusal(invalid, "no auxiliary pointer", [&](Product& p) {
        gelu(p);
        p.auxiliary = nullptr;
    });
    expect_refusal(invalid, "multiple of 8", [&](Product& p) {
        gelu(p);
        p.auxiliary_leading = 12;
    });
    expect_refusal(unsupported, "64-bit types have no epilogue", [](Product& p) {
        p.type = p.scale = CUDA_R_64F;
        p.compute = CUBLAS_COMPUTE_64F;
        p.epilogue = CUBLASLT_EPILOGUE_BIAS;
        p.bias = &p;
    });
    expect_refusal(unsupported, "across their own size", [](Product& p) { p.alignment = 2; });
}

TEST_CASE(
    "cuBLASLt double: refuses handles and descriptors that are not alive, and attributes of a wrong size") {
    Product product;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    const std::int32_t four_bytes = 8;
    CHECK(cublasLtMatrixLayoutSetAttribute(product.a, CUBLASLT_MATRIX_LAYOUT_LD, &four_bytes,
                                           sizeof(four_bytes)) == CUBLAS_STATUS_INVALID_VALUE);
    DeviceMemory a(8 * 16), b(16 * 4), d(8 * 4);
    cublasLtMatrixLayoutDestroy(product.b);
    CHECK(product.run(a.get(), b.get(), d.get()) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("layout was never created, or was destroyed"));
    CHECK(cublasLtMatrixLayoutDestroy(product.b) == CUBLAS_STATUS_INVALID_VALUE);
    cublasLtDestroy(product.handle);
    CHECK(product.run(a.get(), b.get(), d.get()) == CUBLAS_STATUS_NOT_INITIALIZED);
}

TEST_CASE("cuBLASLt double: refuses a pointer that the algorithm was not chosen for") {
    DeviceMemory a(8 * 16 + 1), b(16 * 4), d(8 * 4);
    Product product;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    CHECK(product.run(a.get() + 1, b.get(), d.get()) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("A is not aligned to the 16 bytes"));
    Product modest;
    modest.alignment = 4;
    REQUIRE(modest.prepare() == CUBLAS_STATUS_SUCCESS);
    CHECK(modest.run(a.get() + 1, b.get(), d.get()) == CUBLAS_STATUS_SUCCESS);
}

TEST_CASE("cuBLASLt double: refuses an algorithm of another product, overlaps, and NULL") {
    DeviceMemory a(8 * 16), b(16 * 4), d(8 * 4);
    Product product, other;
    other.m = 4;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    REQUIRE(other.prepare() == CUBLAS_STATUS_SUCCESS);
    CHECK(product.run(a.get(), b.get(), a.get() + 16) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("overlaps"));
    CHECK(product.run(nullptr, b.get(), d.get()) == CUBLAS_STATUS_INVALID_VALUE);
    product.result = other.result;
    CHECK(product.run(a.get(), b.get(), d.get()) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("another product"));
}

TEST_CASE("cuBLASLt double: refuses too small a workspace, none, and a misaligned one") {
    Product product;
    product.k = product.b_leading = 2048;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    const std::size_t needed = product.result.workspaceSize;
    REQUIRE(needed > 0);
    DeviceMemory a(8 * 2048), b(2048 * 4), d(8 * 4), workspace(static_cast<std::int64_t>(needed));
    CHECK(product.run(a.get(), b.get(), d.get(), workspace.get(), needed - 1) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("needs a workspace"));
    CHECK(product.run(a.get(), b.get(), d.get(), nullptr, needed) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(product.run(a.get(), b.get(), d.get(), workspace.get() + 4, needed) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(refused_because("256 bytes"));
    CHECK(product.run(a.get(), b.get(), d.get(), workspace.get(), needed) == CUBLAS_STATUS_SUCCESS);
    CHECK(d.read(32) == std::vector<float>(32, 2048.0F));
}

TEST_CASE("cuBLASLt double: sees freed memory, memory that was never written, and reads past the end") {
    DeviceMemory b(16 * 4), d(8 * 4);
    const auto kind_of = [&](const float* a, float* result, float beta) {
        Product product;
        product.beta = beta;
        REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
        CHECK(product.run(a, b.get(), result) == CUBLAS_STATUS_EXECUTION_FAILED);
        const auto faults = emulator::take_faults();
        REQUIRE(!faults.empty());
        return faults.front().kind;
    };
    DeviceMemory freed(8 * 16), unwritten(8 * 16, false), small(8 * 15), a(8 * 16);
    freed.free();
    CHECK(kind_of(freed.get(), d.get(), 0) == emulator::FaultKind::use_after_free);
    CHECK(kind_of(small.get(), d.get(), 0) == emulator::FaultKind::out_of_bounds);
    // Not possible after kernels without instrumented stores, as in a build with the address sanitizer.
    if (!emulator::arena.tracks_writes) return;
    CHECK(kind_of(unwritten.get(), d.get(), 0) == emulator::FaultKind::never_written);
    CHECK(kind_of(a.get(), unwritten.get(), 1) == emulator::FaultKind::never_written);  // C is read
}

TEST_CASE("cuBLASLt double: what the library says of a view beyond its columns") {
    // Between the columns of a view is memory that does not belong to it: it was never written and is not read.
    DeviceMemory whole(12 * 16, false), b(16 * 4), d(8 * 4);
    const std::vector<float> column(8, 2.0F);
    for (int i = 0; i < 16; ++i)
        REQUIRE(cudaMemcpy(whole.get() + 12 * i, column.data(), 8 * sizeof(float), cudaMemcpyHostToDevice) ==
                cudaSuccess);
    Product product;
    product.a_leading = 12;
    REQUIRE(product.prepare() == CUBLAS_STATUS_SUCCESS);
    CHECK(product.run(whole.get(), b.get(), d.get()) == CUBLAS_STATUS_SUCCESS);
    CHECK(d.read(32) == std::vector<float>(32, 32.0F));
}

TEST_CASE("products of one shape share a plan, and the library's objects stay few") {
    const TensorOptions there{DType::f32, Device::cuda()};
    const Tensor a = ones({5, 6}, there), b = ones({6, 7}, there);
    matmul(a, b);
    const std::int64_t before = emulator::live_library_objects();
    for (int i = 0; i < 50; ++i) matmul(a, b);
    CHECK(emulator::live_library_objects() == before);
    // 4 objects for each of the at most 1024 cached plans.
    for (std::int64_t size = 1; size < 1300; ++size) matmul(ones({1, 2}, there), ones({2, size}, there));
    CHECK(emulator::live_library_objects() <= before + 4 * 1024);
}

}  // namespace potluck::test
