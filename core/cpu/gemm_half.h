#pragma once

#include <concepts>

#include "core/cpu/gemm.h"
#include "core/half.h"

namespace potluck::cpu {

template <class T>
concept Half = std::same_as<T, float16> || std::same_as<T, bfloat16>;

/// c = a b, or c += a b, of half types, as gemm() of f32 does it: in the calling thread alone, with operands of any
/// strides, and c with column_stride 1, in the type of the operands or in f32. The sums are f32; a c of a half type is
/// rounded once, after what it held has been added. Products of bf16 take denormal operands for zeros where
/// has_fast_bfloat16_gemm().
template <Half T, class C>
requires std::same_as<C, T> || std::same_as<C, float>
void gemm(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<C>& c, bool accumulate);

extern template void gemm(const Matrix<const float16>&, const Matrix<const float16>&, const Matrix<float16>&,
                          bool);
extern template void gemm(const Matrix<const float16>&, const Matrix<const float16>&, const Matrix<float>&,
                          bool);
extern template void gemm(const Matrix<const bfloat16>&, const Matrix<const bfloat16>&,
                          const Matrix<bfloat16>&, bool);
extern template void gemm(const Matrix<const bfloat16>&, const Matrix<const bfloat16>&, const Matrix<float>&,
                          bool);

}  // namespace potluck::cpu
