#pragma once

#include "core/tensor.h"

namespace potluck {

/// Arithmetic with broadcasting and promotion (see promote() in core/dtype.h).
///
/// A C++ number beside a tensor (`x * 1e-8`) is not rounded to a half type: it is f64 beside f64, and f32 beside f32,
/// f16 and bf16; the result is rounded once. Beside an integer tensor whose result is an integer, the dtype must be
/// able to represent the number (require_held() in core/scalar.h), which is then exact.
///
/// `/` is the division of real numbers: integers are first converted to f32, which is exact only up to 2^24. For
/// integer results use floor_divide() and `%`.
Tensor add(const Tensor& a, const Tensor& b);
Tensor subtract(const Tensor& a, const Tensor& b);
Tensor multiply(const Tensor& a, const Tensor& b);
Tensor divide(const Tensor& a, const Tensor& b);
/// a to the power b. Integers give integers when b is not negative; a negative integer exponent is an Error.
Tensor power(const Tensor& a, const Tensor& b);
Tensor power(const Tensor& a, const Scalar& b);
/// The larger of each pair; NaN wins; in a tie the gradient goes to a.
Tensor maximum(const Tensor& a, const Tensor& b);
Tensor minimum(const Tensor& a, const Tensor& b);
Tensor maximum(const Tensor& a, const Scalar& b);
Tensor minimum(const Tensor& a, const Scalar& b);
/// The quotient rounded down, like Python's //: an integer q for which a = q * b + remainder(a, b). Integers give exact
/// integers; a divisor of 0 is then an Error, while floating tensors give a / b. Gradient 0.
Tensor floor_divide(const Tensor& a, const Tensor& b);
Tensor floor_divide(const Tensor& a, const Scalar& b);
/// The remainder with the sign of the divisor, like Python's %. Integers give exact integers; a divisor of 0 is then an
/// Error, while floating tensors give NaN. dy is passed to a unchanged; not differentiable in b.
Tensor remainder(const Tensor& a, const Tensor& b);
Tensor remainder(const Tensor& a, const Scalar& b);

/// The same functions as operators.
Tensor operator+(const Tensor& a, const Tensor& b);
Tensor operator-(const Tensor& a, const Tensor& b);
Tensor operator*(const Tensor& a, const Tensor& b);
Tensor operator/(const Tensor& a, const Tensor& b);
Tensor operator+(const Tensor& a, const Scalar& b);
Tensor operator-(const Tensor& a, const Scalar& b);
Tensor operator*(const Tensor& a, const Scalar& b);
Tensor operator/(const Tensor& a, const Scalar& b);
Tensor operator+(const Scalar& a, const Tensor& b);
Tensor operator-(const Scalar& a, const Tensor& b);
Tensor operator*(const Scalar& a, const Tensor& b);
Tensor operator/(const Scalar& a, const Tensor& b);
Tensor operator%(const Tensor& a, const Tensor& b);
Tensor operator%(const Tensor& a, const Scalar& b);
Tensor operator-(const Tensor& x);

// Functions of one tensor. Integers are converted to f32 where the result is not an integer.

/// -x.
Tensor negate(const Tensor& x);
/// Absolute value; gradient 0 at 0.
Tensor abs(const Tensor& x);
/// -1, 0, 1, or NaN for NaN. Gradient 0.
Tensor sign(const Tensor& x);
Tensor square(const Tensor& x);
/// Square root; NaN below 0.
Tensor sqrt(const Tensor& x);
/// 1 / sqrt(x).
Tensor rsqrt(const Tensor& x);
Tensor reciprocal(const Tensor& x);
Tensor exp(const Tensor& x);
/// Natural logarithm.
Tensor log(const Tensor& x);
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
/// The error function.
Tensor erf(const Tensor& x);
Tensor floor(const Tensor& x);
Tensor ceil(const Tensor& x);
/// Rounds to the nearest integer, ties to even.
Tensor round(const Tensor& x);
Tensor is_nan(const Tensor& x);
Tensor is_finite(const Tensor& x);
Tensor logical_not(const Tensor& x);

/// Comparisons: bool tensors, no gradient. NaN compares unequal to everything. A C++ number is not converted to the
/// dtype: u8 < 300 and f16 < 70000 are true. (So an f16 made from 0.1 does not equal 0.1.)
Tensor equal(const Tensor& a, const Tensor& b);
Tensor not_equal(const Tensor& a, const Tensor& b);
Tensor less(const Tensor& a, const Tensor& b);
Tensor less_equal(const Tensor& a, const Tensor& b);
Tensor greater(const Tensor& a, const Tensor& b);
Tensor greater_equal(const Tensor& a, const Tensor& b);
Tensor operator==(const Tensor& a, const Tensor& b);
Tensor operator!=(const Tensor& a, const Tensor& b);
Tensor operator<(const Tensor& a, const Tensor& b);
Tensor operator<=(const Tensor& a, const Tensor& b);
Tensor operator>(const Tensor& a, const Tensor& b);
Tensor operator>=(const Tensor& a, const Tensor& b);
Tensor operator==(const Tensor& a, const Scalar& b);
Tensor operator!=(const Tensor& a, const Scalar& b);
Tensor operator<(const Tensor& a, const Scalar& b);
Tensor operator<=(const Tensor& a, const Scalar& b);
Tensor operator>(const Tensor& a, const Scalar& b);
Tensor operator>=(const Tensor& a, const Scalar& b);

/// a where condition (bool) holds, else b. The branch that is not selected gets an exactly zero gradient. But the op
/// that computed that branch multiplies the zero by its derivative, and 0 * NaN is NaN: where(x > 0, sqrt(x), 0) has
/// NaN gradients where x < 0 (AnomalyCheck names the sqrt). Select the argument first: where(x > 0, sqrt(where(x > 0,
/// x, 1)), 0).
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b);
Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b);
/// Limits x to [low, high]; NaN stays NaN; gradient 0 outside, 1 inside and on the limits. Throws Error when low >
/// high, or when the interval contains no value of an integer dtype.
Tensor clamp(const Tensor& x, double low, double high);
/// x with `value` wherever mask (bool, broadcast) is true; gradient 0 there. Throws Error when the dtype cannot
/// represent `value` (require_held() in core/scalar.h).
Tensor masked_fill(const Tensor& x, const Tensor& mask, const Scalar& value);

}  // namespace potluck
