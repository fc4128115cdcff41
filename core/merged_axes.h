#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// The axes that remain when several operands of one shape are traversed together in row-major order: axes of size 1
/// are dropped, and neighbouring axes are merged where every operand's strides allow it. Contiguous operands keep one.
struct MergedAxes {
    Shape sizes;                   // outermost first; empty for a single element
    std::vector<Strides> strides;  // [operand][axis], in elements
};
MergedAxes merge_axes(std::span<const Tensor* const> operands);

}  // namespace potluck
