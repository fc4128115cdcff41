#pragma once

// Thin wrappers of the instructions that feed and run the tensor cores (compute capability 8.0 and later), with the
// names and layouts of the PTX ISA, chapters "Matrix multiply-accumulate", "ldmatrix" and "cp.async". All 32 lanes of a
// warp must call the matrix functions together.
//
// A fragment is the part of a matrix that one lane holds. With g = lane / 4 and t = lane % 4, and two half-type
// elements in each 32-bit word (the lower half is the lower column, or for B the lower row):
//
//   A (16 x 16):  word 0: (g, 2t), (g, 2t + 1)          word 1: (g + 8, 2t), (g + 8, 2t + 1)
//                 word 2: (g, 2t + 8), (g, 2t + 9)      word 3: (g + 8, 2t + 8), (g + 8, 2t + 9)
//   B (16 x 8):   word 0: (2t, g), (2t + 1, g)          word 1: (2t + 8, g), (2t + 9, g)
//   C (16 x 8):   floats 0, 1: (g, 2t), (g, 2t + 1)     floats 2, 3: (g + 8, 2t), (g + 8, 2t + 1)
//
// So two adjacent C fragments, rounded to the half type, form an A fragment: the result of one product can be the
// operand of the next without leaving the registers.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/launch.h"

namespace potluck::cuda {

/// sums (16 x 8) += a (16 x 16) b (16 x 8), elements of half type T accumulated in f32. 4096 operations.
template <class T>
__device__ inline void mma_m16n8k16(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
    constexpr bool is_bfloat = std::is_same_v<T, __nv_bfloat16>;
    static_assert(is_bfloat || std::is_same_v<T, __half>);
#if POTLUCK_CUDA_EMULATED
    const std::uint32_t b[2] = {b0, b1};
    emulator::mma_m16n8k16(sums, a, b, sums, is_bfloat);
#else
    if constexpr (is_bfloat)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Loads four 8 x 8 matrices of half-type elements from shared memory. `row` is the address of a row of 8 elements,
/// aligned to 16 bytes: lanes 0-7 give the rows of the first matrix, lanes 8-15 those of the second, and so on. Word i
/// of a lane is elements (g, 2t), (g, 2t + 1) of matrix i; of its transpose when Transposed.
template <bool Transposed>
__device__ inline void ldmatrix_x4(std::uint32_t (&words)[4], const void* row) {
#if POTLUCK_CUDA_EMULATED
    emulator::ldmatrix_x4(words, row, Transposed);
#else
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
#endif
}

/// Starts an asynchronous copy of 16 bytes from global to shared memory, both aligned to 16 bytes, that bypasses the
/// registers. Only the first `source_bytes` are read; the others become 0.
__device__ inline void copy_async_16(void* shared, const void* global, int source_bytes) {
#if POTLUCK_CUDA_EMULATED
    emulator::copy_async_16(shared, global, source_bytes);
#else
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(global), "r"(source_bytes)
                 : "memory");
#endif
}

/// Ends a group: the copies that this thread started since the last group.
__device__ inline void copy_async_commit() {
#if POTLUCK_CUDA_EMULATED
    emulator::copy_async_commit();
#else
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

/// Waits until at most Pending of this thread's groups, the latest ones, are still running. Other threads see the
/// copied data after the next __syncthreads().
template <int Pending>
__device__ inline void copy_async_wait() {
#if POTLUCK_CUDA_EMULATED
    emulator::copy_async_wait(Pending);
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
#endif
}

/// Two floats rounded to the half type (to nearest, ties to even) in one word, `low` in the lower bits.
template <class T>
__device__ inline std::uint32_t pack_halves(float low, float high) {
    std::uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        std::memcpy(&word, &pair, sizeof(word));
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        std::memcpy(&word, &pair, sizeof(word));
    }
    return word;
}

/// 2^x by the special function unit: within 2 ulp; subnormal results are 0.
__device__ inline float fast_exp2(float x) {
#if POTLUCK_CUDA_EMULATED
    return std::exp2(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

}  // namespace potluck::cuda
