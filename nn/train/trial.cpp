#include "nn/train/trial.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/device_registry.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/memory_limit.h"
#include "core/random.h"
#include "nn/train/choose_recompute.h"
#include "nn/train/memory_budget.h"
#include "nn/train/one_device.h"
#include "nn/train/run_meter.h"

namespace potluck {
namespace {

/// The default generators are, when it ends, what they were before.
class GeneratorsBefore {
public:
    GeneratorsBefore() {
        for (const Device device : registered_devices())
            states_.emplace_back(device, default_generator(device).state());
    }
    ~GeneratorsBefore() {
        for (const auto& [device, state] : states_) default_generator(device).set_state(state);
    }
    GeneratorsBefore(const GeneratorsBefore&) = delete;
    GeneratorsBefore& operator=(const GeneratorsBefore&) = delete;

private:
    std::vector<std::pair<Device, RandomKey>> states_;
};

Device device_of(const TrialTraining& training) { return training.module->parameters().front().device(); }

/// Ends a training, and gives what its device keeps of it back to the system, so that the next one finds as much memory.
class EndsTraining {
public:
    explicit EndsTraining(TrialTraining& training) : training_(training) {}
    ~EndsTraining() {
        const Device device = device_of(training_);
        training_ = {};
        release_cached_memory(device);
    }
    EndsTraining(const EndsTraining&) = delete;
    EndsTraining& operator=(const EndsTraining&) = delete;

private:
    TrialTraining& training_;
};

BudgetOptions budget_options(const TrialTraining& training, const TunerSetting& setting) {
    const data::LoaderOptions& loader = training.loader->options();
    return {.loss = training.loss,
            .precision = setting.precision,
            .accumulate = setting.accumulate,
            .read_ahead = loader.read_ahead * loader.workers};
}

data::Batch sample_of(const TrialTraining& training) { return *training.loader->pass().begin(); }

/// The mean of the losses, each with its targets, of the second half of a training.
class LateLoss {
public:
    explicit LateLoss(std::int64_t updates) : first_(updates / 2) {}

    void add(std::int64_t update, const UpdateResult& result) {
        if (update < first_) return;
        total_.sum += result.loss * static_cast<double>(result.targets);
        total_.count += result.targets;
    }
    std::optional<double> mean() const { return total_.mean(); }

private:
    std::int64_t first_;
    LossTotal total_;
};

/// What the learning rate is multiplied by: up to 1 in the middle and down to 0, so that the last loss is a settled one.
double rate_at(std::int64_t update, std::int64_t updates) {
    return 1.0 - std::abs((2.0 * static_cast<double>(update) + 1.0) / static_cast<double>(updates) - 1.0);
}

/// The first sentence of an Error, without the name of its op.
std::string reason_of(const Error& error) {
    std::string text = error.what();
    if (const std::size_t start = text.find("] "); start != std::string::npos) text.erase(0, start + 2);
    if (const std::size_t end = text.find(". "); end != std::string::npos) text.erase(end);
    if (text.ends_with('.')) text.pop_back();
    return text;
}

}  // namespace

ModelTrials::ModelTrials(MakeTraining make, const TunerSetting& base, ModelTrialsOptions options)
    : make_(std::move(make)), options_(std::move(options)) {
    if (!make_) throw Error("tuner", "there is no function that makes a training. Give one.");
    if (options_.memory_bytes < 0)
        throw Error("tuner",
                    fmt::format("memory_bytes is {}. It must not be negative; 0 takes what there is.",
                                options_.memory_bytes));
    const GeneratorsBefore before;
    const TrialTraining training = this->make(base);
    dataset_size_ = training.loader->size();
}

TrialTraining ModelTrials::make(const TunerSetting& setting) const {
    manual_seed(options_.seed);
    TrialTraining training = make_(setting);
    if (training.module == nullptr || training.optimizer == nullptr || training.loader == nullptr)
        throw Error("tuner", "a training has no module, no optimizer or no loader. Make all three.");
    if (training.module->parameters().empty())
        throw Error("tuner", "the module has no parameters. Name them in members().");
    if (training.loader->options().batch != setting.batch)
        throw Error("tuner",
                    fmt::format("the loader has a batch of {} where the setting asks for {}. Make it "
                                "with setting.batch.",
                                training.loader->options().batch, setting.batch));
    return training;
}

Trial ModelTrials::run(const TunerSetting& setting, std::int64_t samples, bool only_speed) {
    const GeneratorsBefore before;
    Trial trial;
    try {
        train(setting, samples, only_speed, trial);
    } catch (const OutOfMemory& error) {
        trial.out_of_memory = true;
        trial.failure = reason_of(error);
    } catch (const Error& error) {
        trial.failure = reason_of(error);
    }
    return trial;
}

void ModelTrials::train(const TunerSetting& setting, std::int64_t samples, bool only_speed,
                        Trial& trial) const {
    const std::int64_t updates = samples / items_of_update(setting);
    const std::int64_t quarter = updates / 4;
    TrialTraining training = make(setting);
    const EndsTraining afterwards(training);
    const Device device = device_of(training);
    reset_peak_memory(device);
    OneDevice execution(*training.module, *training.optimizer, training.loss,
                        {.precision = setting.precision, .loss_scaler = {.give_up_after = 20}});
    RunMeter meter(*training.module, *training.optimizer, *training.loader, training.flops_per_token,
                   dtype_of(setting.precision));
    if (!only_speed) meter.measure_rates();
    training.module->train();

    LateLoss loss(updates);
    double computing = 0.0;  // seconds of the updates that are timed, without waiting for data
    std::int64_t timed = 0, timed_updates = 0;
    const double waited_before = training.loader->waiting_seconds();
    meter.start();
    for (std::int64_t update = 0; update < updates; ++update) {
        if (options_.should_stop && options_.should_stop()) {
            trial.stopped = true;
            return;
        }
        const double waited = training.loader->waiting_seconds();
        std::vector<data::Batch> micro_batches;
        for (std::int64_t i = 0; i < setting.accumulate; ++i)
            micro_batches.push_back(training.loader->next());
        meter.end_waiting();
        const UpdateRequest request{update, rate_at(update, updates) * setting.learning_rate, training.clip};
        UpdateResult result = execution.update(micro_batches, request);
        // The scale of f16 is found in the first updates. What a long training passes over is too much of a short one.
        while (result.outcome == UpdateResult::Outcome::overflow)
            result = execution.update(micro_batches, request);
        meter.time() += result.time;
        if (result.outcome == UpdateResult::Outcome::not_finite) {
            trial.failure = fmt::format("the {} is not finite in update {}",
                                        std::isfinite(result.loss) ? "gradient" : "loss", update + 1);
            return;
        }
        loss.add(update, result);
        if (result.outcome == UpdateResult::Outcome::applied) {
            StepMetrics metrics;
            metrics.tokens = result.targets;
            meter.measure(metrics, micro_batches);
            meter.close(metrics);
            if (update >= quarter) {
                computing += metrics.seconds - (training.loader->waiting_seconds() - waited);
                timed += metrics.samples;
                ++timed_updates;
            }
        }
        meter.end_update();
    }
    if (timed == 0 || !loss.mean()) {
        trial.failure = "no target of its batches counts";
        return;
    }
    // What workers have read ahead in the first updates would make the rest look free of waiting: it counts for all of them.
    const double all_waiting = training.loader->waiting_seconds() - waited_before - meter.first_wait();
    const double waiting = all_waiting * static_cast<double>(timed_updates) /
                           static_cast<double>(std::max<std::int64_t>(updates - 1, 1));
    trial.samples_per_second = static_cast<double>(timed) / std::max(computing + waiting, 1e-9);
    trial.loss = *loss.mean();
    TrainingSummary summary;
    meter.summarize(summary);
    trial.peak_bytes = summary.peak_memory_bytes;
    trial.waiting = meter.running_time().share(Phase::data);
    if (only_speed) return;
    trial.bottleneck = summary.bottleneck;
    if (training.validation != nullptr)
        trial.validation_loss = execution.evaluate(*training.validation).mean();
}

std::int64_t ModelTrials::available(Device device) const {
    if (options_.memory_bytes > 0) return options_.memory_bytes;
    const std::int64_t limit = memory_limit(device);
    // Not the last byte of what other programs use, too; a cap is this program's own.
    return memory_statistics(device).cap > 0 ? limit : limit / 10 * 9;
}

MemoryNeed ModelTrials::memory_of(const TunerSetting& setting) {
    const GeneratorsBefore before;
    TrialTraining training = make(setting);
    const EndsTraining afterwards(training);
    const MemoryBudget budget(*training.module, *training.optimizer, sample_of(training),
                              budget_options(training, setting));
    return {budget.at(setting.batch).peak(), available(device_of(training))};
}

std::string ModelTrials::advice(const TunerSetting& setting) {
    const GeneratorsBefore before;
    TrialTraining training = make(setting);
    const EndsTraining afterwards(training);
    const std::int64_t bytes = available(device_of(training));
    const BudgetOptions options = budget_options(training, setting);
    const data::Batch sample = sample_of(training);
    std::string text;
    try {
        text = MemoryBudget(*training.module, *training.optimizer, sample, options)
                   .shortfall(setting.batch, bytes);
    } catch (const OutOfMemory& error) {
        text = fmt::format("not even two small batches fit: {}", error.what());
    }
    if (auto* model = dynamic_cast<nn::LanguageModel*>(training.module.get()))
        text += " " + what_needs_less(*model, *training.optimizer, sample, bytes, options);
    return text;
}

}  // namespace potluck
