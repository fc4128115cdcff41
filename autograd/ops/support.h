#pragma once

// What the ops in this folder share: checks with readable messages, and parts of gradients.
// For .cpp files of autograd/ only.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/copies.h"
#include "core/strides.h"

namespace potluck {
class Gradients;      // autograd/tape.h
enum class GeluKind;  // autograd/ops/activation.h
}  // namespace potluck

namespace potluck::detail {

// ---- checks ----

/// Throws Error when `x` is an undefined tensor; `what` names it ("x", "weight").
void require_defined(std::string_view op, const Tensor& x, std::string_view what);
/// Throws Error when the defined ones among `tensors` are not all on one device.
void require_same_device(std::string_view op, std::initializer_list<Tensor> tensors);
/// Throws Error unless the dtype is floating.
void require_floating(std::string_view op, const Tensor& x, std::string_view what);
/// Throws Error when `x` has fewer than `least` axes.
void require_rank(std::string_view op, const Tensor& x, std::string_view what, std::int64_t least);

/// What every op of two operands checks: both are there, and on one device.
void require_pair(std::string_view op, const Tensor& a, const Tensor& b);

/// Whether a gradient will flow to `x` from what is computed now. Undefined tensors want none.
bool needs_gradient(const Tensor& x);
/// `x` when it has to be kept for backward, else an undefined tensor.
Tensor keep_if(bool needed, const Tensor& x);

// ---- numbers as tensors, outside the tape ----

/// Fresh memory for the gradient of input `index`, as a kernel writes it: of the dtype of `dy`, or f32 where that of a
/// half type is collected in f32; an undefined tensor where none is wanted.
Tensor empty_gradient(const Gradients& dx, std::size_t index, const Shape& shape, const Tensor& dy);
/// A tensor of no axes with `value`, on the device of `x`, in the dtype that `x op value` has.
Tensor scalar_like(const Tensor& x, const Scalar& value);
/// Zeros of the shape, dtype and device of `x` that take the memory of one element.
Tensor zero_like(const Tensor& x);

// ---- on the tape ----

/// 1 / sqrt(mean(x^2) + epsilon) over `axes`, which stay as size 1. Right also where the squares leave the range of the
/// dtype.
Tensor reciprocal_root_mean_square(const Tensor& x, const std::vector<std::int64_t>& axes, double epsilon);
/// Records a gelu that a kernel computed beside other things: y = gelu(x). Returns y.
Tensor record_gelu(const Tensor& x, const Tensor& y, GeluKind kind);

// ---- shapes, on the tape ----

/// The gradient of a narrow, select or slice, made of ops on the tape: zeros of `shape` with `dy` at the entries
/// start, start + step, .. along axis.
Tensor spread(const Tensor& dy, const Shape& shape, std::int64_t axis, std::int64_t start, std::int64_t step);
/// `x` summed to a shape that broadcasts to its own: the gradient of broadcasting, made of ops on the tape.
/// Throws Error(op, ...) when `shape` does not broadcast to the shape of `x`. A half type may be summed to f32, then
/// outside of the tape; it is returned as it is where there is nothing to sum.
Tensor sum_to_shape(std::string_view op, const Tensor& x, const Shape& shape, DType dtype);

}  // namespace potluck::detail
