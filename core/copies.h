#pragma once

// Conversions and copies of tensors as memory: no place on the tape, no gradient. For .cpp and .cu files.

#include "core/tensor.h"

namespace potluck::detail {

/// `x` in another dtype, or `x` itself.
Tensor cast(const Tensor& x, DType dtype);
/// The same; an undefined tensor stays one.
Tensor cast_or_none(const Tensor& x, DType dtype);
/// Fresh memory of `shape`, of the dtype and on the device of `like`; an undefined tensor where it is not wanted.
Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like);
/// Integers and bool as f32; floating tensors as they are.
Tensor as_floating(const Tensor& x);
/// Row-major copy of `x` with memory of its own.
Tensor copy_of(const Tensor& x);
/// `x` in row-major order, or `x` itself.
Tensor as_contiguous(const Tensor& x);
/// Another shape with the same count: a view where strides allow, else a copy.
Tensor reshaped(const Tensor& x, const Shape& shape);
/// (.., n) as (rows, n): a view where strides allow, else a copy. `x` has at least one axis.
Tensor as_rows(const Tensor& x);

// The kernels of the contract (core/backend.h) that code of all kinds needs, so that it need not know the others.

/// to = from.
void copy_into(const Tensor& from, Tensor& to);
/// to = value.
void fill_with(const Scalar& value, Tensor& to);
/// to += x.
void add_into(const Tensor& x, Tensor& to);
/// Copies `n` bytes of a contiguous `x` to `to`, memory of the host, beginning with byte `first`.
void read_bytes(const Tensor& x, std::int64_t first, std::int64_t n, void* to);

}  // namespace potluck::detail
