#pragma once

// CUDA C++ for the host compiler: what nvcc knows by itself (threadIdx, __syncthreads, __shfl_xor_sync, atomicAdd,
// __expf, ...) as plain variables and functions, so that kernel files compile unchanged. Included by cuda/launch.h.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

#include "tests/cuda_emulator/kernel_atomics.h"
#include "tests/cuda_emulator/kernel_collectives.h"
#include "tests/cuda_emulator/kernel_math.h"
#include "tests/cuda_emulator/tensor_cores.h"

// The blocks that one host thread runs follow one another, so shared memory is a variable of that thread. A macro,
// because CUDA's header has one of this name.
#undef __shared__
#define __shared__ static thread_local

// Everything that a kernel calls becomes part of it, so that each of its loads and stores is announced to the emulator: the
// compiler does not announce the store of a struct that a function returned (a __half of a conversion, for instance).
#undef __global__
#define __global__ __attribute__((flatten))

// A promise to nvcc about the size of blocks, which CUDA's headers leave to it.
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

// The built-in variables. The emulator sets them whenever it goes to another thread; within the life of a thread they
// never change, so `const` is what a kernel sees. (Plain structs: the compiler announces loads of any other constant.)
extern constinit const thread_local uint3 threadIdx;
extern constinit const thread_local uint3 blockIdx;
extern constinit const thread_local uint3 blockDim;
extern constinit const thread_local uint3 gridDim;
inline constexpr int warpSize = 32;

namespace potluck::emulator {

/// Whether the memory accesses of this file's kernels are seen (see hooks.cpp). Sanitizers cannot be mixed, so in a
/// build with the address sanitizer they are not.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool accesses_are_checked = true;
#else
inline constexpr bool accesses_are_checked = false;
#endif

/// The dynamic shared memory of the running block, aligned to 16 bytes.
void* dynamic_shared_memory();

/// Runs `thread_body` once for each thread of the grid, in stream order, or records it while the stream is captured.
/// Refuses what a card refuses. `kernel` identifies the kernel, `op` (a string literal) is named in reports.
cudaError_t launch(const void* kernel, const char* op, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, std::function<void()> thread_body);

}  // namespace potluck::emulator
