#pragma once

// Strided and broadcast operands inside kernels: the address of element i (row-major) of each operand. The description
// is passed to the kernel by value, so that no copy to the device precedes a launch.

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/merged_axes.h"
#include "core/op_scope.h"
#include "cuda/launch.h"

namespace potluck::cuda {

/// The most axes after merging (see merge_axes) that a kernel supports.
inline constexpr int most_axes = 12;

template <int Operands>
struct Layout {
    int axes = 0;
    std::int64_t count = 1;  // elements
    std::int64_t sizes[most_axes] = {};
    std::int64_t strides[Operands][most_axes] = {};  // in elements

    /// Whether operand `operand` is in row-major order without gaps.
    bool is_contiguous(int operand) const { return axes == 0 || (axes == 1 && strides[operand][0] == 1); }
    /// Whether every operand does.
    bool is_contiguous() const {
        for (int operand = 0; operand < Operands; ++operand)
            if (!is_contiguous(operand)) return false;
        return true;
    }

    /// Memory offset of element `index` from the first, for each operand. Index is the integer type of the divisions:
    /// 32 bits are several times faster than 64 where they suffice, see fits().
    template <class Index>
    __host__ __device__ void offsets(Index index, std::int64_t (&offset)[Operands]) const {
        for (int operand = 0; operand < Operands; ++operand) offset[operand] = 0;
        for (int axis = axes - 1; axis >= 0; --axis) {
            const auto size = static_cast<Index>(sizes[axis]);
            const auto rest = static_cast<Index>(index / size);
            const auto position = static_cast<std::int64_t>(index - rest * size);
            for (int operand = 0; operand < Operands; ++operand)
                offset[operand] += position * strides[operand][axis];
            index = rest;
        }
    }

    /// Whether every position fits in Index. (Offsets are always computed in 64 bits.)
    template <class Index>
    bool fits() const {
        return std::cmp_less_equal(count, std::numeric_limits<Index>::max());
    }
};

/// The common traversal of operands of one shape. Throws Error if more than most_axes axes remain after merging.
template <int Operands>
Layout<Operands> layout_of(const std::array<const Tensor*, Operands>& operands) {
    const MergedAxes merged = merge_axes(operands);
    if (merged.sizes.size() > static_cast<std::size_t>(most_axes))
        throw Error(OpScope::current(), "a CUDA kernel walks at most " + std::to_string(most_axes) +
                                            " axes, and the strides of " + to_string(operands[0]->shape()) +
                                            " leave " + std::to_string(merged.sizes.size()) +
                                            ". Call contiguous() on the operands.");
    Layout<Operands> layout;
    layout.axes = static_cast<int>(merged.sizes.size());
    for (int axis = 0; axis < layout.axes; ++axis) {
        layout.sizes[axis] = merged.sizes[static_cast<std::size_t>(axis)];
        layout.count *= layout.sizes[axis];
        for (int operand = 0; operand < Operands; ++operand)
            layout.strides[operand][axis] =
                merged.strides[static_cast<std::size_t>(operand)][static_cast<std::size_t>(axis)];
    }
    return layout;
}

}  // namespace potluck::cuda
