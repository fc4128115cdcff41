#pragma once

// Prefix sums over the threads of a block.

#include "cuda/kernels/block_reduce.h"

namespace potluck::cuda {

/// The sum of the values of all threads before this one; `total` becomes the sum of all. The block is one-dimensional,
/// its size a multiple of 32. `scratch` is shared memory for 32 values. May be called again at once: it begins and ends
/// with a barrier. Floor: 10 shuffles.
template <class T>
__device__ T block_sum_before(T value, T* scratch, T& total) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    const auto sum_up_to = [&](T sum) {  // over the lanes up to this one, with strides 1, 2, 4, 8 and 16
        for (int distance = 1; distance < warp_size; distance *= 2) {
            const T other = __shfl_up_sync(all_lanes, sum, static_cast<unsigned>(distance));
            if (lane >= distance) sum += other;
        }
        return sum;
    };
    const T here = sum_up_to(value);
    __syncthreads();
    if (lane == warp_size - 1) scratch[warp] = here;
    __syncthreads();
    const T warp_sums = sum_up_to(lane < warps ? scratch[lane] : T{0});
    total = __shfl_sync(all_lanes, warp_sums, warps - 1);
    const T before = __shfl_sync(all_lanes, warp_sums, warp > 0 ? warp - 1 : 0);
    __syncthreads();
    return here - value + (warp > 0 ? before : T{0});
}

}  // namespace potluck::cuda
