// The emulator's double of cuDNN refuses what the real library refuses: each test plants one fault.

#include <cudnn.h>
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda/library_calls.h"
#include "tests/cuda_emulator/emulator.h"

namespace potluck::test {
namespace {

/// A valid convolution of the library; each test breaks one thing.
struct Convolution {
    int n = 2, c = 4, h = 5, w = 5, filters = 6, kernel = 3, out = 5, padding = 1, stride = 1, dilation = 1,
        groups = 2;
    int filter_channels = 2;
    cudnnDataType_t type = CUDNN_DATA_FLOAT, compute = CUDNN_DATA_FLOAT;
    cudnnMathType_t math = CUDNN_FMA_MATH;

    cudnnHandle_t handle = nullptr;
    cudnnTensorDescriptor_t x = nullptr, y = nullptr;
    cudnnFilterDescriptor_t filter = nullptr;
    cudnnConvolutionDescriptor_t convolution = nullptr;
    std::size_t workspace_bytes = 0;

    ~Convolution() {
        cudnnDestroyTensorDescriptor(x);
        cudnnDestroyTensorDescriptor(y);
        cudnnDestroyFilterDescriptor(filter);
        cudnnDestroyConvolutionDescriptor(convolution);
        cudnnDestroy(handle);
    }

    cudnnStatus_t prepare() {
        cudnnCreate(&handle);
        cudnnCreateTensorDescriptor(&x);
        cudnnCreateTensorDescriptor(&y);
        cudnnCreateFilterDescriptor(&filter);
        cudnnCreateConvolutionDescriptor(&convolution);
        cudnnStatus_t worst = CUDNN_STATUS_SUCCESS;
        for (const cudnnStatus_t status :
             {cudnnSetTensor4dDescriptor(x, CUDNN_TENSOR_NCHW, type, n, c, h, w),
              cudnnSetTensor4dDescriptor(y, CUDNN_TENSOR_NCHW, type, n, filters, out, out),
              cudnnSetFilter4dDescriptor(filter, type, CUDNN_TENSOR_NCHW, filters, filter_channels, kernel,
                                         kernel),
              cudnnSetConvolution2dDescriptor(convolution, padding, padding, stride, stride, dilation,
                                              dilation, CUDNN_CROSS_CORRELATION, compute),
              cudnnSetConvolutionGroupCount(convolution, groups),
              cudnnSetConvolutionMathType(convolution, math)})
            if (status != CUDNN_STATUS_SUCCESS) worst = status;
        if (worst != CUDNN_STATUS_SUCCESS) return worst;
        return cudnnGetConvolutionForwardWorkspaceSize(handle, x, filter, convolution, y,
                                                       CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM,
                                                       &workspace_bytes);
    }

    cudnnStatus_t run(const float* x_data, const float* w_data, float* y_data, void* workspace,
                      std::size_t bytes) {
        const float one = 1.0F, zero = 0.0F;
        return cudnnConvolutionForward(handle, &one, x, x_data, filter, w_data, convolution,
                                       CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, workspace, bytes,
                                       &zero, y, y_data);
    }
};

void expect_refusal(cudnnStatus_t status, const std::string& reason,
                    const std::function<void(Convolution&)>& spoil) {
    Convolution convolution;
    spoil(convolution);
    CHECK(convolution.prepare() == status);
    CAPTURE(emulator::last_library_refusal());
    CHECK(refused_because(reason));
}

}  // namespace

TEST_CASE("cuDNN double: refuses bad descriptors") {
    const auto bad = CUDNN_STATUS_BAD_PARAM, unsupported = CUDNN_STATUS_NOT_SUPPORTED;
    expect_refusal(bad, "y has 4 places", [](Convolution& p) { p.out = 4; });
    expect_refusal(bad, "channels", [](Convolution& p) { p.filter_channels = 4; });
    expect_refusal(bad, "divide", [](Convolution& p) {
        p.filters = 5;
        p.groups = 2;
    });
    expect_refusal(bad, "padding", [](Convolution& p) { p.padding = -1; });
    expect_refusal(bad, "stride", [](Convolution& p) { p.stride = 0; });
    expect_refusal(bad, "dilation", [](Convolution& p) { p.dilation = 0; });
    expect_refusal(bad, "groups", [](Convolution& p) { p.groups = 0; });
    expect_refusal(bad, "size is not positive", [](Convolution& p) { p.n = 0; });
    expect_refusal(unsupported, "2^31", [](Convolution& p) {
        p.n = 65536;
        p.c = 65536;
    });
    expect_refusal(unsupported, "configuration", [](Convolution& p) { p.compute = CUDNN_DATA_DOUBLE; });
    expect_refusal(unsupported, "configuration", [](Convolution& p) { p.type = CUDNN_DATA_DOUBLE; });
}

TEST_CASE("cuDNN double: computes, and refuses too small a workspace, NULL, and what is not alive") {
    Convolution convolution;
    REQUIRE(convolution.prepare() == CUDNN_STATUS_SUCCESS);
    const std::size_t bytes = convolution.workspace_bytes;
    REQUIRE(bytes > 0);
    DeviceMemory x(2 * 4 * 25), w(6 * 2 * 9), y(2 * 6 * 25, false),
        workspace(static_cast<std::int64_t>(bytes));
    CHECK(convolution.run(x.get(), w.get(), y.get(), workspace.get(), bytes) == CUDNN_STATUS_SUCCESS);
    CHECK(y.read(300)[6] == 18.0F);  // 2 channels of 3 x 3 ones
    CHECK(y.read(300)[0] == 8.0F);   // in the corner 2 x 2 of them
    CHECK(convolution.run(x.get(), w.get(), y.get(), workspace.get(), bytes - 1) == CUDNN_STATUS_BAD_PARAM);
    CHECK(refused_because("needs a workspace"));
    CHECK(convolution.run(x.get(), w.get(), y.get(), nullptr, bytes) == CUDNN_STATUS_BAD_PARAM);
    CHECK(convolution.run(nullptr, w.get(), y.get(), workspace.get(), bytes) == CUDNN_STATUS_BAD_PARAM);
    w.free();
    CHECK(convolution.run(x.get(), w.get(), y.get(), workspace.get(), bytes) ==
          CUDNN_STATUS_EXECUTION_FAILED);
    const auto faults = emulator::take_faults();
    REQUIRE(!faults.empty());
    CHECK(faults.front().kind == emulator::FaultKind::use_after_free);
    cudnnDestroyTensorDescriptor(convolution.x);
    CHECK(convolution.run(x.get(), w.get(), y.get(), workspace.get(), bytes) == CUDNN_STATUS_BAD_PARAM);
    CHECK(refused_because("never created, or was destroyed"));
}

TEST_CASE("cuDNN double: refuses an index or a comparison that is computed in f32") {
    // A graph of only the pointwise operation: (1, 1, 4, 4) -> (1, 1, 4, 4).
    const auto finalize_graph = [](cudnnPointwiseMode_t mode, cudnnDataType_t math) {
        std::vector<cudnnBackendDescriptor_t> made;
        const auto create = [&](cudnnBackendDescriptorType_t kind) {
            cudnnBackendDescriptor_t handle = nullptr;
            REQUIRE(cudnnBackendCreateDescriptor(kind, &handle) == CUDNN_STATUS_SUCCESS);
            made.push_back(handle);
            return handle;
        };
        const auto set = [](cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, const void* values, std::int64_t count = 1) {
            REQUIRE(cudnnBackendSetAttribute(descriptor, name, type, count, values) == CUDNN_STATUS_SUCCESS);
        };
        const auto tensor = [&](std::int64_t id, cudnnDataType_t type) {
            const std::int64_t sizes[] = {1, 1, 4, 4}, strides[] = {16, 16, 4, 1}, alignment = 16;
            const cudnnBackendDescriptor_t x = create(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
            set(x, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &id);
            set(x, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
            set(x, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes, 4);
            set(x, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides, 4);
            set(x, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &alignment);
            REQUIRE(cudnnBackendFinalize(x) == CUDNN_STATUS_SUCCESS);
            return x;
        };
        const bool is_index = mode == CUDNN_POINTWISE_GEN_INDEX;
        const cudnnBackendDescriptor_t a = tensor(1, CUDNN_DATA_FLOAT), b = tensor(2, CUDNN_DATA_FLOAT),
                                       y = tensor(3, is_index ? CUDNN_DATA_INT32 : CUDNN_DATA_BOOLEAN);
        const cudnnBackendDescriptor_t parameters = create(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
        const std::int64_t axis = 2;
        set(parameters, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
        set(parameters, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &math);
        if (is_index) set(parameters, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &axis);
        REQUIRE(cudnnBackendFinalize(parameters) == CUDNN_STATUS_SUCCESS);
        const cudnnBackendDescriptor_t operation = create(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
        const auto part = CUDNN_TYPE_BACKEND_DESCRIPTOR;
        set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, part, &parameters);
        set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, part, &a);
        if (!is_index) set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, part, &b);
        set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, part, &y);
        REQUIRE(cudnnBackendFinalize(operation) == CUDNN_STATUS_SUCCESS);
        const cudnnBackendDescriptor_t graph = create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, part, &operation);
        const cudnnStatus_t status = cudnnBackendFinalize(graph);
        for (auto each = made.rbegin(); each != made.rend(); ++each) cudnnBackendDestroyDescriptor(*each);
        return status;
    };
    CHECK(finalize_graph(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32) == CUDNN_STATUS_SUCCESS);
    CHECK(finalize_graph(CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN) == CUDNN_STATUS_SUCCESS);
    for (const cudnnPointwiseMode_t mode : {CUDNN_POINTWISE_GEN_INDEX, CUDNN_POINTWISE_CMP_GE}) {
        CHECK(finalize_graph(mode, CUDNN_DATA_FLOAT) == CUDNN_STATUS_BAD_PARAM);
        CHECK(refused_because("computes in the wrong type"));
    }
}

TEST_CASE("cuDNN double: refuses a handle that another thread created") {
    Convolution convolution;
    REQUIRE(convolution.prepare() == CUDNN_STATUS_SUCCESS);
    DeviceMemory x(2 * 4 * 25), w(6 * 2 * 9), y(2 * 6 * 25, false), workspace(4096);
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS, of_stream = CUDNN_STATUS_SUCCESS;
    std::string reason;
    std::thread([&] {
        of_stream = cudnnSetStream(convolution.handle, nullptr);
        status = convolution.run(x.get(), w.get(), y.get(), workspace.get(), convolution.workspace_bytes);
        reason = emulator::last_library_refusal();
    }).join();
    CHECK(of_stream == CUDNN_STATUS_BAD_PARAM);
    CHECK(status == CUDNN_STATUS_BAD_PARAM);
    CHECK(reason.find("another thread") != std::string::npos);
}

TEST_CASE("cuDNN double: rounds f32 to TF32 unless the math type forbids it") {
    const float value = 1.0F + std::ldexp(1.0F, -20);
    for (const cudnnMathType_t math : {CUDNN_FMA_MATH, CUDNN_DEFAULT_MATH}) {
        Convolution convolution;
        convolution.n = convolution.c = convolution.filters = convolution.groups =
            convolution.filter_channels = 1;
        convolution.kernel = 1;
        convolution.padding = 0;
        convolution.math = math;
        REQUIRE(convolution.prepare() == CUDNN_STATUS_SUCCESS);
        DeviceMemory x(25), w(1), y(25, false), workspace(64);
        REQUIRE(cudaMemcpy(w.get(), &value, sizeof(value), cudaMemcpyHostToDevice) == cudaSuccess);
        REQUIRE(convolution.run(x.get(), w.get(), y.get(), workspace.get(), 256) == CUDNN_STATUS_SUCCESS);
        CHECK(y.read(25)[3] == (math == CUDNN_FMA_MATH ? value : 1.0F));
    }
}

}  // namespace potluck::test
