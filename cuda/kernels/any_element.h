#pragma once

// Access to elements whose dtype is known only at run time and is the same for a whole block. All lanes take the same
// branch, which costs a memory-bound kernel nothing, and one launch can process tensors of different dtypes.

#include "core/dtype.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

/// Loads elements [first, first + N) of a floating tensor as T (float or double), by a single load for N > 1: then the
/// address must be a multiple of N elements.
template <int N, class T>
__device__ inline void load_any(T (&to)[N], const void* from, DType dtype, std::int64_t first) {
    const auto load = [&](auto zero) {
        using Stored = decltype(zero);
        const auto pack = *reinterpret_cast<const Pack<Stored, N>*>(static_cast<const Stored*>(from) + first);
        for (int i = 0; i < N; ++i) to[i] = static_cast<T>(to_compute(pack.values[i]));
    };
    if (dtype == DType::f32)
        load(float{});
    else if (dtype == DType::bf16)
        load(__nv_bfloat16{});
    else if (dtype == DType::f16)
        load(__half{});
    else
        load(double{});
}

/// The reverse: stores, rounded to nearest.
template <int N, class T>
__device__ inline void store_any(void* to, DType dtype, std::int64_t first, const T (&from)[N]) {
    const auto store = [&](auto zero) {
        using Stored = decltype(zero);
        Pack<Stored, N> pack;
        for (int i = 0; i < N; ++i) pack.values[i] = from_compute<Stored>(from[i]);
        *reinterpret_cast<Pack<Stored, N>*>(static_cast<Stored*>(to) + first) = pack;
    };
    if (dtype == DType::f32)
        store(float{});
    else if (dtype == DType::bf16)
        store(__nv_bfloat16{});
    else if (dtype == DType::f16)
        store(__half{});
    else
        store(double{});
}

/// Whether load_any and store_any may access N elements at once at multiples of N.
template <int N>
bool is_aligned_for_any(const void* data, DType dtype) {
    return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(N * size_of(dtype)) == 0;
}

}  // namespace potluck::cuda
