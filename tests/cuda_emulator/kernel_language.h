#pragma once

// CUDA C++ for the host compiler: the built-ins of nvcc (threadIdx, __syncthreads, __shfl_xor_sync, atomicAdd, __expf,
// ...) as plain variables and functions, so that kernel files compile unchanged. Included by cuda/launch.h.

#include <cuda_runtime_api.h>

#include "tests/cuda_emulator/kernel_atomics.h"
#include "tests/cuda_emulator/kernel_body.h"
#include "tests/cuda_emulator/kernel_collectives.h"
#include "tests/cuda_emulator/kernel_math.h"
#include "tests/cuda_emulator/tensor_cores.h"

// One host thread runs blocks one after the other, so shared memory is a thread-local variable. A macro, because CUDA's
// header defines one with this name.
#undef __shared__
#define __shared__ static thread_local

// The tables of compile_kernel.py in this program or library, as placed by the linker.
extern "C" {
extern const potluck::emulator::StaticSharedBytes __start_potluck_static_shared[]
    __attribute__((weak, visibility("hidden")));
extern const potluck::emulator::StaticSharedBytes __stop_potluck_static_shared[]
    __attribute__((weak, visibility("hidden")));
}
namespace potluck::emulator {
[[maybe_unused]] static const bool static_shared_is_known =
    add_static_shared(__start_potluck_static_shared, __stop_potluck_static_shared);
}

// Everything that a kernel calls is inlined, so that each of its loads and stores is announced to the emulator: the
// compiler does not announce the store of a struct that a function returned (for instance a __half from a conversion).
#undef __global__
#define __global__ __attribute__((flatten))

// A promise to nvcc about the block size; CUDA's headers do not define it.
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

// The built-in variables. The emulator sets them whenever it switches to another thread; they never change during the
// life of a thread, so kernels see them as `const`. (Plain structs: the compiler announces loads of any other
// constant.)
extern constinit const thread_local uint3 threadIdx __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 blockIdx __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 blockDim __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 gridDim __attribute__((tls_model("initial-exec")));
inline constexpr int warpSize = 32;
