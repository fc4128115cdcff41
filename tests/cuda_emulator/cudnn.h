#pragma once

// The objects behind the handles of the real header in the double of cuDNN. The header declares the structures outside
// any namespace, and the library defines them.

#include <cudnn.h>

#include <array>
#include <cstdint>

struct cudnnContext {
    int device = 0;
    cudaStream_t stream = nullptr;
};
struct cudnnTensorStruct {
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    std::array<std::int64_t, 4> size{};  // n c h w; contiguous
};
struct cudnnFilterStruct {
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    std::array<std::int64_t, 4> size{};  // k c h w
};
struct cudnnConvolutionStruct {
    std::array<std::int64_t, 2> padding{}, stride{}, dilation{};
    cudnnConvolutionMode_t mode = CUDNN_CONVOLUTION;
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnMathType_t math = CUDNN_DEFAULT_MATH;
    std::int64_t groups = 1;
};

namespace potluck::emulator {

inline constexpr const char* cudnn_handle_kind = "cudnn handle";
inline constexpr const char* cudnn_tensor_kind = "cudnn tensor descriptor";
inline constexpr const char* cudnn_filter_kind = "cudnn filter descriptor";
inline constexpr const char* cudnn_convolution_kind = "cudnn convolution descriptor";

std::int64_t bytes_of(cudnnDataType_t type);
inline std::int64_t count_of(const std::array<std::int64_t, 4>& size) {
    return size[0] * size[1] * size[2] * size[3];
}

}  // namespace potluck::emulator
