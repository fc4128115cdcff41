#pragma once

// Element types inside kernels: the CUDA type of each dtype, its compute type, and wide loads and stores. Half types
// are stored rounded and computed in float; integers and bool are computed in 64 bits, as on the CPU.

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/tensor.h"
#include "cuda/launch.h"

namespace potluck::cuda {

template <class T>
struct DeviceElement {
    using type = T;
};
template <>
struct DeviceElement<float16> {
    using type = __half;
};
template <>
struct DeviceElement<bfloat16> {
    using type = __nv_bfloat16;
};
/// The type of an element of tensors of T inside kernels: __half for float16, __nv_bfloat16 for bfloat16, T for all
/// others.
template <class T>
using device_element = typename DeviceElement<T>::type;

template <class T>
inline constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

/// double for double, float for float and the half types, int64 for integers and bool.
template <class T>
using compute_type = std::conditional_t<std::is_same_v<T, double>, double,
                                        std::conditional_t<std::is_integral_v<T>, std::int64_t, float>>;

/// Calls `function(T{})` with the kernel's type of `dtype`.
template <class Function>
decltype(auto) visit_device(DType dtype, Function&& function) {
    return visit(dtype, [&](auto zero) { return function(device_element<decltype(zero)>{}); });
}
/// The same for kernels without an integer version: their ops accept floating tensors only.
template <class Function>
decltype(auto) visit_device_floating(DType dtype, Function&& function) {
    switch (dtype) {
        case DType::f64:
            return function(double{});
        case DType::f16:
            return function(__half{});
        case DType::bf16:
            return function(__nv_bfloat16{});
        default:
            return function(float{});
    }
}

/// Calls `function` with the unsigned word of the element's size.
template <class Function>
void visit_word(DType dtype, Function&& function) {
    switch (size_of(dtype)) {
        case 8:
            return function(std::uint64_t{});
        case 4:
            return function(std::uint32_t{});
        case 2:
            return function(std::uint16_t{});
        default:
            return function(std::uint8_t{});
    }
}

/// The elements of a tensor of any dtype, with the type that kernels use.
template <class T>
T* elements_of(const Tensor& x) {
    return static_cast<T*>(x.raw_data());
}

template <class T>
__device__ inline compute_type<T> to_compute(T value) {
    if constexpr (std::is_same_v<T, __half>)
        return __half2float(value);
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return __bfloat162float(value);
    else
        return static_cast<compute_type<T>>(value);
}

/// Rounds to nearest, ties to even; integers wrap around, bool is "not 0".
template <class T, class Computed>
__device__ inline T from_compute(Computed value) {
    if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(static_cast<float>(value));
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return __float2bfloat16_rn(static_cast<float>(value));
    else if constexpr (std::is_same_v<T, bool>)
        return value != Computed{0};
    else
        return static_cast<T>(value);
}

/// (x - mean) * reciprocal, also where the distance of two finite numbers leaves the range of S: that happens only in rows
/// whose deviation is not far from its end, and there halves are taken.
template <class S>
struct Normalised {
    S part, mean, factor;

    __device__ Normalised(S center, S reciprocal)
        : part(reciprocal > S{0} && reciprocal < (std::is_same_v<S, float> ? S(0x1p-96) : S(0x1p-900))
                   ? S(0.5)
                   : S{1}),
          mean(center * part),
          factor(reciprocal / part) {}
    __device__ S operator()(S x) const { return (x * part - mean) * factor; }
};

/// Where a kernel of T writes gradients of parameters: in T or in f32 (see core/backend.h). May be null.
template <class T>
struct GradientPointer {
    void* data;
    bool is_f32;

    explicit GradientPointer(const Tensor& x)
        : data(x.defined() ? x.raw_data() : nullptr), is_f32(x.defined() && x.dtype() == DType::f32) {}

    template <class Computed>
    __device__ void store(std::int64_t index, Computed value) const {
        if (data == nullptr) return;
        if (is_f32)
            static_cast<float*>(data)[index] = static_cast<float>(value);
        else
            static_cast<T*>(data)[index] = from_compute<T>(value);
    }
};

/// N adjacent elements that are loaded or stored by one instruction. `*reinterpret_cast<const Pack<T>*>(pointer)`
/// requires a pointer that is a multiple of the pack's size.
template <class T, int N = static_cast<int>(16 / sizeof(T))>
struct alignas(sizeof(T) * N) Pack {
    static constexpr int size = N;
    T values[N];
};

/// Whether packs may begin at `pointer`.
template <class T>
bool is_aligned_for_packs(const T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Pack<T>) == 0;
}

}  // namespace potluck::cuda
