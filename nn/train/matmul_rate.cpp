#include "nn/train/matmul_rate.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "autograd/grad_mode.h"
#include "autograd/ops/matmul.h"
#include "core/error.h"
#include "core/factories.h"
#include "core/format.h"

namespace potluck {
namespace {

constexpr std::int64_t first_size = 512;
constexpr std::int64_t last_size = 8192;
constexpr double long_enough =
    4e-3;  // seconds; launching a kernel and reading a number take some 50 microseconds

/// Seconds of the fastest of several products.
double seconds_of_product(std::int64_t size, DType dtype, Device device) {
    using Clock = std::chrono::steady_clock;
    const Tensor a = ones({size, size}, {dtype, device});
    double best = 0.0;
    for (int round = 0; round < 4; ++round) {
        const auto start = Clock::now();
        matmul(a, a)[0][0].item();  // reading a number waits for the device
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        best = round == 0 ? seconds : std::min(best, seconds);
    }
    return best;
}

}  // namespace

MatmulRate measure_matmul_rate(DType dtype, Device device) {
    if (!is_floating(dtype))
        throw Error("measure_matmul_rate", fmt::format("the dtype is {}. Give a floating one.", dtype));
    const NoGrad guard;
    MatmulRate rate{.dtype = dtype};
    for (std::int64_t size = first_size; size <= last_size; size *= 2) {
        double seconds = 0.0;
        try {
            seconds = seconds_of_product(size, dtype, device);
        } catch (const Error&) {
            if (rate.size == 0) throw;
            break;  // training left no memory for larger matrices
        }
        const double reached = 2.0 * static_cast<double>(size * size * size) / seconds;
        if (reached > rate.flops_per_second) {
            rate.flops_per_second = reached;
            rate.size = size;
        }
        if (seconds >= long_enough) break;
    }
    return rate;
}

DType dtype_of_most_parameters(const nn::Module& module) {
    std::map<DType, std::int64_t> counts;
    for (const Tensor& parameter : module.parameters()) counts[parameter.dtype()] += parameter.count();
    if (counts.empty()) throw Error("dtype_of_most_parameters", "the module has no parameters.");
    return std::max_element(counts.begin(), counts.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; })
        ->first;
}

}  // namespace potluck
