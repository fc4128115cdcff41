#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/options.h"
#include "data/loader.h"
#include "nn/models/language_model.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/loss.h"
#include "nn/train/metrics.h"
#include "nn/train/precision.h"

namespace potluck {

/// How a training is run: what a Tuner varies.
struct TunerSetting {
    Precision precision = Precision::f32;
    std::int64_t batch = 1;       // items of a micro-batch
    std::int64_t accumulate = 1;  // micro-batches of an update
    int workers = 0;              // of the loader
    nn::RecomputePolicy recompute = {};
    double learning_rate = 1e-3;
};

/// Items of an update.
inline std::int64_t items_of_update(const TunerSetting& setting) {
    return setting.batch * setting.accumulate;
}

/// A model and all that trains it.
struct TrialTraining {
    std::unique_ptr<nn::Module> module;  // on its device, with the recomputation of the setting
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<data::Loader> loader;  // with the batch and the workers of the setting
    std::unique_ptr<data::Loader> validation =
        {};                        // a part of what the training validates with is enough; none
    LossFunction loss = {};        // none: the module's own
    double clip = 0.0;             // as in TrainerOptions
    double flops_per_token = 0.0;  // the same
};
/// Makes a training anew for each trial. The default generators are seeded before each call, so the parameters of all trials
/// begin with the same numbers.
using MakeTraining = std::function<TrialTraining(const TunerSetting& setting)>;

/// What a short training with a setting measured.
struct Trial {
    double samples_per_second = 0.0;              // without the first quarter of its updates
    double loss = 0.0;                            // mean over the targets of the second half of the samples
    std::optional<double> validation_loss = {};   // at the end
    std::int64_t peak_bytes = 0;                  // of the device
    double waiting = 0.0;                         // share of the time, for data
    std::optional<Bottleneck> bottleneck = {};    // none when it was not measured
    std::string failure = {};                     // why it ended early, a sentence; empty when it did not
    bool out_of_memory = false, stopped = false;  // what ended it early
};

/// What a setting needs of the device's memory, and what there is, in bytes.
struct MemoryNeed {
    std::int64_t needed = 0, available = 0;
    bool fits() const { return needed <= available; }
};

/// How a Tuner tries settings. ModelTrials does it with real trainings.
class Trials {
public:
    virtual ~Trials() = default;
    /// Trains with the first `samples` items of the data, a multiple of those of an update. `only_speed`: neither validation
    /// nor bottleneck is asked for. Whatever goes wrong with the training is a failure of the trial, no exception.
    virtual Trial run(const TunerSetting& setting, std::int64_t samples, bool only_speed) = 0;
    /// The peak of an update, predicted. Throws OutOfMemory when not even the smallest micro-batches go through the model.
    virtual MemoryNeed memory_of(const TunerSetting& setting) = 0;
    /// For a setting that does not fit: by how much, and what would help.
    virtual std::string advice(const TunerSetting& setting) = 0;
    /// Items of the dataset.
    virtual std::int64_t dataset_size() = 0;
};

struct ModelTrialsOptions {
    std::uint64_t seed = 42;
    /// That a training may hold; 0: nine tenths of what the device has free, or its cap.
    std::int64_t memory_bytes = 0;
    std::function<bool()> should_stop = {};  // asked before each update
};

/// Trials that train. Each has a model of its own, which begins with the same parameters and reads the same items in the same
/// order, and which is gone before the next is made; so what a program holds beside is neither used nor changed, and the
/// default generators are afterwards as they were. The peak of the device's memory is reset. The learning rate rises to that
/// of the setting until half of the samples are read and falls to nothing with the rest, so that what is compared is not the
/// noise of large steps. An update that overflows in f16 is done again with a smaller loss scale, for the same reason: a
/// training passes a few of its many updates over, of which a trial has only some.
class ModelTrials final : public Trials {
public:
    /// `base`: a setting to ask the size of the dataset with. Throws what `make` does, and Error when it makes no module,
    /// optimizer or loader.
    ModelTrials(MakeTraining make, const TunerSetting& base, ModelTrialsOptions options = {});
    template <std::size_t N>
    ModelTrials(MakeTraining, const TunerSetting&, MistypedOptions<N>,
                Refused<"no such option: see ModelTrialsOptions", N> = {});

    Trial run(const TunerSetting& setting, std::int64_t samples, bool only_speed) override;
    MemoryNeed memory_of(const TunerSetting& setting) override;
    std::string advice(const TunerSetting& setting) override;
    std::int64_t dataset_size() override { return dataset_size_; }

private:
    TrialTraining make(const TunerSetting& setting) const;
    void train(const TunerSetting& setting, std::int64_t samples, bool only_speed, Trial& trial) const;
    std::int64_t available(Device device) const;

    MakeTraining make_;
    ModelTrialsOptions options_;
    std::int64_t dataset_size_ = 0;
};

}  // namespace potluck
