#pragma once

// Internal: what limits the speed of a training.

#include <optional>

#include "nn/train/metrics.h"

namespace potluck {

struct BottleneckFacts {
    PhaseSeconds time = {};         // of the run, without the wait before the first update
    std::int64_t updates = 0;       // in that time
    double micro_batches = 1.0;     // of an update
    double flops = 0.0;             // that the model needs for all of these updates
    double flops_per_second = 0.0;  // of a matrix product, measured; 0: not known
    double bytes_per_second = 0.0;  // of a copy on the device, read and written; 0: not known
    MemoryUse memory = {};
};

/// The bytes that one update must move at least: each micro-batch reads the parameters twice, writes and reads the
/// activations, and writes the gradients; the optimizer reads the gradients, and reads and writes parameters and state. What
/// is read again because no cache holds it comes on top.
double least_bytes_of_update(const MemoryUse& memory, double micro_batches);

/// Names the limit by these rules, in this order; shares are of the time without validation and saving:
///
/// 1. input: waiting for data takes 10 % or more. A loader that is fast enough is never waited for, however slow the rest.
/// 2. bandwidth: copying batches to the device takes 10 % or more.
/// 3. compute or bandwidth: whichever needs more time at least, the matrix products at the measured rate of a matrix
///    product, or the bytes of least_bytes_of_update() at the measured rate of a copy.
///
/// None when no update was made, or when the third rule lacks a rate.
std::optional<Bottleneck> find_bottleneck(const BottleneckFacts& facts);

}  // namespace potluck
