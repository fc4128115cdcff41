#include "core/cpu/blocks.h"

namespace potluck::cpu {

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
