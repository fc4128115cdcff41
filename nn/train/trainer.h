#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/options.h"
#include "core/tensor.h"
#include "data/loader.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/optim/schedule.h"
#include "nn/train/execution.h"
#include "nn/train/loss.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/precision.h"
#include "nn/train/report.h"
#include "nn/train/run_folder.h"

namespace potluck {

enum class NonFinite : std::uint8_t { error, skip };

struct TrainerOptions {
    std::int64_t steps = 0;         // total updates; 0: until the epochs are done
    std::int64_t epochs = 0;        // passes over the loader; 0: until the steps are done
    std::int64_t accumulate = 1;    // micro-batches (batches of the loader) per update
    double clip = 0.0;              // largest gradient norm; 0: no clipping
    optim::Schedule schedule = {};  // learning rate of each update; none: the optimizer's own

    /// Metrics, summary, report and checkpoints go here, see RunFolder; empty: nothing is written.
    std::string run_folder = {};
    /// Go on from the newest sound checkpoint in run_folder; all damaged: an Error. Where there is none: an Error, or a new run.
    bool resume = false, resume_if_possible = false;
    std::int64_t checkpoint_every = 0;  // updates; 0: only at the end
    std::int64_t keep_checkpoints = 2;  // the newest complete ones; 0: all
    /// Whether training goes on while checkpoints are written, from a copy of parameters, buffers and optimizer state in
    /// host memory. See CheckpointWriter for what it takes and what becomes of errors: a disk that is full ends the run
    /// at the update after. The last checkpoint of a run is waited for, and needs no copy.
    bool async_checkpoints = true;

    data::Loader* validation =
        nullptr;                      // one pass over it is a validation; may be the training loader itself
    std::int64_t validate_every = 0;  // updates; 0: only at the end

    std::int64_t log_every = 10;   // updates between lines when the output is not a terminal
    bool quiet = false;            // show no progress
    double flops_per_token = 0.0;  // of forward and backward, for mfu; 0: 6 * parameters
    /// Names and values that the report of the run shows besides those that the trainer knows.
    std::vector<std::pair<std::string, std::string>> settings = {};
    /// Pictures for the report and what the model says of them. Asked at the end of a run with a folder.
    std::function<std::vector<ReportPicture>()> pictures = {};

    /// The loss: a function of (inputs, targets) that returns the mean over the valid targets, or a LossSum; none: the
    /// module's own loss(). See count_targets() for which targets are valid.
    LossFunction loss = {};
    /// What forward and backward compute in; parameters and optimizer state keep their dtypes. In f16 the loss is scaled by
    /// a LossScaler with these options, and updates whose gradients overflow are passed over.
    Precision precision = Precision::f32;
    LossScalerOptions loss_scaler = {};
    /// The effect of a loss or gradient with an infinity or NaN: it ends the run with an Error, or its update is
    /// skipped.
    NonFinite on_non_finite = NonFinite::error;
    /// Called after each update: true saves a checkpoint and ends the run. Check a signal handler's flag here.
    std::function<bool()> should_stop = {};
    /// Called after each update.
    std::function<void(const StepMetrics&)> on_step = {};
};

/// Trains a module on a loader's batches.
///
/// One update takes `accumulate` micro-batches. Its loss is the mean over all of their targets together, so the result
/// does not depend on how they are divided into micro-batches, dropout included. An epoch's last update may have fewer
/// of them; it is a normal update. The schedule counts updates. Micro-batches without valid targets are skipped; if
/// none remains there is no update: parameters, optimizer, buffers and schedule are unchanged, and this is reported
/// once.
///
/// A run with a run folder can be resumed, even by another process, and then gives the same bits as an uninterrupted
/// run. A loss or gradient that is not finite ends it with an Error that names the step, unless on_non_finite says
/// otherwise; then, too, everything is as it was before the update. If memory runs
/// out, the OutOfMemory says which micro-batch would fit. The frequency of validation never changes the run.
class Trainer {
public:
    /// Trains on the module's device. Keeps references: module, optimizer and loaders must outlive it. Throws Error for
    /// options out of range, and for an optimizer that updates nothing of the module.
    Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader, TrainerOptions options);
    /// The same by another way of computing an update; options.loss and options.precision belong to `execution` then and
    /// must be left alone.
    Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader, TrainerOptions options,
            std::unique_ptr<Execution> execution);
    template <std::size_t N>
    Trainer(nn::Module&, optim::Optimizer&, data::Loader&, MistypedOptions<N>,
            Refused<"no such option: see TrainerOptions", N> = {});

    /// Trains to the end, or until should_stop().
    TrainingSummary fit();

private:
    class Run;

    void check_options() const;
    void start(Run& run);
    void resume(Run& run);
    void run_epoch(Run& run);
    void update(Run& run, std::span<const data::Batch> micro_batches, bool ends_epoch);
    UpdateResult compute(std::span<const data::Batch> micro_batches, const UpdateRequest& request);
    std::string what_fits(std::span<const data::Batch> micro_batches);
    bool is_applied(Run& run, const UpdateResult& result);
    std::optional<double> validate(Run& run);
    void save_state(Run& run, bool is_last);
    TrainingSummary finish(Run& run);
    TrainingSummary summary_of(const Run& run) const;
    void write_report(Run& run, const std::string& status, const TrainingSummary& summary,
                      bool with_pictures = false) const;
    std::vector<std::pair<std::string, std::string>> settings() const;

    bool is_done() const;
    Device device() const;

    nn::Module& module_;
    optim::Optimizer& optimizer_;
    data::Loader& loader_;
    TrainerOptions options_;
    std::unique_ptr<Execution> execution_;
    std::int64_t step_ = 0;    // completed updates
    std::int64_t epochs_ = 0;  // completed epochs
    bool stopped_ = false;
};

}  // namespace potluck
