#pragma once

#include <vector>

#include "core/tensor.h"

namespace potluck {

// Views of the same elements in another shape or order: no copy unless said so.

/// Another shape with the same number of elements; one size may be -1. Copies when strides do not allow a view.
Tensor reshape(const Tensor& x, const Shape& shape);
/// Like reshape, but throws Error instead of copying.
Tensor view(const Tensor& x, const Shape& shape);
/// Merges the axes first..last (both included) into one.
Tensor flatten(const Tensor& x, std::int64_t first = 0, std::int64_t last = -1);
/// Swaps two axes.
Tensor transpose(const Tensor& x, std::int64_t first = -2, std::int64_t second = -1);
Tensor permute(const Tensor& x, const std::vector<std::int64_t>& axes);
/// Repeats axes of size 1 (and adds leading axes); -1 keeps a size.
Tensor expand(const Tensor& x, const Shape& shape);
/// Adds an axis of size 1 before `axis`.
Tensor unsqueeze(const Tensor& x, std::int64_t axis);
/// Removes an axis of size 1 (Error when it is not 1), or all of them.
Tensor squeeze(const Tensor& x, std::int64_t axis);
Tensor squeeze(const Tensor& x);
/// `length` entries along axis, from `start`. Throws Error when they reach outside.
Tensor narrow(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length);
/// Entry `index` along axis, without that axis. A negative index counts from the back.
Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index);
/// Entries start, start + step, .. below end along axis; start and end are clamped to the axis as in Python; step >= 1.
Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step = 1);
/// Pieces of `size` along axis; the last may be smaller.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, std::int64_t axis = 0);
/// Pieces of the given sizes, which must sum to the axis.
std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis = 0);

}  // namespace potluck
