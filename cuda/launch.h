#pragma once

// The language of the kernel files (cuda/kernels/*.cu), which are compiled by nvcc for the GPU and by the host compiler
// for the emulator. `<<<>>>` is not C++, so kernels are launched by launch(), and a function returns dynamic shared
// memory. Everything else (threadIdx, __syncthreads, __shfl_xor_sync, __shared__ arrays, ...) is CUDA C++ in both.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/runtime.h"

#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/kernel_language.h"
#else
#include <cuda_runtime.h>
#endif

namespace potluck::cuda {

/// The block's dynamic shared memory, of the size that was passed to launch(); aligned to 16 bytes.
template <class T>
__device__ inline T* dynamic_shared_memory() {
#if POTLUCK_CUDA_EMULATED
    return static_cast<T*>(emulator::dynamic_shared_memory());
#else
    extern __shared__ __align__(16) unsigned char potluck_shared_memory[];
    return reinterpret_cast<T*>(potluck_shared_memory);
#endif
}

/// Launches `kernel` on `grid` x `block` threads in `stream`, after everything that is already in the stream, and
/// returns immediately. An empty grid does nothing. `shared_bytes` of dynamic shared memory and the kernel's own
/// (`__shared__`) may together exceed 48 KiB.
/// Throws Error, under the name of the running op, when the launch fails.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    const auto* address = reinterpret_cast<const void*>(kernel);
    if (shared_bytes > 0) allow_shared_memory(address, shared_bytes);
#if POTLUCK_CUDA_EMULATED
    check(emulator::launch(address, OpScope::current(), grid, block, shared_bytes, stream,
                           [=] { kernel(arguments...); }),
          "kernel launch");
#else
    std::array<void*, sizeof...(Parameters) + 1> pointers{static_cast<void*>(&arguments)..., nullptr};
    check(cudaLaunchKernel(address, grid, block, pointers.data(), shared_bytes, stream), "kernel launch");
#endif
}

/// Number of blocks of `per_block` that cover `count`; a kernel with a grid-stride loop may be given fewer, at most
/// `most`. Never throws: count 0 gives 0 blocks.
inline unsigned blocks_for(std::int64_t count, std::int64_t per_block,
                           std::int64_t most = std::int64_t{1} << 30) {
    const std::int64_t blocks = (count + per_block - 1) / per_block;
    return static_cast<unsigned>(blocks < most ? blocks : most);
}

/// The first element and the stride of a thread of a one-dimensional grid in a grid-stride loop.
__device__ inline std::int64_t global_thread() {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t global_threads() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

}  // namespace potluck::cuda
