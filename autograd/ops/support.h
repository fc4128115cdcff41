#pragma once

// What the ops in this folder share: checks with readable messages, conversions outside the tape, strides of views.
// For .cpp files of autograd/ only.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/tensor.h"

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

/// f16 and bf16.
bool is_half(DType dtype);
/// What every op of two operands checks: both are there, and on one device.
void require_pair(std::string_view op, const Tensor& a, const Tensor& b);

/// Whether a gradient will flow to `x` from what is computed now. Undefined tensors want none.
bool needs_gradient(const Tensor& x);
/// `x` when it has to be kept for backward, else an undefined tensor.
Tensor keep_if(bool needed, const Tensor& x);

// ---- outside the tape ----

/// `x` in another dtype, or `x` itself.
Tensor cast(const Tensor& x, DType dtype);
/// The same; an undefined tensor stays one.
Tensor cast_or_none(const Tensor& x, DType dtype);
/// Fresh memory of `shape`, of the dtype and on the device of `like`; an undefined tensor where it is not wanted.
Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like);
/// Fresh memory for the gradient of input `index`, as a kernel writes it: of the dtype of `dy`, or f32 where that of a
/// half type is collected in f32; an undefined tensor where none is wanted.
Tensor empty_gradient(const Gradients& dx, std::size_t index, const Shape& shape, const Tensor& dy);
/// Integers and bool as f32; floating tensors as they are.
Tensor as_floating(const Tensor& x);
/// A tensor of no axes with `value`, on the device of `x`, in the dtype that `x op value` has.
Tensor scalar_like(const Tensor& x, const Scalar& value);
/// One number of any dtype, on a device.
Tensor scalar_tensor(double value, DType dtype, Device device);
/// Row-major copy of `x` with memory of its own.
Tensor copy_of(const Tensor& x);
/// `x` in row-major order, or `x` itself.
Tensor as_contiguous(const Tensor& x);
/// Another shape with the same count: a view where strides allow, else a copy.
Tensor reshaped(const Tensor& x, const Shape& shape);
/// (.., n) as (rows, n): a view where strides allow, else a copy. `x` has at least one axis.
Tensor as_rows(const Tensor& x);

// ---- on the tape ----

/// Records a gelu that a kernel computed beside other things: y = gelu(x). Returns y.
Tensor record_gelu(const Tensor& x, const Tensor& y, GeluKind kind);

// ---- shapes and strides ----

/// Strides that show the same elements in another shape, when such strides exist. The counts must agree.
std::optional<Strides> view_strides(const Shape& shape, const Strides& strides, const Shape& wanted);
/// Whether two indices may mean the same place in memory (broadcast views). Never wrongly false.
bool overlaps_itself(const Tensor& x);
/// Entries start, start + step, .. (`length` of them) along axis, as a view outside the tape.
Tensor strided_alias(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length,
                     std::int64_t step);
/// The axes in another order, as a view outside the tape.
Tensor permuted_alias(const Tensor& x, const std::vector<std::int64_t>& axes);
/// The last two axes swapped, as a view outside the tape.
Tensor transposed_alias(const Tensor& x);
/// The gradient of a narrow, select or slice, made of ops on the tape: zeros of `shape` with `dy` at the entries
/// start, start + step, .. along axis.
Tensor spread(const Tensor& dy, const Shape& shape, std::int64_t axis, std::int64_t start, std::int64_t step);
/// `x` summed to a shape that broadcasts to its own: the gradient of broadcasting, made of ops on the tape.
/// Throws Error(op, ...) when `shape` does not broadcast to the shape of `x`. A half type may be summed to f32, then
/// outside of the tape; it is returned as it is where there is nothing to sum.
Tensor sum_to_shape(std::string_view op, const Tensor& x, const Shape& shape, DType dtype);

}  // namespace potluck::detail
