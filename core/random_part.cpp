#include "core/random_part.h"

#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

ElementNumbers element_numbers(const Shape& shape, const RandomPart& part) {
    const bool is_whole = part.whole.empty();
    const Shape& whole = is_whole ? shape : part.whole;
    if (whole.size() != shape.size() || (!is_whole && part.first.size() != shape.size()))
        throw Error(OpScope::current(), fmt::format("{} is no part of {}: they have different axes.",
                                                    pretty(shape), pretty(whole)));
    ElementNumbers numbers{0, Strides(shape.size())};
    constexpr std::int64_t most = std::int64_t{1} << 62;
    std::int64_t stride = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        const std::int64_t first = is_whole ? 0 : part.first[axis];
        if (first < 0 || first > whole[axis] - shape[axis])
            throw Error(OpScope::current(),
                        fmt::format("axis {} has {} of {} elements from {} on. A part lies inside the whole.",
                                    axis, shape[axis], whole[axis], first));
        numbers.strides[axis] = stride;
        numbers.first += first * stride;
        if (whole[axis] > 0 && stride > most / whole[axis])
            throw Error(OpScope::current(), fmt::format("{} has too many elements.", pretty(whole)));
        if (whole[axis] > 0) stride *= whole[axis];
    }
    return numbers;
}

NumberedRuns numbered_runs(const Shape& shape, const RandomPart& part) {
    const ElementNumbers numbers = element_numbers(shape, part);
    // Innermost first: an axis extends the run of the axis inside it, or begins a new one.
    std::vector<std::int64_t> sizes{1}, strides{1};
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        if (shape[axis] == 1) continue;
        if (numbers.strides[axis] == sizes.back() * strides.back()) {
            sizes.back() *= shape[axis];
        } else {
            sizes.push_back(shape[axis]);
            strides.push_back(numbers.strides[axis]);
        }
    }
    NumberedRuns runs;
    runs.first = numbers.first;
    runs.run = sizes[0];
    runs.axes = static_cast<int>(sizes.size()) - 1;
    if (runs.axes > NumberedRuns::most_axes)
        throw Error(OpScope::current(),
                    fmt::format("{} is a part of {} in too many axes.", pretty(shape), pretty(part.whole)));
    for (std::size_t i = 0; i < static_cast<std::size_t>(runs.axes); ++i) {
        runs.sizes[i] = sizes[sizes.size() - 1 - i];
        runs.strides[i] = strides[sizes.size() - 1 - i];
    }
    return runs;
}

}  // namespace potluck
