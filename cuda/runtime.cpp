#include "cuda/runtime.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/emulator.h"
#endif

namespace potluck::cuda {
namespace {

/// The emulator's diagnosis, instead of the runtime's short text.
std::string reason_of(cudaError_t status) {
#if POTLUCK_CUDA_EMULATED
    if (std::string report = emulator::last_fault_text(); !report.empty()) return report;
#endif
    return fmt::format("{} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace

void check(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    const std::string reason = reason_of(status);
    cudaGetLastError();  // clears the error, so that it is not reported twice
    throw Error(OpScope::current(), fmt::format("{} failed: {}.", call, reason));
}

void allow_shared_memory(const void* kernel, std::size_t dynamic_bytes) {
    constexpr std::size_t without_asking = std::size_t{48} << 10;
    struct Known {
        std::size_t static_bytes;
        std::size_t allowed;  // dynamic memory
    };
    static std::mutex mutex;
    static std::map<std::pair<int, const void*>, Known> all;  // by device and kernel
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard lock(mutex);
    auto known = all.find({device, kernel});
    if (known == all.end()) {
        cudaFuncAttributes attributes{};
        check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
        const std::size_t own = attributes.sharedSizeBytes;
        known = all.insert({{device, kernel}, {own, without_asking - std::min(own, without_asking)}}).first;
    }
    auto& [static_bytes, allowed] = known->second;
    if (dynamic_bytes <= allowed) return;
    int most = 0;
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
    if (dynamic_bytes + static_bytes > static_cast<std::size_t>(most))
        throw Error(
            OpScope::current(),
            fmt::format("a block of its kernel needs {} bytes of shared memory, and cuda:{} has {} for one.",
                        dynamic_bytes + static_bytes, device, most));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(dynamic_bytes)),
          "cudaFuncSetAttribute");
    allowed = dynamic_bytes;
}

CurrentDevice::CurrentDevice(int index) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(index), "cudaSetDevice");
}
CurrentDevice::~CurrentDevice() { cudaSetDevice(before_); }

Stream::Stream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreate"); }
Stream::~Stream() {
    if (handle_ != nullptr) cudaStreamDestroy(handle_);
}
void Stream::synchronize() const { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

Event::Event(bool timing) {
    check(cudaEventCreateWithFlags(&handle_, timing ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreate");
}
Event::~Event() {
    if (handle_ != nullptr) cudaEventDestroy(handle_);
}
void Event::record(cudaStream_t stream) const { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }
void Event::block(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, handle_, 0), "cudaStreamWaitEvent");
}
void Event::wait_unless_done() const {
    const cudaError_t status = cudaEventQuery(handle_);
    if (status == cudaErrorNotReady)
        synchronize();
    else
        check(status, "cudaEventQuery");
}

void Event::synchronize() const { check(cudaEventSynchronize(handle_), "cudaEventSynchronize"); }
bool Event::is_done() const noexcept {
    if (cudaEventQuery(handle_) != cudaErrorNotReady) return true;
    cudaGetLastError();  // "not ready" is not an error
    return false;
}
double Event::elapsed_ms(const Event& start) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start.handle_, handle_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds);
}

PinnedMemory::PinnedMemory(std::size_t bytes) : bytes_(bytes) {
    check(cudaMallocHost(&data_, bytes), "cudaMallocHost");
}
PinnedMemory::~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
}

}  // namespace potluck::cuda
