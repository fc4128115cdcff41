#pragma once

// Internal: checks that options of several optimizers need.

#include <cmath>

#include "core/error.h"
#include "core/format.h"

namespace potluck::optim {

inline void check_share(const char* op, const char* name, double value) {
    if (!(value >= 0.0 && value < 1.0))
        throw Error(op, fmt::format("{} is {}. It must lie in [0, 1).", name, value));
}

inline void check_learning_rate(const char* op, double learning_rate) {
    if (!(learning_rate >= 0.0 && std::isfinite(learning_rate)))
        throw Error(
            op, fmt::format("the learning rate is {}. It must be finite and not negative.", learning_rate));
}

}  // namespace potluck::optim
