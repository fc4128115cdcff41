#pragma once

// Which dtype an op returns and in which it computes: the only place that decides this.
//
//   class of op                                      result
//   arithmetic (+ - * floor_divide % maximum where)  promote() of the operands (core/dtype.h)
//   comparisons and tests (< is_nan any all)         bool
//   real functions (/ sqrt exp mean norm stddev)     floating_result()
//   sums                                             sum_result()
//   positions (argmax, topk's indices)               i64
//
// Kernels compute and accumulate in accumulation_dtype() or wider. Statistics that an op saves for its backward (means,
// rstd, logsumexp) and the moments of an optimizer are stored in it.

#include "core/dtype.h"

namespace potluck {

/// Floating dtypes are kept; integers and bool become f32.
inline DType floating_result(DType dtype) { return is_floating(dtype) ? dtype : DType::f32; }

/// Floating dtypes are kept; integers and bool become i64.
inline DType sum_result(DType dtype) { return is_floating(dtype) ? dtype : DType::i64; }

/// f64 for f64, f32 for f32 and the half types, i64 for integers and bool.
inline DType accumulation_dtype(DType dtype) {
    if (!is_floating(dtype)) return DType::i64;
    return dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace potluck
