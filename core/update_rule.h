#pragma once

// Internal: how an update is decided (see core/update_control.h), the same on every device.

#include "core/square_sums.h"
#include "core/update_control.h"

namespace potluck {

/// Whether a number is neither infinite nor NaN, for kernels.
constexpr bool is_finite_number(double value) { return value - value == 0.0; }

/// `bad_element`: an op met an invalid element that has not been reported. `root` is a square-root function.
template <class Root>
constexpr void decide_update(UpdateNumbers& update, bool bad_element, Root root) {
    const double weight = update.targets * update.loss_scale;
    const double norm = norm_of({update.sum_of_squares, update.large_squares, update.small_squares}, root);
    update.gradient_norm = weight > 0.0 ? norm / weight : 0.0;
    update.gradient_scale = weight > 0.0 ? 1.0 / weight : 0.0;
    if (update.max_norm > 0.0 && update.gradient_norm > update.max_norm)
        update.gradient_scale *= update.max_norm / update.gradient_norm;
    const bool applied = !bad_element && weight > 0.0 && is_finite_number(update.gradient_norm) &&
                         is_finite_number(update.loss_sum);
    update.skip = applied ? 0.0 : 1.0;
    update.steps += applied ? 1.0 : 0.0;
}

}  // namespace potluck
