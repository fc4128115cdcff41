#include "cuda/convolution_plan.h"

#include <limits>

#include "cuda/library_check.h"

namespace potluck::cuda {
namespace {

// Deterministic algorithms that compute a plain sum of products: the others either add atomically (0 of both gradients,
// 3 of the weight's) or use FFT or Winograd transforms, which cost several bits of the result.
constexpr auto data_algorithm = CUDNN_CONVOLUTION_BWD_DATA_ALGO_1;
constexpr auto weight_algorithm = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1;

constexpr std::size_t most_workspace_bytes = std::size_t{1} << 30;

cudnnDataType_t data_type(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return CUDNN_DATA_DOUBLE;
        case DType::f16:
            return CUDNN_DATA_HALF;
        case DType::bf16:
            return CUDNN_DATA_BFLOAT16;
        default:
            return CUDNN_DATA_FLOAT;
    }
}

/// f32 keeps full precision (CUDNN_DEFAULT_MATH would permit TF32 since compute capability 8.0); half types may use
/// tensor cores, which multiply them exactly.
cudnnMathType_t math_type(const ConvolutionShape& shape) {
    switch (shape.dtype) {
        case DType::f32:
            return shape.tf32 ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH;
        case DType::f64:
            return CUDNN_DEFAULT_MATH;
        default:
            return CUDNN_TENSOR_OP_MATH;
    }
}

/// The library stores sizes as int and allows at most 2^31 elements per tensor.
bool fits(const std::array<std::int64_t, 4>& sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes) {
        if (size == 0 || size > std::numeric_limits<int>::max() / product) return false;
        product *= size;
    }
    return true;
}

std::array<int, 4> as_int(const std::array<std::int64_t, 4>& sizes) {
    return {static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2]),
            static_cast<int>(sizes[3])};
}

TensorDescriptor tensor_descriptor(DType dtype, const std::array<std::int64_t, 4>& sizes) {
    cudnnTensorDescriptor_t handle = nullptr;
    check(cudnnCreateTensorDescriptor(&handle), "cudnnCreateTensorDescriptor");
    TensorDescriptor made(handle);
    const auto [n, c, h, w] = as_int(sizes);
    check(cudnnSetTensor4dDescriptor(handle, CUDNN_TENSOR_NCHW, data_type(dtype), n, c, h, w),
          "cudnnSetTensor4dDescriptor");
    return made;
}

FilterDescriptor filter_descriptor(DType dtype, const std::array<std::int64_t, 4>& sizes) {
    cudnnFilterDescriptor_t handle = nullptr;
    check(cudnnCreateFilterDescriptor(&handle), "cudnnCreateFilterDescriptor");
    FilterDescriptor made(handle);
    const auto [k, c, h, w] = as_int(sizes);
    check(cudnnSetFilter4dDescriptor(handle, data_type(dtype), CUDNN_TENSOR_NCHW, k, c, h, w),
          "cudnnSetFilter4dDescriptor");
    return made;
}

ConvolutionDescriptor convolution_descriptor(const ConvolutionShape& shape) {
    cudnnConvolutionDescriptor_t handle = nullptr;
    check(cudnnCreateConvolutionDescriptor(&handle), "cudnnCreateConvolutionDescriptor");
    ConvolutionDescriptor made(handle);
    // The "convolution" of neural networks is a cross-correlation: the filter is not flipped.
    check(cudnnSetConvolution2dDescriptor(
              handle, static_cast<int>(shape.padding[0]), static_cast<int>(shape.padding[1]),
              static_cast<int>(shape.stride[0]), static_cast<int>(shape.stride[1]),
              static_cast<int>(shape.dilation[0]), static_cast<int>(shape.dilation[1]),
              CUDNN_CROSS_CORRELATION, shape.dtype == DType::f64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT),
          "cudnnSetConvolution2dDescriptor");
    check(cudnnSetConvolutionGroupCount(handle, static_cast<int>(shape.groups)),
          "cudnnSetConvolutionGroupCount");
    check(cudnnSetConvolutionMathType(handle, math_type(shape)), "cudnnSetConvolutionMathType");
    return made;
}

}  // namespace

ConvolutionPlan::ConvolutionPlan(cudnnHandle_t library, const ConvolutionShape& shape)
    : pass_(shape.pass), dtype_(shape.dtype) {
    if (!fits(shape.x) || !fits(shape.weight) || !fits(shape.y)) return;
    for (int axis = 0; axis < 2; ++axis)
        for (const auto& numbers : {shape.stride, shape.padding, shape.dilation})
            if (numbers[static_cast<std::size_t>(axis)] > std::numeric_limits<int>::max()) return;
    x_ = tensor_descriptor(shape.dtype, shape.x);
    y_ = tensor_descriptor(shape.dtype, shape.y);
    weight_ = filter_descriptor(shape.dtype, shape.weight);
    convolution_ = convolution_descriptor(shape);
    exists_ = find_algorithm(library);
}

bool ConvolutionPlan::find_algorithm(cudnnHandle_t library) {
    const auto usable = [&](cudnnStatus_t status, const char* call) {
        if (status == CUDNN_STATUS_SUCCESS) return workspace_bytes_ <= most_workspace_bytes;
        if (CUDNN_STATUS_CATEGORY(status) != CUDNN_STATUS_NOT_SUPPORTED) check(status, call);
        return false;
    };
    switch (pass_) {
        case ConvolutionPass::forward:
            for (const auto algorithm : {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM,
                                         CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM}) {
                forward_ = algorithm;
                if (usable(cudnnGetConvolutionForwardWorkspaceSize(library, x_.get(), weight_.get(),
                                                                   convolution_.get(), y_.get(), algorithm,
                                                                   &workspace_bytes_),
                           "cudnnGetConvolutionForwardWorkspaceSize"))
                    return true;
            }
            return false;
        case ConvolutionPass::data_gradient:
            return usable(cudnnGetConvolutionBackwardDataWorkspaceSize(library, weight_.get(), y_.get(),
                                                                       convolution_.get(), x_.get(),
                                                                       data_algorithm, &workspace_bytes_),
                          "cudnnGetConvolutionBackwardDataWorkspaceSize");
        case ConvolutionPass::weight_gradient:
            break;
    }
    return usable(
        cudnnGetConvolutionBackwardFilterWorkspaceSize(library, x_.get(), y_.get(), convolution_.get(),
                                                       weight_.get(), weight_algorithm, &workspace_bytes_),
        "cudnnGetConvolutionBackwardFilterWorkspaceSize");
}

bool ConvolutionPlan::run(cudnnHandle_t library, void* x, void* weight, void* y, bool accumulate,
                          void* workspace) const {
    // In the type of the computation.
    const double one = 1.0, zero = 0.0;
    const float one_f32 = 1.0F, zero_f32 = 0.0F;
    const bool is_f64 = dtype_ == DType::f64;
    const void* alpha = is_f64 ? static_cast<const void*>(&one) : &one_f32;
    const void* none = is_f64 ? static_cast<const void*>(&zero) : &zero_f32;
    const void* beta = accumulate ? alpha : none;
    const auto done = [](cudnnStatus_t status, const char* call) {
        if (CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED) return false;
        check(status, call);
        return true;
    };
    switch (pass_) {
        case ConvolutionPass::forward:
            return done(cudnnConvolutionForward(library, alpha, x_.get(), x, weight_.get(), weight,
                                                convolution_.get(), forward_, workspace, workspace_bytes_,
                                                beta, y_.get(), y),
                        "cudnnConvolutionForward");
        case ConvolutionPass::data_gradient:
            return done(cudnnConvolutionBackwardData(library, alpha, weight_.get(), weight, y_.get(), y,
                                                     convolution_.get(), data_algorithm, workspace,
                                                     workspace_bytes_, beta, x_.get(), x),
                        "cudnnConvolutionBackwardData");
        case ConvolutionPass::weight_gradient:
            break;
    }
    return done(cudnnConvolutionBackwardFilter(library, alpha, x_.get(), x, y_.get(), y, convolution_.get(),
                                               weight_algorithm, workspace, workspace_bytes_, beta,
                                               weight_.get(), weight),
                "cudnnConvolutionBackwardFilter");
}

}  // namespace potluck::cuda
