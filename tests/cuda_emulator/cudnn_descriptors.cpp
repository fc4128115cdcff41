// The double of cuDNN: handles and descriptors, according to the reference of cuDNN 9 (libraries cudnn_graph, cudnn_ops
// and cudnn_cnn). Every refusal is CUDNN_STATUS_BAD_PARAM or CUDNN_STATUS_NOT_SUPPORTED: which of the finer codes of
// version 9 a call returns is not documented, and callers should check only the category.

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/cuda_emulator/cudnn.h"
#include "tests/cuda_emulator/library_refusal.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {

std::int64_t bytes_of(cudnnDataType_t type) {
    switch (type) {
        case CUDNN_DATA_DOUBLE:
            return 8;
        case CUDNN_DATA_FLOAT:
            return 4;
        case CUDNN_DATA_HALF:
        case CUDNN_DATA_BFLOAT16:
            return 2;
        default:
            return 1;
    }
}

namespace {

template <class Object>
cudnnStatus_t create(Object** place, const char* kind) {
    if (place == nullptr) return refused(CUDNN_STATUS_BAD_PARAM, std::string("no place for the ") + kind);
    *place = new Object;
    library_object_created(*place, kind);
    return CUDNN_STATUS_SUCCESS;
}

template <class Object>
cudnnStatus_t destroy(Object* object, const char* kind) {
    if (!library_object_destroyed(object, kind))
        return refused(CUDNN_STATUS_BAD_PARAM,
                       std::string("the ") + kind + " was never created, or was destroyed");
    delete object;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t must_live(const void* object, const char* kind) {
    if (!is_library_object(object, kind))
        return refused(CUDNN_STATUS_BAD_PARAM,
                       std::string("the ") + kind + " was never created, or was destroyed");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t set_sizes(std::array<std::int64_t, 4>& place, int a, int b, int c, int d) {
    if (a <= 0 || b <= 0 || c <= 0 || d <= 0)
        return refused(CUDNN_STATUS_BAD_PARAM, "a size is not positive");
    // cudnnSetTensor4dDescriptor(): "the total size of a tensor, including the potential padding between dimensions, is
    // limited to 2 Giga-elements". (Tried with cuDNN 9.19: 2^31 elements are refused.)
    const std::array<std::int64_t, 4> size{a, b, c, d};
    std::int64_t count = 1;
    for (const std::int64_t each : size) {
        count *= each;
        if (count >= std::int64_t{1} << 31)
            return refused(CUDNN_STATUS_NOT_SUPPORTED, "a tensor of 2^31 elements or more");
    }
    place = size;
    return CUDNN_STATUS_SUCCESS;
}

bool is_floating(cudnnDataType_t type) {
    return type == CUDNN_DATA_DOUBLE || type == CUDNN_DATA_FLOAT || type == CUDNN_DATA_HALF ||
           type == CUDNN_DATA_BFLOAT16;
}

}  // namespace
}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }

const char* cudnnGetErrorString(cudnnStatus_t status) {
    switch (CUDNN_STATUS_CATEGORY(status)) {
        case CUDNN_STATUS_SUCCESS:
            return "CUDNN_STATUS_SUCCESS";
        case CUDNN_STATUS_BAD_PARAM:
            return "CUDNN_STATUS_BAD_PARAM";
        case CUDNN_STATUS_NOT_SUPPORTED:
            return "CUDNN_STATUS_NOT_SUPPORTED";
        case CUDNN_STATUS_EXECUTION_FAILED:
            return "CUDNN_STATUS_EXECUTION_FAILED";
        default:
            return "a status that this double never returns";
    }
}

void cudnnGetLastErrorString(char* message, size_t max_size) {
    if (message == nullptr || max_size == 0) return;
    const std::string text = last_library_refusal();
    const std::size_t length = std::min(max_size - 1, text.size());
    std::memcpy(message, text.data(), length);
    message[length] = '\0';
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    const cudnnStatus_t status = create(handle, cudnn_handle_kind);
    if (status == CUDNN_STATUS_SUCCESS) cudaGetDevice(&(*handle)->device);
    return status;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return destroy(handle, cudnn_handle_kind); }

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    if (const cudnnStatus_t status = must_live(handle, cudnn_handle_kind); status != CUDNN_STATUS_SUCCESS)
        return status;
    if (!is_handle_of_this_thread(handle)) return refused(CUDNN_STATUS_BAD_PARAM, handle_of_another_thread);
    // cudnnSetStream(): "mismatch between the user stream and the cuDNN handle context".
    if (device_of_stream(stream) != handle->device)
        return refused(CUDNN_STATUS_BAD_PARAM,
                       "the stream is one of device " + std::to_string(device_of_stream(stream)) +
                           ", the handle of device " + std::to_string(handle->device));
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* descriptor) {
    return create(descriptor, cudnn_tensor_kind);
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t descriptor) {
    return destroy(descriptor, cudnn_tensor_kind);
}
cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t descriptor, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w) {
    if (const cudnnStatus_t status = must_live(descriptor, cudnn_tensor_kind); status != CUDNN_STATUS_SUCCESS)
        return status;
    if (format != CUDNN_TENSOR_NCHW || !is_floating(type))
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "this double knows floating tensors in the order n c h w only");
    descriptor->type = type;
    return set_sizes(descriptor->size, n, c, h, w);
}

cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* descriptor) {
    return create(descriptor, cudnn_filter_kind);
}
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t descriptor) {
    return destroy(descriptor, cudnn_filter_kind);
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t descriptor, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w) {
    if (const cudnnStatus_t status = must_live(descriptor, cudnn_filter_kind); status != CUDNN_STATUS_SUCCESS)
        return status;
    if (format != CUDNN_TENSOR_NCHW || !is_floating(type))
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "this double knows floating filters in the order k c h w only");
    descriptor->type = type;
    return set_sizes(descriptor->size, k, c, h, w);
}

cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* descriptor) {
    return create(descriptor, cudnn_convolution_kind);
}
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t descriptor) {
    return destroy(descriptor, cudnn_convolution_kind);
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t descriptor, int pad_h, int pad_w,
                                              int u, int v, int dilation_h, int dilation_w,
                                              cudnnConvolutionMode_t mode, cudnnDataType_t compute) {
    if (const cudnnStatus_t status = must_live(descriptor, cudnn_convolution_kind);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    if (pad_h < 0 || pad_w < 0) return refused(CUDNN_STATUS_BAD_PARAM, "a padding is negative");
    if (u <= 0 || v <= 0) return refused(CUDNN_STATUS_BAD_PARAM, "a stride is not positive");
    if (dilation_h <= 0 || dilation_w <= 0)
        return refused(CUDNN_STATUS_BAD_PARAM, "a dilation is not positive");
    descriptor->padding = {pad_h, pad_w};
    descriptor->stride = {u, v};
    descriptor->dilation = {dilation_h, dilation_w};
    descriptor->mode = mode;
    descriptor->compute = compute;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t descriptor, int groups) {
    if (const cudnnStatus_t status = must_live(descriptor, cudnn_convolution_kind);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    if (groups <= 0) return refused(CUDNN_STATUS_BAD_PARAM, "the number of groups is not positive");
    descriptor->groups = groups;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t descriptor, cudnnMathType_t math) {
    if (const cudnnStatus_t status = must_live(descriptor, cudnn_convolution_kind);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    if (math < CUDNN_DEFAULT_MATH || math > CUDNN_FMA_MATH)
        return refused(CUDNN_STATUS_BAD_PARAM, "no such math type");
    descriptor->math = math;
    return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
