#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/options.h"
#include "nn/models/language_model.h"
#include "nn/train/metrics.h"
#include "nn/train/precision.h"
#include "nn/train/trial.h"

namespace potluck {

/// A line of a Tuner's table: a change that was tried, or why it was not.
struct TunerRow {
    std::string step = {};                   // "batch 16 x 2"
    TunerSetting setting = {};               // with the change
    std::optional<Trial> trial{};            // none when it was not tried
    std::optional<double> speed_ratio = {};  // to what was kept before; none when it was not compared
    std::optional<double> loss_difference = {}, validation_difference = {};  // to the base, relative
    bool kept = false;
    std::string why = {};  // it was kept or not; empty for the base
};

struct TunerOptions {
    std::int64_t updates = 64;  // of the base in a trial, which fixes the samples of all trials
    std::int64_t rounds = 3;    // runs of each of the two settings whose speeds are compared
    double tolerance = 0.01;    // largest relative difference of the loss to the base
    std::vector<Precision> precisions = {Precision::bf16, Precision::f16};
    /// Whether updates of twice the items are tried, too, once all of an update is one micro-batch. That is another training:
    /// the learning rate of an update k times as large is multiplied by k^learning_rate_exponent, 0.5 for AdamW (Malladi et
    /// al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022), 1 for SGD (Goyal et al., "Accurate,
    /// Large Minibatch SGD", 2017).
    bool larger_updates = true;
    double learning_rate_exponent = 0.5;
    int max_workers = 0;                               // 0: one for each core of the machine
    std::vector<nn::RecomputePolicy> recompute = {};   // see recompute_policies(); empty: the model has none
    std::function<void(const TunerRow&)> on_row = {};  // called with each row when it is there
};

struct TunerResult {
    std::vector<TunerRow> rows = {};
    TunerSetting base = {}, best = {};
    double speed_ratio = 1.0;                   // of the best to the base
    std::optional<Bottleneck> bottleneck = {};  // of the best; none when it was not measured
    bool stopped = false;                       // before all was tried
};

/// The rows, a line each, as (step, samples/s, memory, loss and validation: those of the base, then the differences to them,
/// kept or not and why), and what limits the speed of the best setting.
std::string to_table(const TunerResult& result);
/// Options with their values that turn the base into the best setting, by their names in the examples: {"--precision",
/// "bf16"}, ... `steps`: updates that the base would train; 0: it counts epochs. An update k times as large takes 1 / k of
/// them for the same samples.
std::vector<std::pair<std::string, std::string>> tuned_options(const TunerResult& result,
                                                               std::int64_t steps = 0);
/// A command line for a shell: `command`, a program and its arguments, without what `left_out` names (options and the number
/// of their values, 0 or 1) and with `options` in the place of those that it has already.
std::string command_line_of(const std::vector<std::string>& command,
                            const std::vector<std::pair<std::string, std::string>>& options,
                            const std::vector<std::pair<std::string, int>>& left_out = {});

/// Looks for the fastest way to run a training, one change after the other, by short trainings:
///
/// 1. the base;
/// 2. half precision, with the loss scaler that f16 needs;
/// 3. larger micro-batches, as far as the memory allows: first fewer and larger ones in the same update, which is the same
///    training, then larger updates, which is another one;
/// 4. when the device waits for data, twice the workers as long as it helps, and then 2 and 3 again;
/// 5. when memory ended 3, the least recomputation that makes room for the next larger batch.
///
/// A change is kept when it agrees with the base and is faster than what was kept before. It agrees when the loss of the
/// second half of the samples and the validation after them differ by at most `tolerance` from those of the base, which
/// trained on the same samples. It is faster when each of `rounds` runs is faster than each run of the setting before, with
/// which they alternate: by more than the noise that was seen. Memory is predicted before a trial (MemoryBudget). A trial
/// that fails, be it for want of memory or for a loss that is not finite, is a row of the table.
class Tuner {
public:
    /// Keeps a reference to `trials`. Throws Error for options and settings out of range.
    Tuner(Trials& trials, const TunerSetting& base, TunerOptions options = {});
    template <std::size_t N>
    Tuner(Trials&, const TunerSetting&, MistypedOptions<N>,
          Refused<"no such option: see TunerOptions", N> = {});

    /// Tries everything. Throws Error when the base itself does not fit into the memory, with what would help, or fails.
    TunerResult run();

private:
    enum class Verdict : std::uint8_t { kept, refused, no_memory, stopped };

    void measure_base();
    void try_precisions();
    void grow();
    bool try_workers();
    void recompute_for_more();
    Verdict consider(TunerRow row);
    Verdict judge(TunerRow& row);
    bool is_faster(TunerRow& row);
    Verdict take(TunerRow row, Verdict verdict);
    void skip(const std::string& step, const std::string& why);

    std::optional<TunerSetting> larger() const;
    std::int64_t samples_for_speed(const TunerSetting& setting) const;
    std::string misfit(const TunerSetting& setting) const;

    Trials& trials_;
    TunerOptions options_;
    TunerResult result_;
    std::int64_t samples_ = 0;               // of a trial
    Trial base_, current_;                   // of the base and of what was kept last
    std::optional<TunerSetting> too_large_;  // for the memory
};

}  // namespace potluck
