#pragma once

// Shared code of the tests of the library doubles.

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cuda_emulator/library_refusal.h"
#include "tests/expect_error.h"

namespace potluck::test {

/// Device memory that is freed at the end, filled with ones (f32) unless it is left uninitialised.
class DeviceMemory {
public:
    explicit DeviceMemory(std::int64_t floats, bool written = true) {
        REQUIRE(cudaMalloc(&data_, static_cast<std::size_t>(floats) * sizeof(float)) == cudaSuccess);
        const std::vector<float> values(static_cast<std::size_t>(floats), 1.0F);
        if (written)
            REQUIRE(cudaMemcpy(data_, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice) ==
                    cudaSuccess);
    }
    ~DeviceMemory() { free(); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    void free() {
        if (data_ != nullptr && !freed_) cudaFree(data_);
        freed_ = true;
    }
    float* get() const { return static_cast<float*>(data_); }
    std::vector<float> read(std::int64_t floats) const {
        std::vector<float> values(static_cast<std::size_t>(floats));
        cudaMemcpy(values.data(), data_, values.size() * sizeof(float), cudaMemcpyDeviceToHost);
        return values;
    }

private:
    void* data_ = nullptr;
    bool freed_ = false;
};

inline bool refused_because(const std::string& text) {
    return contains(emulator::last_library_refusal(), text);
}

}  // namespace potluck::test
