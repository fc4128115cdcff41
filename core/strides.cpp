#include "core/strides.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace potluck::detail {

std::optional<Strides> view_strides(const Shape& shape, const Strides& strides, const Shape& wanted) {
    if (element_count(wanted) == 0) return contiguous_strides(wanted);

    // Merge neighbouring axes that a single stride covers, ..
    struct Run {
        std::int64_t size, stride;
    };
    std::vector<Run> runs;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        if (shape[axis] == 1) continue;
        if (!runs.empty() && runs.back().stride == shape[axis] * strides[axis])
            runs.back() = {runs.back().size * shape[axis], strides[axis]};
        else
            runs.push_back({shape[axis], strides[axis]});
    }
    // .. then split them into the wanted axes, starting with the last.
    Strides result(wanted.size());
    Run run{1, 1};
    for (std::size_t axis = wanted.size(); axis-- > 0;) {
        if (wanted[axis] != 1 && run.size == 1) {
            run = runs.back();
            runs.pop_back();
        }
        if (run.size % wanted[axis] != 0) return std::nullopt;
        result[axis] = run.stride;
        run.size /= wanted[axis];
        run.stride *= wanted[axis];
    }
    return result;
}

bool overlaps_itself(const Tensor& x) {
    if (x.is_contiguous() || x.count() <= 1) return false;
    // In order of increasing stride, each axis must step over the whole range that the previous axes reach.
    std::vector<std::size_t> axes;
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis)
        if (x.shape()[axis] > 1) axes.push_back(axis);
    std::sort(axes.begin(), axes.end(), [&](std::size_t a, std::size_t b) {
        return std::abs(x.strides()[a]) < std::abs(x.strides()[b]);
    });
    std::int64_t reach = 0;
    for (const std::size_t axis : axes) {
        const std::int64_t step = std::abs(x.strides()[axis]);  // forwards or backwards
        if (step <= reach) return true;
        reach += step * (x.shape()[axis] - 1);
    }
    return false;
}

Tensor strided_alias(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length,
                     std::int64_t step) {
    Shape shape = x.shape();
    Strides strides = x.strides();
    const auto at = static_cast<std::size_t>(axis);
    // An empty view starts where x starts: nothing is read, and the offset must lie inside the storage.
    const std::int64_t offset = length == 0 || x.count() == 0 ? x.offset() : x.offset() + start * strides[at];
    shape[at] = length;
    strides[at] *= step;
    return x.alias(std::move(shape), std::move(strides), offset);
}

Tensor permuted_alias(const Tensor& x, const std::vector<std::int64_t>& axes) {
    Shape shape(axes.size());
    Strides strides(axes.size());
    for (std::size_t i = 0; i < axes.size(); ++i) {
        shape[i] = x.shape()[static_cast<std::size_t>(axes[i])];
        strides[i] = x.strides()[static_cast<std::size_t>(axes[i])];
    }
    return x.alias(std::move(shape), std::move(strides), x.offset());
}

Tensor transposed_alias(const Tensor& x) {
    std::vector<std::int64_t> axes(static_cast<std::size_t>(x.ndim()));
    std::iota(axes.begin(), axes.end(), std::int64_t{0});
    std::swap(axes[axes.size() - 2], axes[axes.size() - 1]);
    return permuted_alias(x, axes);
}

}  // namespace potluck::detail
