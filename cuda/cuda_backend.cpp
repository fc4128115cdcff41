#include "cuda/cuda_backend.h"

#include "core/error.h"
#include "core/format.h"
#include "cuda/recording.h"
#include "cuda/resources.h"

namespace potluck {

using cuda::check;

CudaBackend::CudaBackend(int index) : index_(index) {
    check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, index),
          "cudaDeviceGetAttribute");
}

CudaBackend::~CudaBackend() = default;

namespace {

/// The device on which this thread is recording work, or nullptr.
thread_local const CudaBackend* recording_device = nullptr;

/// Throws Error unless the device has memory pools, from which all memory is allocated.
void require_memory_pools(int index) {
    int supported = 0;
    check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, index),
          "cudaDeviceGetAttribute");
    if (supported == 0)
        throw Error(
            "cuda",
            fmt::format("cuda:{} has no memory pools (cudaMallocAsync), from which all memory is taken. "
                        "A driver for CUDA 11.2 or later offers them, unless the GPU is shared in a mode "
                        "(vGPU, MPS) that forbids them.",
                        index));
}

}  // namespace

void CudaBackend::note_recording(bool begins) { recording_device = begins ? this : nullptr; }

CudaBackend::Resources::Resources(int index) {
    require_memory_pools(index);
    check(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
    // Freed blocks stay in the pool: by default every synchronisation would return them to the system.
    std::uint64_t everything = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything),
          "cudaMemPoolSetAttribute");
}

CudaBackend::Resources& CudaBackend::resources() {
    std::call_once(opened_, [&] { resources_ = std::make_unique<Resources>(index_); });
    return *resources_;
}

cudaStream_t CudaBackend::stream() {
    if (recording_device != nullptr && recording_device != this)
        throw Error(
            OpScope::current(),
            fmt::format(
                "this thread records work of cuda:{}, and the op runs on cuda:{}: a replay would not do "
                "it again. Record the work of one device at a time.",
                recording_device->index_, index_));
    check(cudaSetDevice(index_), "cudaSetDevice");
    return is_capturing() ? resources().capture_stream.get() : resources().stream.get();
}

cublasLtHandle_t CudaBackend::cublas() {
    cublasLtHandle_t& handle = resources().handles_of_this_thread().cublas;
    if (handle == nullptr && cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS)
        throw Error(OpScope::current(), fmt::format("cublasLtCreate failed on cuda:{}.", index_));
    return handle;
}

cudnnHandle_t CudaBackend::cudnn() {
    const cudaStream_t queue = stream();
    cudnnHandle_t& handle = resources().handles_of_this_thread().cudnn;
    if (handle == nullptr) {
        if (const cudnnStatus_t status = cudnnCreate(&handle); status != CUDNN_STATUS_SUCCESS)
            throw Error(OpScope::current(), fmt::format("cudnnCreate failed on cuda:{}: {}.", index_,
                                                        cudnnGetErrorString(status)));
    }
    if (const cudnnStatus_t status = cudnnSetStream(handle, queue); status != CUDNN_STATUS_SUCCESS)
        throw Error(OpScope::current(),
                    fmt::format("cudnnSetStream failed: {}.", cudnnGetErrorString(status)));
    return handle;
}

void CudaBackend::synchronize() {
    if (is_capturing())
        throw Error(OpScope::current(), "nothing can be waited for while work is being recorded.");
    const bool checks = start_fault_check();
    const cudaStream_t compute = stream();
    for (Resources::SideStream* side : {&resources().communication_stream, &resources().copy_stream}) {
        if (!side->is_made()) continue;
        const cuda::Event end;
        end.record(side->get());
        end.block(compute);  // so that the host waits only once
    }
    check(cudaStreamSynchronize(compute), "cudaStreamSynchronize");
    check(cudaGetLastError(), "an earlier kernel");
    if (checks) finish_fault_check();
}

}  // namespace potluck
