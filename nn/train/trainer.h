#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "data/loader.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/optim/schedule.h"
#include "nn/train/run_folder.h"

namespace potluck {

struct TrainerOptions {
    std::int64_t steps = 0;         // updates in all; 0: until the epochs are done
    std::int64_t epochs = 0;        // passes over the loader; 0: until the steps are done
    std::int64_t accumulate = 1;    // micro-batches (batches of the loader) per update
    double clip = 0.0;              // largest norm of the gradient; 0: no clipping
    optim::Schedule schedule = {};  // learning rate of each update; none: the optimizer's own

    std::string run_folder =
        {};               // metrics.jsonl, summary.json and checkpoints go here; empty: nothing is written
    bool resume = false;  // go on from the newest checkpoint in run_folder
    std::int64_t checkpoint_every = 0;  // updates; 0: only at the end
    std::int64_t keep_checkpoints = 2;  // the newest ones; 0: all

    data::Loader* validation =
        nullptr;                      // one pass over it is a validation; may be the training loader itself
    std::int64_t validate_every = 0;  // updates; 0: only at the end

    std::int64_t log_every = 10;   // updates between lines when the output is no terminal
    bool quiet = false;            // no progress at all
    double flops_per_token = 0.0;  // of forward and backward, for mfu; 0: 6 * parameters

    /// The mean loss over the targets that count; none: the module's own loss(). Targets of an integer dtype count
    /// unless they are -100, others row by row.
    std::function<Tensor(const Tensor& inputs, const Tensor& targets)> loss = {};
    /// Asked after each update: true saves a checkpoint and ends the run. A signal handler's flag belongs here.
    std::function<bool()> should_stop = {};
    /// Called after each update.
    std::function<void(const StepMetrics&)> on_step = {};
};

/// Trains a module on a loader's batches.
///
/// One update takes `accumulate` micro-batches. Its loss is the mean over all of their targets together, so it does not
/// matter how they are cut into micro-batches. An epoch's last window may hold fewer; it is an update like any other.
/// The schedule counts updates.
///
/// A run with a run folder can be resumed, in another process too, and then gives the same bits as if it had never
/// stopped. A loss or gradient that is not finite ends it with an Error that names the step, before the parameters are
/// touched.
class Trainer {
public:
    /// Keeps references: module, optimizer and loaders must outlive it. Throws Error for options out of range.
    Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader, TrainerOptions options);

    /// Trains to the end, or until should_stop().
    TrainingSummary fit();

private:
    using Window = std::vector<data::Batch>;
    class Run;

    void start(Run& run);
    void run_epoch(Run& run);
    void update(Run& run, const Window& window, bool ends_epoch);
    double accumulate_gradients(const Window& window, double targets);
    double checked_gradient_norm() const;
    double validate();
    void save_state(Run& run);
    TrainingSummary finish(Run& run);

    bool is_done() const;
    Tensor loss_of(const Tensor& inputs, const Tensor& targets);

    nn::Module& module_;
    optim::Optimizer& optimizer_;
    data::Loader& loader_;
    TrainerOptions options_;
    std::int64_t step_ = 0;    // updates done
    std::int64_t epochs_ = 0;  // epochs done
    bool stopped_ = false;
};

}  // namespace potluck
