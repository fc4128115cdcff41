#pragma once

// Reductions over the lanes of a warp and the threads of a block. The order is fixed, so the same input gives the same
// bits every time.

#include "cuda/launch.h"

namespace potluck::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

struct Add {
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};

/// Reduces the values of 32 lanes; every lane gets the result. Floor: 5 shuffles.
template <class T, class Combine>
__device__ T warp_reduce(T value, Combine combine) {
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
    return value;
}
template <class T>
__device__ T warp_sum(T value) {
    return warp_reduce(value, Add{});
}

/// Reduces the values of all threads of a one-dimensional block, whose size is a multiple of 32; every thread gets the
/// result. `scratch` is shared memory for 32 values. It may be called again immediately: it begins and ends with a
/// barrier.
template <class T, class Combine>
__device__ T block_reduce(T value, T identity, Combine combine, T* scratch) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    value = warp_reduce(value, combine);
    if (warps == 1) return value;
    __syncthreads();
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = warp_reduce(lane < warps ? scratch[lane] : identity, combine);
    __syncthreads();
    return value;
}
template <class T>
__device__ T block_sum(T value, T* scratch) {
    return block_reduce(value, T{0}, Add{}, scratch);
}

}  // namespace potluck::cuda
