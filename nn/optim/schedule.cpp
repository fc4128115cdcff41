#include "nn/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/format.h"

namespace potluck::optim {
namespace {

void check(const ScheduleOptions& options) {
    if (!(options.peak >= 0.0) || std::isinf(options.peak) ||
        !(options.floor >= 0.0 && options.floor <= options.peak)) {
        throw Error("schedule",
                    fmt::format("peak is {} and floor is {}. Both must be finite, with 0 <= floor <= peak.",
                                options.peak, options.floor));
    }
    if (options.steps < 1 || options.warmup < 0) {
        throw Error(
            "schedule",
            fmt::format("steps is {} and warmup is {}. There must be at least 1 step, and no negative "
                        "warm-up.",
                        options.steps, options.warmup));
    }
}

/// Warm-up, then decay along `shape(progress)`, which is 1 at progress 0 and 0 at progress 1.
template <class DownShape>
Schedule warm_up_then(const ScheduleOptions& options, DownShape shape) {
    check(options);
    return [options, shape](std::int64_t step) {
        if (step < 0) throw Error("schedule", fmt::format("step is {}. Steps count from 0.", step));
        if (step < options.warmup) {
            return options.peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
        }
        const std::int64_t start = std::max<std::int64_t>(options.warmup - 1, 0);  // the update at the peak
        const double progress = step >= options.steps ? 1.0
                                                      : static_cast<double>(step - start) /
                                                            static_cast<double>(options.steps - start);
        return options.floor + (options.peak - options.floor) * shape(progress);
    };
}

}  // namespace

Schedule cosine_schedule(const ScheduleOptions& options) {
    return warm_up_then(options,
                        [](double progress) { return 0.5 * (1.0 + std::cos(std::numbers::pi * progress)); });
}

Schedule linear_schedule(const ScheduleOptions& options) {
    return warm_up_then(options, [](double progress) { return 1.0 - progress; });
}

Schedule constant_schedule(const ScheduleOptions& options) {
    return warm_up_then({.peak = options.peak, .warmup = options.warmup, .floor = options.peak},
                        [](double) { return 0.0; });
}

}  // namespace potluck::optim
