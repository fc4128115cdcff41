#pragma once

// For the tests of the CUDA emulator: memory and streams with RAII, and checks for the fault that a test has planted.

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/runtime.h"
#include "tests/cuda_emulator/emulator.h"
#include "tests/cuda_emulator/kernel_language.h"
#include "tests/skip.h"

namespace potluck::test {

using emulator::FaultKind;

/// `count` elements of uninitialised device memory, freed in the stream in which they were allocated.
template <class T>
class Buffer {
public:
    Buffer(std::size_t count, cudaStream_t stream) : count_(count), stream_(stream) {
        cuda::check(cudaMallocAsync(&data_, count * sizeof(T), stream), "cudaMallocAsync");
    }
    /// Copies from the host.
    Buffer(const std::vector<T>& values, cudaStream_t stream) : Buffer(values.size(), stream) {
        cuda::check(cudaMemcpyAsync(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream),
                    "cudaMemcpyAsync");
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_ != nullptr) cudaFreeAsync(data_, stream_);
    }

    T* data() const { return static_cast<T*>(data_); }
    std::size_t size() const { return count_; }
    void free() { cudaFreeAsync(std::exchange(data_, nullptr), stream_); }
    std::vector<T> to_host(cudaStream_t stream) const {
        std::vector<T> values(count_);
        cuda::check(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream),
                    "cudaMemcpyAsync");
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        return values;
    }
    std::vector<T> to_host() const { return to_host(stream_); }

private:
    std::size_t count_;
    cudaStream_t stream_;
    void* data_ = nullptr;
};

/// Checks that exactly one fault of this kind was recorded, whose text contains these parts, and removes it.
inline void expect_fault(FaultKind kind, const std::vector<std::string>& parts) {
    const std::vector<emulator::Fault> seen = emulator::take_faults();
    REQUIRE(seen.size() == 1);
    INFO(seen.front().text);
    CHECK(static_cast<int>(seen.front().kind) == static_cast<int>(kind));
    for (const std::string& part : parts) {
        INFO("wanted: ", part);
        CHECK(seen.front().text.find(part) != std::string::npos);
    }
}

/// Checks that no fault was recorded.
inline void expect_no_fault() {
    for (const emulator::Fault& fault : emulator::take_faults()) FAIL_CHECK(fault.text);
}

/// False, after marking the test case as skipped, where kernels are compiled without the instrumentation of accesses.
inline bool accesses_are_checked() {
    if (!emulator::accesses_are_checked)
        skip("in a build with a sanitizer the emulator does not see loads and stores");
    return emulator::accesses_are_checked;
}

}  // namespace potluck::test
