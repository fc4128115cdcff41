#include "nn/train/bottleneck.h"

#include <algorithm>

#include "core/format.h"

namespace potluck {
namespace {

constexpr double noticeable = 0.1;  // share of the time that makes something the limit

std::string percent(double share) { return fmt::format("{:.0f} %", 100.0 * share); }

}  // namespace

const char* name_of(Bottleneck::Kind kind) {
    if (kind == Bottleneck::Kind::input) return "input";
    return kind == Bottleneck::Kind::compute ? "compute" : "bandwidth";
}

double least_bytes_of_update(const MemoryUse& memory, double micro_batches) {
    const auto bytes = [](std::int64_t count) { return static_cast<double>(count); };
    const double micro_batch =
        2 * bytes(memory.parameters) + 2 * bytes(memory.activations) + bytes(memory.gradients);
    const double step =
        bytes(memory.gradients) + 2 * bytes(memory.parameters) + 2 * bytes(memory.optimizer_state);
    return micro_batches * micro_batch + step;
}

std::optional<Bottleneck> find_bottleneck(const BottleneckFacts& facts) {
    const double seconds = facts.time.total() - facts.time[Phase::validation] - facts.time[Phase::saving];
    if (facts.updates == 0 || !(seconds > 0.0)) return std::nullopt;
    const double data = facts.time[Phase::data] / seconds, copy = facts.time[Phase::copy] / seconds;
    if (data >= noticeable)
        return Bottleneck{
            Bottleneck::Kind::input,
            fmt::format("The training waits for data {} of its time. More workers, cheaper items or a "
                        "faster disk would make it up to {:.2f} times as fast.",
                        percent(data), 1.0 / std::max(1.0 - data, 1e-3))};
    if (copy >= noticeable)
        return Bottleneck{Bottleneck::Kind::bandwidth,
                          fmt::format("Copying the batches to the device takes {} of the time. A smaller "
                                      "dtype of the inputs would help.",
                                      percent(copy))};
    if (!(facts.flops_per_second > 0.0) || !(facts.bytes_per_second > 0.0)) return std::nullopt;
    const double bytes =
        static_cast<double>(facts.updates) * least_bytes_of_update(facts.memory, facts.micro_batches);
    const double compute = facts.flops / facts.flops_per_second / seconds;
    const double bandwidth = bytes / facts.bytes_per_second / seconds;
    const bool by_compute = compute >= bandwidth;
    std::string reason = fmt::format(
        "The model's matrix products need at least {} of the time at the measured {:.4g} GFLOP/s, and the "
        "bytes that an update must move at least {} at the measured {:.4g} GB/s.",
        percent(compute), 1e-9 * facts.flops_per_second, percent(bandwidth), 1e-9 * facts.bytes_per_second);
    if (compute + bandwidth < 0.5)
        reason += fmt::format(
            " Together they explain less than half of it: the rest goes to what is neither, such as many "
            "small ops, whose start costs more than their work. Larger batches would help.");
    return Bottleneck{by_compute ? Bottleneck::Kind::compute : Bottleneck::Kind::bandwidth, reason};
}

}  // namespace potluck
