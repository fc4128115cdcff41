#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/options.h"

namespace potluck::optim {

/// The learning rate of each update: a pure function of its number (0 is the first), so that a resumed run goes on where
/// it was by its step alone. Any function will do: `[](std::int64_t step) { return step < 1000 ? 1e-3 : 1e-4; }`.
using Schedule = std::function<double(std::int64_t step)>;

struct ScheduleOptions {
    double peak = 1e-3;       // the learning rate at its highest
    std::int64_t steps = 1;   // updates in all; later ones use `floor`
    std::int64_t warmup = 0;  // updates until the peak: update t of them uses peak * (t + 1) / warmup
    double floor = 0.0;       // the learning rate at the end
};

// The peak is reached at exactly one update, number max(warmup - 1, 0), from where the way down to `floor` at number
// `steps` begins. A warm-up longer than the run only rises. All throw Error for options out of range.

/// Down along half a cosine wave (Loshchilov and Hutter, "SGDR", 2017): without warm-up, update t uses
/// floor + (peak - floor) * (1 + cos(pi * t / steps)) / 2.
Schedule cosine_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule cosine_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});
/// Down along a straight line.
Schedule linear_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule linear_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});
/// The peak for ever after the warm-up; `steps` and `floor` are not used.
Schedule constant_schedule(const ScheduleOptions& options);
template <std::size_t N>
Schedule constant_schedule(MistypedOptions<N>, Refused<"no such option: see ScheduleOptions", N> = {});

}  // namespace potluck::optim
