#pragma once

// Shared code of the ops in this folder: checks with readable messages, and parts of gradients.
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
/// Throws Error unless all defined tensors among `tensors` are on one device.
void require_same_device(std::string_view op, std::initializer_list<Tensor> tensors);
/// Throws Error unless the dtype is floating.
void require_floating(std::string_view op, const Tensor& x, std::string_view what);
/// Throws Error when `x` has fewer than `least` axes.
void require_rank(std::string_view op, const Tensor& x, std::string_view what, std::int64_t least);

/// The check of every op with two operands: both are defined and on one device.
void require_pair(std::string_view op, const Tensor& a, const Tensor& b);

/// Whether a gradient will flow to `x` from what is computed now. False for undefined tensors.
bool needs_gradient(const Tensor& x);
/// `x` when it has to be kept for backward, else an undefined tensor.
Tensor keep_if(bool needed, const Tensor& x);

// ---- numbers as tensors, outside the tape ----

/// New memory for the gradient of input `index`, which a kernel writes: of the dtype of `dy`, or f32 where the gradient
/// of a half type is accumulated in f32; an undefined tensor if it is not needed.
Tensor empty_gradient(const Gradients& dx, std::size_t index, const Shape& shape, const Tensor& dy);
/// A 0-dimensional tensor with `value`, on the device of `x`, in the dtype of `x op value`.
Tensor scalar_like(const Tensor& x, const Scalar& value);
/// Zeros with the shape, dtype and device of `x`, in the memory of one element (strides 0).
Tensor zero_like(const Tensor& x);

// ---- on the tape ----

/// 1 / sqrt(mean(x^2) + epsilon) over `axes`, which are kept with size 1. Correct even where the squares are out of
/// range of the dtype.
Tensor reciprocal_root_mean_square(const Tensor& x, const std::vector<std::int64_t>& axes, double epsilon);
/// Records a gelu that a fused kernel has computed: y = gelu(x). Returns y.
Tensor record_gelu(const Tensor& x, const Tensor& y, GeluKind kind);

// ---- shapes, on the tape ----

/// The gradient of a narrow, select or slice, composed of ops on the tape: zeros of `shape` with `dy` at the entries
/// start, start + step, .. along axis.
Tensor spread(const Tensor& dy, const Shape& shape, std::int64_t axis, std::int64_t start, std::int64_t step);
/// `x` summed to a shape that broadcasts to its own: the gradient of broadcasting, composed of ops on the tape. Throws
/// Error(op, ...) when `shape` does not broadcast to the shape of `x`. A half type may be summed to f32, but only
/// outside the tape; without anything to sum, `x` itself is returned.
Tensor sum_to_shape(std::string_view op, const Tensor& x, const Shape& shape, DType dtype);

}  // namespace potluck::detail
