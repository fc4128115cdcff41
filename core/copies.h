#pragma once

// Conversions and copies of tensors outside the tape, without gradients. For .cpp and .cu files.

#include "core/tensor.h"

namespace potluck::detail {

/// `x` in another dtype, or `x` itself.
Tensor cast(const Tensor& x, DType dtype);
/// Like cast(); an undefined tensor stays undefined.
Tensor cast_or_none(const Tensor& x, DType dtype);
/// New memory of `shape`, with the dtype and device of `like`; an undefined tensor if it is not wanted.
Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like);
/// Converts integers and bool to f32; returns floating tensors unchanged.
Tensor as_floating(const Tensor& x);
/// A row-major copy of `x` with its own memory.
Tensor copy_of(const Tensor& x);
/// `x` in row-major order, or `x` itself.
Tensor as_contiguous(const Tensor& x);
/// The same elements in another shape: a view where the strides allow it, else a copy.
Tensor reshaped(const Tensor& x, const Shape& shape);
/// (.., n) as (rows, n): a view where the strides allow it, else a copy. `x` has at least one axis.
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
