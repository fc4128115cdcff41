#pragma once

// Views of a tensor that only change its strides, outside the tape. For .cpp and .cu files.

#include <optional>
#include <vector>

#include "core/tensor.h"

namespace potluck::detail {

/// The strides that show the same elements in another shape, if they exist. The element counts must agree.
std::optional<Strides> view_strides(const Shape& shape, const Strides& strides, const Shape& wanted);
/// Whether two indices may refer to the same memory (broadcast views). Conservative: never wrongly false.
bool overlaps_itself(const Tensor& x);
/// Entries start, start + step, .. (`length` of them) along an axis, as a view outside the tape.
Tensor strided_alias(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length,
                     std::int64_t step);
/// The axes in another order, as a view outside the tape.
Tensor permuted_alias(const Tensor& x, const std::vector<std::int64_t>& axes);
/// The last two axes swapped, as a view outside the tape.
Tensor transposed_alias(const Tensor& x);

}  // namespace potluck::detail
