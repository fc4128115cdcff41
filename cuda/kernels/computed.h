#pragma once

// Converts packs of stored elements to arrays of their compute type, and back.

#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

template <class T, int N>
__device__ inline void to_computed(const Pack<T, N>& from, compute_type<T> (&to)[N]) {
    for (int i = 0; i < N; ++i) to[i] = to_compute(from.values[i]);
}

template <class T, int N>
__device__ inline void from_computed(const compute_type<T> (&from)[N], Pack<T, N>& to) {
    for (int i = 0; i < N; ++i) to.values[i] = from_compute<T>(from[i]);
}

}  // namespace potluck::cuda
