#include "core/cpu/blocks.h"

namespace potluck::cpu {

MergedAxes merge_axes(std::span<const Tensor* const> operands) {
    MergedAxes merged;
    merged.strides.resize(operands.size());
    const Shape& shape = operands[0]->shape();
    // From the innermost axis outwards; the vectors are filled in that order and turned round at the end.
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

Cursor::Cursor(const Shape& sizes, const Strides& strides) {
    if (sizes.empty()) return;
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
        count_ = 0;
        return;
    }
    inner_size_ = sizes.back();
    inner_stride_ = strides.back();
    outer_sizes_.assign(sizes.begin(), sizes.end() - 1);
    outer_strides_.assign(strides.begin(), strides.end() - 1);
    position_.assign(outer_sizes_.size(), 0);
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
        count_ *= sizes[axis];
        constant_ = constant_ && strides[axis] == 0;
    }
}

std::int64_t Cursor::offset_of(std::int64_t index) const {
    std::int64_t offset = index % inner_size_ * inner_stride_;
    index /= inner_size_;
    for (std::size_t axis = outer_sizes_.size(); axis-- > 0;) {
        offset += index % outer_sizes_[axis] * outer_strides_[axis];
        index /= outer_sizes_[axis];
    }
    return offset;
}

void Cursor::seek(std::int64_t index) {
    inner_position_ = index % inner_size_;
    index /= inner_size_;
    outer_offset_ = 0;
    for (std::size_t axis = outer_sizes_.size(); axis-- > 0;) {
        position_[axis] = index % outer_sizes_[axis];
        outer_offset_ += position_[axis] * outer_strides_[axis];
        index /= outer_sizes_[axis];
    }
}

void Cursor::next_row() {
    inner_position_ = 0;
    for (std::size_t axis = outer_sizes_.size(); axis-- > 0;) {
        outer_offset_ += outer_strides_[axis];
        if (++position_[axis] < outer_sizes_[axis]) return;
        outer_offset_ -= outer_strides_[axis] * outer_sizes_[axis];
        position_[axis] = 0;
    }
}

}  // namespace potluck::cpu
