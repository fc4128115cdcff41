#pragma once

#include "core/tensor.h"

namespace potluck {

/// Arithmetic with broadcasting and promotion (see promote() in core/dtype.h). `/` of integers gives f32.
Tensor add(const Tensor& a, const Tensor& b);
Tensor subtract(const Tensor& a, const Tensor& b);
Tensor multiply(const Tensor& a, const Tensor& b);
Tensor divide(const Tensor& a, const Tensor& b);
/// a to the power b. Integers stay integers when b is not negative; a negative integer exponent is an Error.
Tensor power(const Tensor& a, const Tensor& b);
Tensor power(const Tensor& a, const Scalar& b);
/// The larger of each pair; NaN wins; the gradient of a tie goes to a.
Tensor maximum(const Tensor& a, const Tensor& b);
Tensor minimum(const Tensor& a, const Tensor& b);
/// The remainder with the sign of the divisor, as Python's %. Not differentiable in b.
Tensor remainder(const Tensor& a, const Tensor& b);

/// The same, as operators.
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
/// To the nearest integer, ties to even.
Tensor round(const Tensor& x);
Tensor is_nan(const Tensor& x);
Tensor is_finite(const Tensor& x);
Tensor logical_not(const Tensor& x);

/// Comparisons: bool tensors, no gradient. NaN compares unequal to everything.
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

/// a where condition (bool) holds, else b. The branch not taken gets an exact zero gradient.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
/// Limits x to [low, high]; NaN stays NaN; gradient 0 outside, 1 inside and on the limits. Throws Error when low > high.
Tensor clamp(const Tensor& x, double low, double high);
/// x with `value` wherever mask (bool, broadcast) holds; gradient 0 there.
Tensor masked_fill(const Tensor& x, const Tensor& mask, const Scalar& value);

}  // namespace potluck
