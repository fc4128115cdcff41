#pragma once

// CUDA C++ for the host compiler: what nvcc knows by itself (threadIdx, __syncthreads, __shfl_xor_sync, atomicAdd,
// __expf, ...) as plain variables and functions, so that kernel files compile unchanged. Included by cuda/launch.h.

#include <cuda_runtime_api.h>

#include "tests/cuda_emulator/kernel_atomics.h"
#include "tests/cuda_emulator/kernel_body.h"
#include "tests/cuda_emulator/kernel_collectives.h"
#include "tests/cuda_emulator/kernel_math.h"
#include "tests/cuda_emulator/tensor_cores.h"

// The blocks that one host thread runs follow one another, so shared memory is a variable of that thread. A macro,
// because CUDA's header has one of this name.
#undef __shared__
#define __shared__ static thread_local

// Where the linker has put the tables of compile_kernel.py, in this program or library.
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
extern constinit const thread_local uint3 threadIdx __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 blockIdx __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 blockDim __attribute__((tls_model("initial-exec")));
extern constinit const thread_local uint3 gridDim __attribute__((tls_model("initial-exec")));
inline constexpr int warpSize = 32;
