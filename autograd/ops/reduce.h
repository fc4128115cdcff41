#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

/// One axis or several: sum(x, 1), sum(x, {0, 2}). Empty: all axes.
class Axes : public std::vector<std::int64_t> {
public:
    Axes() = default;
    template <std::integral T>
    requires(!std::same_as<T, bool>) Axes(T axis)
        : std::vector<std::int64_t>{static_cast<std::int64_t>(axis)} {}
    template <std::same_as<bool> T>
    Axes(T, Refused<"this is the place of the axes: write {} for all of them", sizeof(T)> = {});
    Axes(std::initializer_list<std::int64_t> axes) : std::vector<std::int64_t>(axes) {}
    Axes(std::vector<std::int64_t> axes) : std::vector<std::int64_t>(std::move(axes)) {}
};

// Reductions over the given axes (negative ones count from the back), or over all axes if none is given.
// keep_axes keeps reduced axes with size 1. An axis that is given twice or out of range is an Error.

/// Sum; of integers and bool as i64. f32 and half types are accumulated so that sums of millions of terms stay
/// accurate.
Tensor sum(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
/// Mean; of integers and bool as f32. NaN for an empty tensor.
Tensor mean(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
/// Largest element; NaN wins; the gradient goes to the first element with that value. Error for an empty tensor.
Tensor max(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
Tensor min(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
/// Index (i64) of the first largest element along one axis; without an axis, its row-major index in the whole tensor.
Tensor argmax(const Tensor& x);
Tensor argmax(const Tensor& x, std::int64_t axis, bool keep_axis = false);
Tensor argmin(const Tensor& x);
Tensor argmin(const Tensor& x, std::int64_t axis, bool keep_axis = false);
/// Variance with `correction` (1: unbiased, the default; 0: population), two-pass. NaN when count <= correction.
Tensor var(const Tensor& x, const Axes& axes = {}, double correction = 1.0, bool keep_axes = false);
template <std::same_as<bool> T>
Tensor var(const Tensor&, const Axes&, T,
           Refused<"the correction comes before keep_axes: write 1.0, true", sizeof(T)> = {});
/// Standard deviation. Its gradient is 0 where all elements are equal.
Tensor stddev(const Tensor& x, const Axes& axes = {}, double correction = 1.0, bool keep_axes = false);
template <std::same_as<bool> T>
Tensor stddev(const Tensor&, const Axes&, T,
              Refused<"the correction comes before keep_axes: write 1.0, true", sizeof(T)> = {});
/// The p-norm (p = 1, 2 or infinity by std::numeric_limits). Its gradient at 0 is 0.
Tensor norm(const Tensor& x, double p = 2.0, const Axes& axes = {}, bool keep_axes = false);
/// log(sum(exp(x))) without overflow; -inf for no elements or only -inf (gradient 0 there).
Tensor logsumexp(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
/// Whether any (all) elements are not 0, as bool.
Tensor any(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);
Tensor all(const Tensor& x, const Axes& axes = {}, bool keep_axes = false);

}  // namespace potluck
