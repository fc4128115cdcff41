#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace potluck {

/// A tensor as a part (a box) of a larger one: its element (i0, i1, ...) is (first[0] + i0, first[1] + i1, ...) there, and
/// has the number of that place in row-major order. Both empty: the tensor is the whole.
struct RandomPart {
    Shape whole, first;
};

/// Numbers of elements: that of element (i0, i1, ...) is first + sum of strides[axis] * i.
struct ElementNumbers {
    std::int64_t first = 0;
    Strides strides;
};
/// Throws Error when a tensor of `shape` is no part of `part.whole`, or the whole has 2^62 elements or more.
ElementNumbers element_numbers(const Shape& shape, const RandomPart& part);

/// The same by row-major position in the part. Elements of a run have consecutive numbers; a whole tensor, and one that is a
/// part of its first axis alone, is one run. Plain data, for kernels of any device.
struct NumberedRuns {
    static constexpr int most_axes = 6;

    std::int64_t first = 0;
    std::int64_t run = 1;             // elements of a run
    int axes = 0;                     // of runs, outermost first
    std::int64_t sizes[most_axes]{};  // in runs
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
    /// How many elements from a position on, itself included, have consecutive numbers.
    constexpr std::int64_t left_of_run(std::int64_t position) const { return run - position % run; }
};
/// Throws Error as element_numbers() does, and for more than most_axes axes that are parts.
NumberedRuns numbered_runs(const Shape& shape, const RandomPart& part);

}  // namespace potluck
