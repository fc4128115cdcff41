#pragma once

// Internal: the options of one CUDA device, which users set with the functions of cuda/options.h. They are separate
// from CudaBackend because builds without CUDA have those functions, too.

#include <atomic>

namespace potluck::cuda {

struct DeviceOptions {
    std::atomic<bool> tf32{false};
    std::atomic<bool> bias_epilogue{true};
    std::atomic<bool> gelu_epilogue{false};
    std::atomic<bool> fused_attention{false};
};

class HasOptions {
public:
    virtual ~HasOptions() = default;
    DeviceOptions& options() { return options_; }

private:
    DeviceOptions options_;
};

}  // namespace potluck::cuda
