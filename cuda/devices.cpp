// Finds the CUDA devices of this machine when a CUDA device is first requested.

#include <memory>

#include "core/device_registry.h"
#include "core/format.h"
#include "cuda/cuda_backend.h"

namespace potluck {
namespace {

using cuda::check;

/// "13.0" for the runtime's 13000.
std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

/// Registers every device; returns the reason if there is none.
std::string discover() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();
        int driver = 0;
        int runtime = 0;
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver == 0)
            return fmt::format("no NVIDIA driver is loaded (this build needs one for CUDA {})",
                               version_text(runtime));
        return fmt::format("{} (driver for CUDA {}, this build {})", cudaGetErrorString(status),
                           version_text(driver), version_text(runtime));
    }
    for (int index = 0; index < count; ++index)
        register_device(Device::cuda(index), std::make_unique<CudaBackend>(index));
    return count == 0 ? "the driver sees no GPU" : "";
}

const bool is_known = [] {
    set_device_discovery(discover);
    return true;
}();

}  // namespace

std::string CudaBackend::describe() const {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
    int driver = 0;
    int runtime = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    return fmt::format(
        "{}, {:.1f} GiB, compute capability {}.{}, {} multiprocessors, driver for CUDA {}, runtime {}",
        properties.name, static_cast<double>(properties.totalGlobalMem) / 0x1p30, properties.major,
        properties.minor, properties.multiProcessorCount, version_text(driver), version_text(runtime));
}

}  // namespace potluck
