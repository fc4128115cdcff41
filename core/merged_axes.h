#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// The axes that remain when several operands of one shape are walked together in row-major order: axes of size 1 are
/// dropped, and neighbours that every operand crosses in equal steps are merged. Contiguous operands have one axis.
struct MergedAxes {
    Shape sizes;                   // outermost first; empty for a single element
    std::vector<Strides> strides;  // [operand][axis], in elements
};
MergedAxes merge_axes(std::span<const Tensor* const> operands);

}  // namespace potluck
