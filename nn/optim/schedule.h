#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/options.h"

namespace potluck::optim {

/// The learning rate of each update: a pure function of its number (0 is the first), so that a resumed run needs only
/// its step to continue. Any function can be used: `[](std::int64_t step) { return step < 1000 ? 1e-3 : 1e-4; }`.
using Schedule = std::function<double(std::int64_t step)>;

struct ScheduleOptions {
    double peak = 1e-3;       // the highest learning rate
    std::int64_t steps = 1;   // total updates; later ones use `floor`
    std::int64_t warmup = 0;  // updates of the warm-up: update t of them uses peak * (t + 1) / warmup
    double floor = 0.0;       // the final learning rate
};

// The peak is used by exactly one update, number max(warmup - 1, 0); from there the rate decays to `floor` at number
// `steps`. If the warm-up is longer than the run, the rate only rises. All throw Error for options out of range.

/// Decays along half a cosine wave (Loshchilov and Hutter, "SGDR", 2017): without warm-up, update t uses
/// floor + (peak - floor) * (1 + cos(pi * t / steps)) / 2.
Schedule cosine_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule cosine_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});
/// Decays linearly.
Schedule linear_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule linear_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});
/// Stays at the peak after the warm-up; `steps` and `floor` are not used.
Schedule constant_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule constant_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});

}  // namespace potluck::optim
