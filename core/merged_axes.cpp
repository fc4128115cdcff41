#include "core/merged_axes.h"

#include <algorithm>

namespace potluck {

MergedAxes merge_axes(std::span<const Tensor* const> operands) {
    MergedAxes merged;
    merged.strides.resize(operands.size());
    const Shape& shape = operands[0]->shape();
    // From the innermost axis outwards; the vectors are filled in that order and reversed at the end.
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        if (shape[axis] == 1) continue;
        bool joins = !merged.sizes.empty();
        for (std::size_t i = 0; joins && i < operands.size(); ++i)
            joins = operands[i]->strides()[axis] == merged.strides[i].back() * merged.sizes.back();
        if (joins) {
            merged.sizes.back() *= shape[axis];
            continue;
        }
        merged.sizes.push_back(shape[axis]);
        for (std::size_t i = 0; i < operands.size(); ++i)
            merged.strides[i].push_back(operands[i]->strides()[axis]);
    }
    std::reverse(merged.sizes.begin(), merged.sizes.end());
    for (Strides& strides : merged.strides) std::reverse(strides.begin(), strides.end());
    return merged;
}

}  // namespace potluck
