#include "nn/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/format.h"
#include "nn/train/checkpoint.h"
#include "nn/train/checkpoint_writer.h"
#include "nn/train/one_device.h"
#include "nn/train/progress.h"
#include "nn/train/run_meter.h"

namespace potluck {
namespace {

/// Whether the targets are texts, (batch, time), and not one per sample.
bool counts_tokens(const data::Batch& batch) {
    return batch.targets.defined() && is_integer(batch.targets.dtype()) && batch.targets.ndim() >= 2;
}

}  // namespace

/// State that exists only while fit() runs.
class Trainer::Run {
public:
    explicit Run(const Trainer& trainer)
        : meter(trainer.module_, trainer.optimizer_, trainer.loader_, trainer.options_.flops_per_token,
                trainer.execution_->compute_dtype()),
          progress(trainer.options_.steps, trainer.options_.log_every, trainer.options_.quiet) {
        const TrainerOptions& options = trainer.options_;
        if (options.run_folder.empty()) return;
        folder.emplace(options.run_folder, options.resume || (options.resume_if_possible &&
                                                              RunFolder::holds_run(options.run_folder)));
        writer.emplace(folder->checkpoints(), options.keep_checkpoints,
                       [this](const std::string& sentence) { progress.warn(sentence); });
    }

    RunMeter meter;
    Progress progress;
    std::optional<RunFolder> folder;
    RunHistory history;                                 // of a run with a folder
    std::optional<double> train_loss, validation_loss;  // the most recent ones
    bool resumed = false;                               // and no update was made since
    std::int64_t validated_step = -1;
    bool said_no_targets = false, said_no_validation = false;
    std::string skip_reason;            // the last update that was
    bool gradients_overflowed = false;  // since the epoch began
    std::int64_t saved_step = -1;
    std::string checkpoint;                  // the newest complete one
    std::optional<CheckpointWriter> writer;  // ends before what it warns through
};

Trainer::Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader,
                 TrainerOptions options, std::unique_ptr<Execution> execution)
    : module_(module),
      optimizer_(optimizer),
      loader_(loader),
      options_(std::move(options)),
      execution_(std::move(execution)) {
    check_options();
    if (execution_ == nullptr) {
        execution_ = std::make_unique<OneDevice>(
            module_, optimizer_, std::exchange(options_.loss, {}),
            OneDeviceOptions{.precision = options_.precision, .loss_scaler = options_.loss_scaler});
    } else if (options_.precision != Precision::f32) {
        throw Error(
            "trainer",
            "an execution was given and so was options.precision. Give the precision to the execution.");
    } else if (options_.loss) {
        throw Error("trainer",
                    "an execution was given and so was options.loss. Give the loss to the execution.");
    }
}

Trainer::Trainer(nn::Module& module, optim::Optimizer& optimizer, data::Loader& loader,
                 TrainerOptions options)
    : Trainer(module, optimizer, loader, std::move(options), nullptr) {}

void Trainer::check_options() const {
    const auto refuse = [](const std::string& message) { throw Error("trainer", message); };
    const std::vector<Tensor> parameters = module_.parameters();
    if (parameters.empty()) refuse("the module has no parameters. Name them in members().");
    const std::vector<optim::ParameterSlice> slices = optimizer_.slices();
    const auto is_foreign = [&](const optim::ParameterSlice& slice) {
        return slice.elements().count() > 0 &&
               std::none_of(parameters.begin(), parameters.end(), [&](const Tensor& parameter) {
                   return parameter.is_same(slice.elements()) ||
                          parameter.storage() == slice.elements().storage();
               });
    };
    if (std::all_of(slices.begin(), slices.end(), is_foreign))
        refuse(
            fmt::format("the optimizer updates none of the parameters of this {}: its first one is {}, of "
                        "another module. Make it from the module that is trained.",
                        module_.describe(), slices.front().name()));
    if (options_.steps < 0 || options_.epochs < 0 || (options_.steps == 0 && options_.epochs == 0)) {
        refuse(fmt::format("steps is {} and epochs is {}. Say how long to train by one of them.",
                           options_.steps, options_.epochs));
    }
    if (options_.accumulate < 1) {
        refuse(fmt::format("accumulate is {}. An update needs at least 1 micro-batch.", options_.accumulate));
    }
    if (!(options_.clip >= 0.0) || std::isinf(options_.clip)) {
        refuse(fmt::format("clip is {}. It must be finite and not negative; 0 never clips.", options_.clip));
    }
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
    if (options_.run_folder.empty() &&
        (options_.resume || options_.resume_if_possible || options_.checkpoint_every > 0)) {
        refuse("resume, resume_if_possible and checkpoint_every need a run_folder.");
    }
    if (options_.resume && options_.resume_if_possible) {
        refuse(
            "resume and resume_if_possible are both set. Choose the first to insist on a checkpoint, the "
            "second to begin where there is none.");
    }
    if (options_.validation == nullptr && options_.validate_every > 0) {
        refuse("validate_every needs a validation loader.");
    }
}

TrainingSummary Trainer::fit() {
    Run run(*this);
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
    if (options_.resume || options_.resume_if_possible) resume(run);
    if (run.folder && !is_done()) run.meter.measure_rates();
    run.meter.start();
}

void Trainer::resume(Run& run) {
    const auto load = options_.resume ? load_latest_checkpoint : load_latest_checkpoint_if_any;
    const ResumedCheckpoint resumed =
        load(run.folder->checkpoints(), module_, optimizer_,
             [&](const TrainingState& state) { loader_.check_state(state.loader); });
    for (const std::string& damaged : resumed.damaged) run.progress.say("passed over: " + damaged);
    if (resumed.path.empty()) {
        run.folder->rewind(0);
        run.progress.say(fmt::format("there is no sound checkpoint in {} to go on from: a new run begins",
                                     run.folder->checkpoints()));
        return;
    }
    const TrainingState& state = resumed.state;
    loader_.set_state(state.loader);
    if (state.loss_scaler) execution_->set_loss_scaler_state(*state.loss_scaler);
    step_ = run.saved_step = state.step;
    epochs_ = state.epochs;
    run.checkpoint = resumed.path;
    run.resumed = true;
    const auto kept = [&](const StepMetrics& metrics) { run.history.add(metrics); };
    if (const std::optional<StepMetrics> last = run.folder->rewind(step_, kept)) {
        run.train_loss = last->loss;
        run.validation_loss = last->validation_loss;
    }
    run.progress.say(fmt::format("resumed from {} at step {}{}", resumed.path, step_,
                                 resumed.damaged.empty() ? "" : ", the newest checkpoint that is sound"));
}

void Trainer::run_epoch(Run& run) {
    const std::int64_t steps_before = step_;
    const bool whole = loader_.state().item == 0;
    run.gradients_overflowed = false;
    std::vector<data::Batch> micro_batches;
    for (data::Batch& batch : loader_) {
        micro_batches.push_back(std::move(batch));
        // After an epoch's last batch the loader is at the next epoch, and a checkpoint must count this one as
        // completed.
        const bool ends_epoch = loader_.state().item == 0;
        if (!ends_epoch && static_cast<std::int64_t>(micro_batches.size()) < options_.accumulate) continue;
        update(run, std::exchange(micro_batches, {}), ends_epoch);
        if (stopped_ || (options_.steps > 0 && step_ >= options_.steps)) return;
    }
    // A loss scale that is still being lowered is no reason to give up; the scaler has its own.
    if (whole && options_.steps > 0 && step_ == steps_before && !run.gradients_overflowed) {
        throw Error("trainer",
                    fmt::format("epoch {} brought no update, since {}, so {} steps would never be reached.",
                                epochs_ - 1, run.skip_reason, options_.steps));
    }
}

void Trainer::update(Run& run, std::span<const data::Batch> micro_batches, bool ends_epoch) {
    run.meter.end_waiting();
    if (run.writer) run.writer->poll();
    StepMetrics metrics;
    metrics.learning_rate = options_.schedule ? options_.schedule(step_) : optimizer_.learning_rate();
    const UpdateResult result = compute(micro_batches, {step_, metrics.learning_rate, options_.clip});
    run.meter.time() += result.time;
    const std::int64_t epoch = epochs_;
    if (ends_epoch) ++epochs_;
    if (is_applied(run, result)) {
        ++step_;
        metrics.step = step_;
        metrics.epoch = epoch;
        metrics.loss = result.loss;
        metrics.gradient_norm = result.gradient_norm;
        metrics.tokens = result.targets;
        metrics.resumed = std::exchange(run.resumed, false);
        run.meter.measure(metrics, micro_batches);
        run.train_loss = metrics.loss;
        if (options_.validate_every > 0 && step_ % options_.validate_every == 0) {
            metrics.validated = true;
            metrics.validation_loss = validate(run);
        }
        run.meter.close(metrics);
        if (run.folder) {
            run.folder->append(metrics);
            run.history.add(metrics);
        }
        run.progress.show(metrics, counts_tokens(micro_batches.front()) ? "tokens" : "samples");
        if (options_.on_step) options_.on_step(metrics);
        if (options_.checkpoint_every > 0 && step_ % options_.checkpoint_every == 0) {
            save_state(run, is_done());
            write_report(run, "running", summary_of(run));
        }
    }
    stopped_ = execution_->any(options_.should_stop && options_.should_stop());
    run.meter.end_update();
}

UpdateResult Trainer::compute(std::span<const data::Batch> micro_batches, const UpdateRequest& request) {
    try {
        return execution_->update(micro_batches, request);
    } catch (const OutOfMemory& error) {
        const std::string advice = what_fits(micro_batches);
        if (advice.empty()) throw;
        const std::string text = error.what();  // "[op] message"
        const std::size_t start = text.find("] ");
        throw OutOfMemory(error.op(), text.substr(start == std::string::npos ? 0 : start + 2) + advice,
                          error.requested_bytes());
    }
}

/// A sentence on the micro-batches that would fit where these did not; empty when it cannot be told.
std::string Trainer::what_fits(std::span<const data::Batch> micro_batches) {
    const auto items = [](const data::Batch& batch) {
        return batch.inputs.defined() ? batch.inputs.size(0) : std::int64_t{0};
    };
    const data::Batch& largest =
        *std::max_element(micro_batches.begin(), micro_batches.end(),
                          [&](const data::Batch& a, const data::Batch& b) { return items(a) < items(b); });
    try {
        const auto count = static_cast<std::int64_t>(micro_batches.size());
        const std::optional<std::int64_t> fits = execution_->largest_micro_batch(largest, count);
        if (!fits) return "";
        if (*fits == 0)
            return fmt::format(
                " The update had micro-batches of {} items, and not even 1 item fits: recomputation or "
                "offload need "
                "less (docs/08_recomputation_and_offload.md).",
                items(largest));
        return fmt::format(
            " The update had micro-batches of {} items; the largest that fits is {}. With more of them in an "
            "update "
            "(accumulate) it trains the same.",
            items(largest), *fits);
    } catch (const Error&) {  // the advice failed; the first error is what matters
        return "";
    }
}

/// Whether the update was applied. Reports why if it was not.
bool Trainer::is_applied(Run& run, const UpdateResult& result) {
    using Outcome = UpdateResult::Outcome;
    if (result.outcome == Outcome::applied) return true;
    if (result.outcome == Outcome::no_targets) {
        run.skip_reason = "no target of its batches counts";
        if (!std::exchange(run.said_no_targets, true)) {
            run.progress.warn(
                fmt::format("after step {} there was a batch of which no target counts. Such batches "
                            "are passed over; the steps do not count them.",
                            step_));
        }
        return false;
    }
    if (result.outcome == Outcome::overflow) {
        run.gradients_overflowed = true;
        run.progress.say(
            fmt::format("after step {} a gradient overflowed: its batches are passed over, and the loss "
                        "scale is {} now",
                        step_, execution_->loss_scaler_state().value_or(LossScalerState{}).scale));
        return false;
    }
    const std::string what = std::isfinite(result.loss)
                                 ? fmt::format("the gradient is {} at step {}, first in {}",
                                               result.gradient_norm, step_ + 1, result.culprit)
                                 : fmt::format("the loss is {} at step {}", result.loss, step_ + 1);
    if (options_.on_non_finite == NonFinite::error) {
        throw Error(
            "trainer",
            fmt::format("{}. The parameters are those of step {}. Lower the learning rate, clip gradients, "
                        "or look for the op that made it.",
                        what, step_));
    }
    run.skip_reason = "a loss or gradient of each update is not finite";
    run.progress.warn(fmt::format("{}. Its batches are passed over.", what));
    return false;
}

std::optional<double> Trainer::validate(Run& run) {
    const PhaseScope validating(run.meter.time(), Phase::validation);
    run.validated_step = step_;
    run.validation_loss = execution_->evaluate(*options_.validation).mean();
    if (!run.validation_loss && !std::exchange(run.said_no_validation, true))
        run.progress.warn("no target of the validation batches counts, so there is no validation loss.");
    return run.validation_loss;
}

/// `is_last`: nothing is to be done meanwhile.
void Trainer::save_state(Run& run, bool is_last) {
    if (run.saved_step == step_) return;
    const PhaseScope saving(run.meter.time(), Phase::saving);
    const TrainingState state{step_, epochs_, loader_.state(), generator_states(module_.parameters()),
                              execution_->loss_scaler_state()};
    if (options_.async_checkpoints && !is_last)
        run.writer->save(module_, optimizer_, state);
    else
        run.writer->save_and_wait(module_, optimizer_, state);
    run.saved_step = step_;
}

TrainingSummary Trainer::finish(Run& run) {
    const bool finished = is_done();
    if (run.folder) {
        save_state(run, true);
        if (std::string path = run.writer->wait(); !path.empty()) run.checkpoint = std::move(path);
    }
    if (stopped_ && run.folder)
        run.progress.say(fmt::format("stopped at step {}; saved {}", step_, run.checkpoint));
    if (options_.validation != nullptr && finished) {
        const bool is_new = run.validated_step != step_ && !run.resumed;  // else it has been told
        validate(run);
        if (run.folder && is_new && run.validation_loss) {
            run.folder->append_validation(step_, *run.validation_loss);
            run.history.add_validation(step_, *run.validation_loss);
        }
    }
    const TrainingSummary summary = summary_of(run);
    if (!run.folder) return summary;
    run.folder->write(summary);
    write_report(run, finished ? "finished" : fmt::format("stopped at step {}", step_), summary,
                 /*with_pictures=*/true);
    return summary;
}

TrainingSummary Trainer::summary_of(const Run& run) const {
    TrainingSummary summary;
    summary.steps = step_;
    summary.finished = is_done();
    summary.final_train_loss = run.train_loss;
    summary.final_val_loss = run.validation_loss;
    summary.checkpoint = run.checkpoint;
    run.meter.summarize(summary);
    return summary;
}

/// A report that cannot be made or written ends no training.
void Trainer::write_report(Run& run, const std::string& status, const TrainingSummary& summary,
                           bool with_pictures) const {
    const PhaseScope saving(run.meter.time(), Phase::saving);
    try {
        std::vector<ReportPicture> pictures;
        if (with_pictures && options_.pictures) pictures = options_.pictures();
        run.folder->write_report(report_page(run.history, {.title = options_.run_folder,
                                                           .status = status,
                                                           .summary = summary,
                                                           .settings = settings(),
                                                           .pictures = std::move(pictures)}));
    } catch (const std::exception& error) {
        run.progress.warn(fmt::format("there is no new report: {}", error.what()));
    }
}

std::vector<std::pair<std::string, std::string>> Trainer::settings() const {
    const auto number = [](auto value) { return fmt::format("{}", value); };
    const auto or_none = [](auto value) { return value == 0 ? std::string("–") : fmt::format("{}", value); };
    std::vector<std::pair<std::string, std::string>> all = {
        {"device", fmt::format("{} ({})", name_of(device()), describe(device()))},
        {"parameters", fmt::format("{} of {}", module_.parameter_count(), dtype_of_most_parameters(module_))},
        {"steps", or_none(options_.steps)},
        {"epochs", or_none(options_.epochs)},
        {"items of the dataset", number(loader_.size())},
        {"batch", number(loader_.options().batch)},
        {"micro-batches in an update", number(options_.accumulate)},
        {"workers of the loader", number(loader_.options().workers)},
        {"seed of the loader", number(loader_.options().seed)},
        {"precision", std::string(name_of(execution_->compute_dtype()))},
        {"clip", or_none(options_.clip)},
        {"learning rate", number(optimizer_.learning_rate())},
        {"validate every", or_none(options_.validate_every)},
        {"checkpoint every", or_none(options_.checkpoint_every)}};
    if (device().is_cpu()) all.insert(all.begin() + 1, {"threads", number(threads(device()))});
    all.insert(all.end(), options_.settings.begin(), options_.settings.end());
    return all;
}

Device Trainer::device() const { return module_.parameters()[0].device(); }

}  // namespace potluck
