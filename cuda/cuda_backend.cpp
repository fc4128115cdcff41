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

CudaBackend::Resources::Resources(int index) {
    check(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
    // Freed blocks stay in the pool: by default every synchronisation would give them back to the system.
    std::uint64_t everything = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything),
          "cudaMemPoolSetAttribute");
    void* memory = nullptr;
    constexpr std::size_t bytes = fault_places * sizeof(unsigned long long);
    check(cudaMallocAsync(&memory, bytes, stream.get()), "cudaMallocAsync");
    fault_positions = static_cast<unsigned long long*>(memory);
    check(cudaMemsetAsync(fault_positions, 0xff, bytes, stream.get()), "cudaMemsetAsync");
}

CudaBackend::Resources& CudaBackend::resources() {
    std::call_once(opened_, [&] { resources_ = std::make_unique<Resources>(index_); });
    return *resources_;
}

cudaStream_t CudaBackend::stream() {
    check(cudaSetDevice(index_), "cudaSetDevice");
    return is_capturing() ? resources().capture_stream.get() : resources().stream.get();
}

cublasLtHandle_t CudaBackend::cublas() {
    cublasLtHandle_t& handle = resources().cublas;
    if (handle == nullptr && cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS)
        throw Error(OpScope::current(), fmt::format("cublasLtCreate failed on cuda:{}.", index_));
    return handle;
}

cudnnHandle_t CudaBackend::cudnn() {
    const cudaStream_t queue = stream();
    cudnnHandle_t& handle = resources().cudnn;
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

unsigned long long* CudaBackend::fault_position() {
    if (is_capturing()) return recording_->fault_position();
    static std::atomic<unsigned> threads{0};
    static thread_local const unsigned place = threads++ % Resources::fault_places;
    return resources().fault_positions + place;
}

std::optional<std::int64_t> CudaBackend::take_fault() {
    if (is_capturing()) {
        recording_->reports_faults = true;
        return std::nullopt;
    }
    return take_fault_at(fault_position());
}

std::optional<std::int64_t> CudaBackend::take_fault_at(unsigned long long* place) {
    const cudaStream_t queue = stream();
    unsigned long long position = 0;
    check(cudaMemcpyAsync(&position, place, sizeof(position), cudaMemcpyDeviceToHost, queue),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
    if (position == ~0ULL) return std::nullopt;
    check(cudaMemsetAsync(place, 0xff, sizeof(position), queue), "cudaMemsetAsync");
    return static_cast<std::int64_t>(position);
}

void CudaBackend::synchronize() {
    if (is_capturing())
        throw Error(OpScope::current(), "nothing can be waited for while work is being recorded.");
    check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    check(cudaGetLastError(), "an earlier kernel");
}

}  // namespace potluck
