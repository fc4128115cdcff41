#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace potluck::cpu {

// Conversion of runs of elements with constant stride between all dtypes. Strides count elements.
//
//   floating -> floating   rounds once, to nearest, ties to even (f64 -> f16 too: never through f32)
//   integer  -> floating   rounds once
//   floating -> integer    truncates towards zero; NaN gives 0, out of range gives the nearest limit of the type
//   integer  -> integer    keeps the low bits, as C++ does
//   anything -> bool       value != 0 (NaN gives true)

/// Converts n elements. Source and target must not overlap, unless they have the same address and dtype.
void convert(const void* from, DType from_dtype, std::int64_t from_stride, void* to, DType to_dtype,
             std::int64_t to_stride, std::int64_t n);

/// Gathers into a dense array of a C++ type.
template <class T>
void convert_to(T* to, const void* from, DType dtype, std::int64_t stride, std::int64_t n) {
    convert(from, dtype, stride, to, dtype_of<T>(), 1, n);
}

/// Scatters from a dense array of a C++ type.
template <class T>
void convert_from(const T* from, void* to, DType dtype, std::int64_t stride, std::int64_t n) {
    convert(from, dtype_of<T>(), 1, to, dtype, stride, n);
}

}  // namespace potluck::cpu
