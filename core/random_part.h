#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace potluck {

/// Describes a tensor as a part (a box) of a larger whole: its element (i0, i1, ...) is element (first[0] + i0,
/// first[1] + i1, ...) of the whole, and its number is the row-major position there. Both empty: the tensor is the
/// whole.
struct RandomPart {
    Shape whole, first;
};

/// The numbers of the elements: element (i0, i1, ...) has the number first + sum of strides[axis] * i.
struct ElementNumbers {
    std::int64_t first = 0;
    Strides strides;
};
/// Throws Error when a tensor of `shape` does not fit in `part.whole`, or the whole has 2^62 elements or more.
ElementNumbers element_numbers(const Shape& shape, const RandomPart& part);

/// The same numbers by row-major position in the part. The elements of a run have consecutive numbers; a whole tensor,
/// or one that is a part along its first axis only, is one run. Plain data, for kernels of any device.
struct NumberedRuns {
    static constexpr int most_axes = 6;

    std::int64_t first = 0;
    std::int64_t run = 1;             // elements per run
    int axes = 0;                     // of the grid of runs, outermost first
    std::int64_t sizes[most_axes]{};  // of these axes, in runs
    std::int64_t strides[most_axes]{};

    constexpr std::int64_t of(std::int64_t position) const {
        if (axes == 0) return first + position;
        std::int64_t rest = position / run;
        std::int64_t number = first + position % run;
        for (int axis = axes - 1; axis >= 0; --axis) {
            number += rest % sizes[axis] * strides[axis];
            rest /= sizes[axis];
        }
        return number;
    }
    /// The number of elements with consecutive numbers from `position` on, including that element.
    constexpr std::int64_t left_of_run(std::int64_t position) const { return run - position % run; }
};
/// Throws Error as element_numbers() does, and when more than most_axes axes are partial.
NumberedRuns numbered_runs(const Shape& shape, const RandomPart& part);

}  // namespace potluck
