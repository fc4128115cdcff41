#pragma once

// For the doubles of libraries (cuBLASLt, cuDNN, NCCL): how they run in stream order and check memory.
//
//     cublasStatus_t cublasLtMatmul(..., cudaStream_t stream) {
//         ... refuse what the library refuses ...
//         const cudaError_t status = emulator::library_call(stream, "cublasLtMatmul", [=] {
//             emulator::check_read(a, bytes, "A");     // every byte that is read, and no other: rows of a view one by one
//             emulator::check_write(d, bytes, "D");    // before the write
//             ...                                      // compute with plain loads and stores
//         });
//         return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
//     }

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tests/cuda_emulator/emulator.h"

namespace potluck::emulator {

/// Runs `body` as one operation of `stream`, with device memory accessible to the host. While the stream is captured,
/// the body is recorded instead and runs at each launch of the graph: it must own what it uses.
/// A fault inside ends the body; the result is then the error that later calls return. `name` must be a string literal.
cudaError_t library_call(cudaStream_t stream, const char* name, std::function<void()> body);
/// Runs an operation of several streams, of any devices: it begins after the work in all of them, and all wait for it.
cudaError_t library_call(std::span<const cudaStream_t> streams, const char* name, std::function<void()> body);

/// Inside a library call: declares that these bytes are about to be read. They must be device memory that was written
/// (host memory is not checked). `what` names the operand in the report.
void check_read(const void* data, std::int64_t bytes, const char* what);
/// Inside a library call: declares that these bytes are about to be written.
void check_write(void* data, std::int64_t bytes, const char* what);
/// Inside a library call: records a fault and ends the call.
[[noreturn]] void fail(FaultKind kind, std::string text);

/// Whether `data` is an address of device memory, of any device.
bool is_device_pointer(const void* data);
/// The device to whose memory `data` points; -1 for host memory.
int device_of(const void* data);
/// The device of a stream; -1 for an invalid handle.
int device_of_stream(cudaStream_t stream);

}  // namespace potluck::emulator
