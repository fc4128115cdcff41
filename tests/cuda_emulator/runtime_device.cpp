// The CUDA runtime: devices and errors.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/runtime.h"
#include "tests/cuda_emulator/static_shared.h"

namespace potluck::emulator {
namespace {

thread_local int selected_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int multiprocessors = 4;

}  // namespace

int current_device() {
    // The number of devices may have been reduced since.
    return is_device(selected_device) ? selected_device : 0;
}

cudaError_t finish(cudaError_t status) {
    if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
    return status;
}

cudaError_t device_error() {
    if (state().devices.empty()) return cudaErrorNoDevice;
    return device(current_device()).sticky;
}

void host_waits(const Clock& clock, int device_index) {
    join(state().host_clock, clock);
    state().pinned.host_waited();
    EmulatedDevice& waited = device(device_index);
    for (CUmemPoolHandle_st* pool : state().pools)
        if (pool->device == device_index) waited.memory.trim(*pool, pool->release_threshold);
    waited.memory.trim(waited.default_pool, waited.default_pool.release_threshold);
}

void wait_for_device(int device_index) {
    Clock clock = device(device_index).legacy_stream.clock;
    for (const CUstream_st* stream : state().streams)
        if (stream->device == device_index) join(clock, stream->clock);
    host_waits(clock, device_index);
}

}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    if (count == nullptr) return finish(cudaErrorInvalidValue);
    *count = devices();
    return *count == 0 ? finish(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int index) {
    const std::lock_guard lock(state().mutex);
    if (!is_device(index)) return finish(cudaErrorInvalidDevice);
    selected_device = index;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* index) {
    if (index == nullptr) return finish(cudaErrorInvalidValue);
    if (state().devices.empty()) return finish(cudaErrorNoDevice);
    *index = current_device();
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
    if (properties == nullptr) return finish(cudaErrorInvalidValue);
    if (!is_device(index)) return finish(cudaErrorInvalidDevice);
    *properties = cudaDeviceProp{};
    std::snprintf(properties->name, sizeof(properties->name), "Potluck emulator");
    properties->totalGlobalMem = device(index).memory.total_bytes();
    properties->sharedMemPerBlock = std::size_t{48} << 10;
    properties->sharedMemPerBlockOptin = state().card.most_shared_bytes;
    properties->sharedMemPerMultiprocessor = state().card.most_shared_bytes + (std::size_t{1} << 10);
    properties->reservedSharedMemPerBlock = std::size_t{1} << 10;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->warpSize = static_cast<int>(lanes);
    properties->maxThreadsPerBlock = static_cast<int>(most_threads);
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = 65535;
    properties->maxGridSize[2] = 65535;
    properties->totalConstMem = std::size_t{64} << 10;
    properties->memPitch = 2147483647;
    properties->textureAlignment = 512;
    properties->major = state().card.capability / 10;
    properties->minor = state().card.capability % 10;
    properties->multiProcessorCount = multiprocessors;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 64;
    properties->asyncEngineCount = 1;
    properties->unifiedAddressing = 1;
    properties->canMapHostMemory = 1;
    properties->concurrentKernels = 1;
    properties->memoryPoolsSupported = state().has_memory_pools ? 1 : 0;
    properties->pciDeviceID = index;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
    if (value == nullptr) return finish(cudaErrorInvalidValue);
    if (!is_device(index)) return finish(cudaErrorInvalidDevice);
    cudaDeviceProp properties;
    if (const cudaError_t status = cudaGetDeviceProperties(&properties, index); status != cudaSuccess)
        return status;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            *value = properties.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = properties.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = static_cast<int>(properties.sharedMemPerBlock);
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(properties.sharedMemPerBlockOptin);
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
            break;
        case cudaDevAttrMaxRegistersPerBlock:
            *value = properties.regsPerBlock;
            break;
        case cudaDevAttrWarpSize:
            *value = properties.warpSize;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = properties.multiProcessorCount;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = properties.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = properties.minor;
            break;
        case cudaDevAttrL2CacheSize:
            *value = properties.l2CacheSize;
            break;
        case cudaDevAttrGlobalMemoryBusWidth:
            *value = properties.memoryBusWidth;
            break;
        case cudaDevAttrMemoryPoolsSupported:
            *value = properties.memoryPoolsSupported;
            break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCanMapHostMemory:
        case cudaDevAttrConcurrentKernels:
            *value = 1;
            break;
        case cudaDevAttrClockRate:
        case cudaDevAttrMemoryClockRate:
            *value = 1'000'000;  // kHz: an arbitrary round number
            break;
        case cudaDevAttrIntegrated:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrPageableMemoryAccess:
        case cudaDevAttrCooperativeLaunch:
            *value = 0;
            break;
        default:
            return finish(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    if (version == nullptr) return finish(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceSynchronize() {
    const std::lock_guard lock(state().mutex);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    if (capture_forbids()) return finish(cudaErrorStreamCaptureUnsupported);
    ++state().host_waits;
    wait_for_device(current_device());
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int index) {
    if (text == nullptr || length < 13) return finish(cudaErrorInvalidValue);
    if (!is_device(index)) return finish(cudaErrorInvalidDevice);
    std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0",
                  static_cast<unsigned>(index) & 0xffu);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int index, int peer) {
    if (can == nullptr) return finish(cudaErrorInvalidValue);
    if (!is_device(index) || !is_device(peer)) return finish(cudaErrorInvalidDevice);
    *can = state().has_peers && index != peer ? 1 : 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t status = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return status;
}

cudaError_t cudaPeekAtLastError() {
    const std::lock_guard lock(state().mutex);
    if (!state().devices.empty() && device(current_device()).sticky != cudaSuccess)
        return device(current_device()).sticky;
    return last_error;
}

const char* cudaGetErrorName(cudaError_t status) {
    switch (status) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidMemcpyDirection:
            return "cudaErrorInvalidMemcpyDirection";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle:
            return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorIllegalAddress:
            return "cudaErrorIllegalAddress";
        case cudaErrorMisalignedAddress:
            return "cudaErrorMisalignedAddress";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        case cudaErrorNotSupported:
            return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated:
            return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureUnjoined:
            return "cudaErrorStreamCaptureUnjoined";
        case cudaErrorStreamCaptureUnmatched:
            return "cudaErrorStreamCaptureUnmatched";
        case cudaErrorStreamCaptureImplicit:
            return "cudaErrorStreamCaptureImplicit";
        case cudaErrorStreamCaptureMerge:
            return "cudaErrorStreamCaptureMerge";
        case cudaErrorCapturedEvent:
            return "cudaErrorCapturedEvent";
        case cudaErrorIllegalState:
            return "cudaErrorIllegalState";
        default:
            return "unrecognized error code";
    }
}

const char* cudaGetErrorString(cudaError_t status) {
    switch (status) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidConfiguration:
            return "invalid configuration argument";
        case cudaErrorInvalidMemcpyDirection:
            return "invalid copy direction for memcpy";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle:
            return "invalid resource handle";
        case cudaErrorNotReady:
            return "device not ready";
        case cudaErrorIllegalAddress:
            return "an illegal memory access was encountered";
        case cudaErrorMisalignedAddress:
            return "misaligned address";
        case cudaErrorLaunchFailure:
            return "unspecified launch failure";
        case cudaErrorNotSupported:
            return "operation not supported";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined:
            return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureUnmatched:
            return "the capture was not started in this stream";
        case cudaErrorStreamCaptureImplicit:
            return "a dependency on the legacy stream is not allowed while capturing";
        case cudaErrorStreamCaptureMerge:
            return "the operation would merge two separate captures";
        case cudaErrorCapturedEvent:
            return "operation not permitted on an event last recorded in a capturing stream";
        default:
            return "unrecognized error code";
    }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    const std::lock_guard lock(state().mutex);
    if (attributes == nullptr) return finish(cudaErrorInvalidValue);
    if (kernel == nullptr) return finish(cudaErrorInvalidDeviceFunction);
    *attributes = cudaFuncAttributes{};
    attributes->sharedSizeBytes = static_shared_bytes(kernel);
    attributes->maxThreadsPerBlock = static_cast<int>(most_threads);
    const auto raised = state().shared_limits.find(kernel);
    attributes->maxDynamicSharedSizeBytes = raised != state().shared_limits.end()
                                                ? raised->second
                                                : (48 << 10) - static_cast<int>(attributes->sharedSizeBytes);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    const std::lock_guard lock(state().mutex);
    if (kernel == nullptr) return finish(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
        return value >= -1 && value <= 100 ? cudaSuccess : finish(cudaErrorInvalidValue);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        static_cast<std::size_t>(value) + static_shared_bytes(kernel) > state().card.most_shared_bytes)
        return finish(cudaErrorInvalidValue);
    state().shared_limits[kernel] = value;
    return cudaSuccess;
}
}
