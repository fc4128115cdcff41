#include "nn/train/copy_rate.h"

#include <algorithm>
#include <chrono>

#include "autograd/grad_mode.h"
#include "core/error.h"
#include "core/factories.h"

namespace potluck {
namespace {

constexpr std::int64_t first_size = std::int64_t{4} << 20;
constexpr std::int64_t last_size = std::int64_t{512} << 20;
constexpr double long_enough = 4e-3;  // seconds, as in matmul_rate.cpp

/// Seconds of the fastest of some copies.
double seconds_of_copy(std::int64_t bytes, Device device) {
    using Clock = std::chrono::steady_clock;
    const Shape shape = {bytes / size_of(DType::f32)};
    const Tensor from = ones(shape, {DType::f32, device});
    const Tensor to = zeros(shape, {DType::f32, device});
    synchronize(device);
    double best = 0.0;
    for (int round = 0; round < 3; ++round) {
        const auto start = Clock::now();
        to.copy_(from);
        synchronize(device);
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        best = round == 0 ? seconds : std::min(best, seconds);
    }
    return best;
}

}  // namespace

CopyRate measure_copy_rate(Device device) {
    const NoGrad guard;
    CopyRate rate;
    for (std::int64_t size = first_size; size <= last_size; size *= 2) {
        double seconds = 0.0;
        try {
            seconds = seconds_of_copy(size, device);
        } catch (const OutOfMemory&) {
            if (rate.size == 0) throw;
            break;
        }
        // The last one counts: smaller ones may have stayed in a cache.
        rate = {2.0 * static_cast<double>(size) / seconds, size};
        if (seconds >= long_enough) break;
    }
    return rate;
}

}  // namespace potluck
