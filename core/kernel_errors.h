#pragma once

// Internal: error messages for bad input that only a kernel can detect. Every device uses these texts, so that a
// program fails with the same message wherever it runs.

#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "core/tensor.h"

namespace potluck {

/// Element `position` (row-major) of indices of this shape is `value`, which is outside [0, size). `what` names the
/// indices ("id", "index"), `of_what` what they select ("the 50257 rows of the weight").
Error bad_index(std::string_view op, std::string_view what, const Shape& shape, std::int64_t position,
                std::int64_t value, std::int64_t size, std::string_view of_what);

/// What the indices of gather and scatter_add select: "the entries of (3, 4) along axis 1".
std::string entries_along(const Shape& shape, std::int64_t axis);

/// Throws Error unless an index of gather or scatter_add has the rank of x and, except along `axis`, no larger sizes.
void check_index_shape(std::string_view op, const Tensor& x, std::int64_t axis, const Tensor& index);

/// A label of cross_entropy is neither one of the classes nor ignore_index.
Error bad_label(std::int64_t label, std::int64_t position, std::int64_t classes, std::int64_t ignore_index);

/// Throws Error unless k elements can be selected from rows of n.
void check_topk(std::int64_t k, std::int64_t n);

/// multinomial got rows without any weights.
Error no_weights();

/// A weight of multinomial is negative, infinite or NaN.
Error bad_weight(double weight, std::int64_t position, std::int64_t row);

/// A row of weights has fewer positive ones than multinomial needs.
Error too_few_weights(std::int64_t row, std::int64_t positive, std::int64_t needed);

}  // namespace potluck
