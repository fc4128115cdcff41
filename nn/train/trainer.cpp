#include "nn/train/trainer.h"

#include <chrono>
#include <cmath>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/matmul.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/memory.h"
#include "nn/train/checkpoint.h"
#include "nn/train/clip.h"
#include "nn/train/matmul_rate.h"
#include "nn/train/progress.h"

namespace potluck {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// How many targets a batch's loss is the mean of.
std::int64_t count_targets(const data::Batch& batch) {
    constexpr std::int64_t ignored = -100;
    if (!batch.targets.defined()) return batch.inputs.size(0);
    if (!is_integer(batch.targets.dtype())) return batch.targets.ndim() == 0 ? 1 : batch.targets.size(0);
    const NoGrad guard;
    return sum(batch.targets != ignored).item<std::int64_t>();
}

}  // namespace

/// What lives only while fit() runs.
class Trainer::Run {
public:
    explicit Run(const TrainerOptions& options) : progress(options.steps, options.log_every, options.quiet) {
        if (!options.run_folder.empty()) folder.emplace(options.run_folder, options.resume);
    }

    Progress progress;
    std::optional<RunFolder> folder;
    std::optional<double> train_loss, validation_loss;  // the last ones
    std::int64_t tokens = 0;                            // of this process
    double seconds = 0.0;                               // that these took
    Clock::time_point started = Clock::now();           // the current update
    std::int64_t saved_step = -1;
    std::string checkpoint;
};

Trainer::Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader,
                 TrainerOptions options)
    : module_(module), optimizer_(optimizer), loader_(loader), options_(std::move(options)) {
    const auto refuse = [](const std::string& message) { throw Error("trainer", message); };
    if (module_.parameters().empty()) refuse("the module has no parameters. Name them in members().");
    if (options_.steps < 0 || options_.epochs < 0 || (options_.steps == 0 && options_.epochs == 0)) {
        refuse(fmt::format("steps is {} and epochs is {}. Say how long to train by one of them.",
                           options_.steps, options_.epochs));
    }
    if (options_.accumulate < 1) {
        refuse(fmt::format("accumulate is {}. An update needs at least 1 micro-batch.", options_.accumulate));
    }
    if (!(options_.clip >= 0.0)) refuse(fmt::format("clip is {}. It must not be negative.", options_.clip));
    if (options_.log_every < 1) {
        refuse(fmt::format("log_every is {}. It must be at least 1.", options_.log_every));
    }
    if (!(options_.flops_per_token >= 0.0) || std::isinf(options_.flops_per_token)) {
        refuse(fmt::format("flops_per_token is {}. It must be finite and not negative.",
                           options_.flops_per_token));
    }
    if (options_.checkpoint_every < 0 || options_.keep_checkpoints < 0 || options_.validate_every < 0) {
        refuse("checkpoint_every, keep_checkpoints and validate_every must not be negative.");
    }
    if (options_.run_folder.empty() && (options_.resume || options_.checkpoint_every > 0)) {
        refuse("resume and checkpoint_every need a run_folder.");
    }
    if (options_.validation == nullptr && options_.validate_every > 0) {
        refuse("validate_every needs a validation loader.");
    }
}

TrainingSummary Trainer::fit() {
    Run run(options_);
    start(run);
    while (!is_done() && !stopped_) run_epoch(run);
    return finish(run);
}

bool Trainer::is_done() const {
    return (options_.steps > 0 && step_ >= options_.steps) ||
           (options_.epochs > 0 && epochs_ >= options_.epochs);
}

void Trainer::start(Run& run) {
    step_ = epochs_ = 0;
    stopped_ = false;
    module_.train();
    module_.zero_grad();
    if (!options_.resume) return;
    const std::optional<std::string> path = latest_checkpoint(run.folder->checkpoints());
    if (!path) {
        throw Error("trainer", fmt::format("there is no complete checkpoint in {} to resume from.",
                                           options_.run_folder));
    }
    const TrainingState state = load_checkpoint(*path, module_, optimizer_);
    loader_.set_state(state.loader);
    step_ = run.saved_step = state.step;
    epochs_ = state.epochs;
    run.checkpoint = *path;
    if (const std::optional<StepMetrics> last = run.folder->rewind(step_)) {
        run.train_loss = last->loss;
        run.validation_loss = last->validation_loss;
    }
    run.progress.say(fmt::format("resumed from {} at step {}", *path, step_));
}

void Trainer::run_epoch(Run& run) {
    Window window;
    for (data::Batch& batch : loader_) {
        window.push_back(std::move(batch));
        // With its last batch the loader moves on to the next epoch, and a checkpoint must count this one as done.
        const bool ends_epoch = loader_.state().item == 0;
        if (!ends_epoch && static_cast<std::int64_t>(window.size()) < options_.accumulate) continue;
        update(run, std::exchange(window, {}), ends_epoch);
        if (stopped_ || (options_.steps > 0 && step_ >= options_.steps)) return;
    }
}

void Trainer::update(Run& run, const Window& window, bool ends_epoch) {
    std::int64_t targets = 0;
    for (const data::Batch& batch : window) targets += count_targets(batch);

    StepMetrics metrics;
    metrics.learning_rate = options_.schedule ? options_.schedule(step_) : optimizer_.learning_rate();
    metrics.loss = accumulate_gradients(window, static_cast<double>(targets));
    metrics.gradient_norm = checked_gradient_norm();
    if (options_.clip > 0.0 && metrics.gradient_norm > options_.clip) {
        clip_grad_norm(module_, options_.clip);
    }
    optimizer_.set_learning_rate(metrics.learning_rate);
    optimizer_.step();
    optimizer_.zero_grad();
    ++step_;

    metrics.step = step_;
    metrics.epoch = epochs_;
    if (ends_epoch) ++epochs_;
    metrics.tokens = targets;
    metrics.seconds = seconds_since(run.started);
    metrics.tokens_per_second = static_cast<double>(targets) / metrics.seconds;
    metrics.memory_bytes = memory_statistics(module_.parameters()[0].device()).peak;
    run.tokens += targets;
    run.seconds += metrics.seconds;
    run.train_loss = metrics.loss;
    if (options_.validate_every > 0 && step_ % options_.validate_every == 0) {
        metrics.validation_loss = run.validation_loss = validate();
    }
    if (run.folder) run.folder->append(metrics);
    run.progress.show(metrics);
    if (options_.on_step) options_.on_step(metrics);
    if (options_.checkpoint_every > 0 && step_ % options_.checkpoint_every == 0) save_state(run);
    stopped_ = options_.should_stop && options_.should_stop();
    run.started = Clock::now();
}

/// Leaves the gradient of the mean loss over all `targets` of the window, and returns that loss.
double Trainer::accumulate_gradients(const Window& window, double targets) {
    const Device device = module_.parameters()[0].device();
    double total = 0.0;
    for (const data::Batch& batch : window) {
        const Tensor inputs = batch.inputs.to(device);
        const Tensor expected = batch.targets.defined() ? batch.targets.to(device) : Tensor();
        const Tensor loss = loss_of(inputs, expected);
        const double value = loss.item();
        if (!std::isfinite(value)) {
            throw Error(
                "trainer",
                fmt::format("the loss is {} at step {}. The parameters are those of step {}. Lower the "
                            "learning rate, clip gradients, or look for the op that made it.",
                            value, step_ + 1, step_));
        }
        const double share = targets > 0.0 ? static_cast<double>(count_targets(batch)) / targets : 0.0;
        backward(loss, {.gradient = full({}, share, {loss.dtype(), loss.device()})});
        total += share * value;
    }
    return total;
}

double Trainer::checked_gradient_norm() const {
    const double norm = gradient_norm(module_.parameters());
    if (std::isfinite(norm)) return norm;
    throw Error(
        "trainer",
        fmt::format("the gradient is {} at step {}, first in {}. The parameters are those of step {}. "
                    "Lower the learning rate, or look for the op that made it.",
                    norm, step_ + 1, first_non_finite_gradient(module_), step_));
}

double Trainer::validate() {
    const NoGrad guard;
    const nn::EvalMode evaluating(module_);
    const Device device = module_.parameters()[0].device();
    double total = 0.0, targets = 0.0;
    for (const data::Batch& batch : options_.validation->pass()) {
        const auto count = static_cast<double>(count_targets(batch));
        if (count == 0.0) continue;
        const Tensor expected = batch.targets.defined() ? batch.targets.to(device) : Tensor();
        total += count * loss_of(batch.inputs.to(device), expected).item();
        targets += count;
    }
    return targets > 0.0 ? total / targets : 0.0;
}

Tensor Trainer::loss_of(const Tensor& inputs, const Tensor& targets) {
    Tensor loss = options_.loss ? options_.loss(inputs, targets) : module_.loss(inputs, targets);
    if (loss.count() != 1) {
        throw Error("trainer",
                    fmt::format("the loss has shape {}. It must be one number, the mean over the targets.",
                                pretty(loss.shape())));
    }
    return loss.ndim() == 0 ? loss : loss.reshape({});
}

void Trainer::save_state(Run& run) {
    if (run.saved_step == step_) return;
    const TrainingState state{step_, epochs_, loader_.state(), generator_states(module_)};
    run.checkpoint =
        save_checkpoint(run.folder->checkpoints(), module_, optimizer_, state, options_.keep_checkpoints);
    run.saved_step = step_;
}

TrainingSummary Trainer::finish(Run& run) {
    TrainingSummary summary;
    summary.steps = step_;
    summary.finished = is_done();
    if (run.folder) save_state(run);
    if (stopped_ && run.folder)
        run.progress.say(fmt::format("stopped at step {}; saved {}", step_, run.checkpoint));
    if (options_.validation != nullptr && summary.finished) run.validation_loss = validate();
    summary.final_train_loss = run.train_loss;
    summary.final_val_loss = run.validation_loss;
    const Device device = module_.parameters()[0].device();
    summary.peak_memory_bytes = memory_statistics(device).peak;
    summary.checkpoint = run.checkpoint;
    if (run.seconds > 0.0) summary.tokens_per_second = static_cast<double>(run.tokens) / run.seconds;
    const bool given = options_.flops_per_token > 0.0;
    const double flops =
        given ? options_.flops_per_token : 6.0 * static_cast<double>(module_.parameter_count());
    if (run.folder && run.seconds > 0.0) {
        const MatmulRate peak = measure_matmul_rate(dtype_of_most_parameters(module_), device);
        summary.mfu = flops * summary.tokens_per_second / peak.flops_per_second;
        summary.mfu_formula = fmt::format(
            "flops_per_token * tokens_per_second / peak: {:.6g} {} * {:.6g} / {:.6g} FLOP/s of a product of "
            "two {} "
            "matrices of {} x {}, measured on {} after the run",
            flops, given ? "as given" : "(6 * parameters)", summary.tokens_per_second, peak.flops_per_second,
            peak.dtype, peak.size, peak.size, device);
    }
    if (run.folder) run.folder->write(summary);
    return summary;
}

}  // namespace potluck
