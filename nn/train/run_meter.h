#pragma once

// Internal: measures a training while the Trainer runs it.

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "data/loader.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/copy_rate.h"
#include "nn/train/execution.h"
#include "nn/train/matmul_rate.h"
#include "nn/train/metrics.h"

namespace potluck {

class RunMeter {
public:
    /// `flops_per_token`: of forward and backward; 0: 6 * parameters. `half_type`: what Autocast computes in, f32 without.
    /// Keeps references.
    RunMeter(const nn::Module& module, const optim::Optimizer& optimizer, const data::Loader& loader,
             double flops_per_token, DType half_type = DType::f32);

    /// Measures what the device can do, for mfu and the bottleneck; what has no memory for that is not measured. Raises no
    /// peak of memory.
    void measure_rates();
    /// The clock of the first update starts.
    void start();
    /// The batches of an update have come.
    void end_waiting();
    /// Seconds since the last update's line, for whoever knows what they went for.
    PhaseSeconds& time() { return time_; }
    /// Fills in what is counted of an update that was applied, before its validation.
    void measure(StepMetrics& metrics, std::span<const data::Batch> micro_batches);
    /// Fills in the time, after its validation, and shows the metrics in a trace.
    void close(StepMetrics& metrics);
    /// The clock of the next update starts.
    void end_update();

    /// Seconds of the wait before the first update, in which the loader shuffles the epoch and starts its workers.
    double first_wait() const { return first_wait_; }
    /// The time of all updates so far, without that wait.
    PhaseSeconds running_time() const;
    /// Speed, memory, time and bottleneck so far.
    void summarize(TrainingSummary& summary) const;

private:
    using Clock = std::chrono::steady_clock;

    double flops_per_token() const;
    std::optional<double> mfu(double tokens_per_second) const;
    MemoryUse memory() const;

    const nn::Module& module_;
    const optim::Optimizer& optimizer_;
    const data::Loader& loader_;
    double given_flops_;
    DType half_type_;
    std::int64_t held_before_;
    std::optional<MatmulRate> matmul_;
    std::optional<CopyRate> copy_;

    Clock::time_point update_start_ = Clock::now(), line_start_ = update_start_;
    double waited_ = 0.0;  // for the loader, when the update started
    double first_wait_ = 0.0;
    bool has_begun_ = false;
    PhaseSeconds time_;   // since the last line
    PhaseSeconds total_;  // of all lines
    std::int64_t updates_ = 0, micro_batches_ = 0, tokens_ = 0, samples_ = 0;
    double seconds_ = 0.0;
};

}  // namespace potluck
