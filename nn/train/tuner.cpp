#include "nn/train/tuner.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "nn/train/choose_recompute.h"

namespace potluck {
namespace {

constexpr std::int64_t fewest_updates = 4;  // of a trial: with fewer there is nothing to compare

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

double relative(double value, double base) { return (value - base) / std::max(std::abs(base), 1e-30); }

std::string megabytes(std::int64_t bytes) {
    return fmt::format("{:.2f} MB", 1e-6 * static_cast<double>(bytes));
}

std::string batch_of(const TunerSetting& setting) {
    return setting.accumulate == 1 ? fmt::format("batch {}", setting.batch)
                                   : fmt::format("batch {} x {}", setting.batch, setting.accumulate);
}

/// By which the loss differs, when that is too much: "the loss is 3.1 % above that of the base".
std::string disagreement(const char* name, const std::optional<double>& difference, double tolerance) {
    if (!difference || std::abs(*difference) <= tolerance) return "";
    return fmt::format("{} is {:.2f} % {} that of the base", name, 100.0 * std::abs(*difference),
                       *difference > 0.0 ? "above" : "below");
}

}  // namespace

Tuner::Tuner(Trials& trials, const TunerSetting& base, TunerOptions options)
    : trials_(trials), options_(std::move(options)) {
    const auto refuse = [](const std::string& message) { throw Error("tuner", message); };
    if (base.batch < 1 || base.accumulate < 1 || base.workers < 0)
        refuse(fmt::format(
            "the base has a batch of {}, {} micro-batches in an update and {} workers. It needs at "
            "least 1, 1 and 0.",
            base.batch, base.accumulate, base.workers));
    if (!(base.learning_rate > 0.0) || std::isinf(base.learning_rate))
        refuse(fmt::format("the base has a learning rate of {}. It must be above 0 and finite.",
                           base.learning_rate));
    if (options_.updates < fewest_updates)
        refuse(fmt::format("updates is {}. A trial needs at least {} to compare anything.", options_.updates,
                           fewest_updates));
    if (options_.rounds < 1) refuse(fmt::format("rounds is {}. It must be at least 1.", options_.rounds));
    if (!(options_.tolerance > 0.0) || std::isinf(options_.tolerance))
        refuse(fmt::format("tolerance is {}. It must be above 0 and finite.", options_.tolerance));
    if (options_.max_workers < 0)
        refuse(fmt::format("max_workers is {}. It must not be negative; 0 takes the cores of the machine.",
                           options_.max_workers));
    if (options_.max_workers == 0)
        options_.max_workers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const std::int64_t items = items_of_update(base);
    // All samples of a trial belong to one epoch, so that they are the same in batches of any size.
    std::int64_t updates = std::min(options_.updates, trials_.dataset_size() / items);
    if (updates < fewest_updates)
        refuse(fmt::format(
            "the dataset has {} items, enough for {} updates of {}. A trial needs {} updates: give "
            "more items or a smaller batch.",
            trials_.dataset_size(), updates, items, fewest_updates));
    updates -= updates % fewest_updates;  // larger updates must divide the samples, too
    samples_ = updates * items;
    result_.base = result_.best = base;
}

TunerResult Tuner::run() {
    measure_base();
    while (!result_.stopped) {
        try_precisions();
        grow();
        if (!try_workers()) break;
    }
    recompute_for_more();
    result_.bottleneck = current_.bottleneck;
    return result_;
}

void Tuner::measure_base() {
    const TunerSetting& base = result_.base;
    bool fits = false;
    try {
        fits = trials_.memory_of(base).fits();
    } catch (const OutOfMemory&) {  // its advice says what would help
    }
    if (!fits) throw Error("memory budget", trials_.advice(base));
    base_ = trials_.run(base, samples_, /*only_speed=*/false);
    if (!base_.failure.empty())
        throw Error("tuner",
                    fmt::format("the training as it is does not run, so there is nothing to compare with: "
                                "{}. Change its options first.",
                                base_.failure));
    result_.stopped = base_.stopped;
    if (result_.stopped) return;
    current_ = base_;
    TunerRow row{.step = "base", .setting = base, .trial = base_};
    row.kept = true;
    result_.rows.push_back(row);
    if (options_.on_row) options_.on_row(row);
}

void Tuner::try_precisions() {
    for (const Precision precision : options_.precisions) {
        TunerRow row{.step = fmt::format("precision {}", name_of(dtype_of(precision))),
                     .setting = result_.best};
        if (row.setting.precision == precision) continue;
        row.setting.precision = precision;
        consider(std::move(row));
    }
}

/// The setting with the next larger micro-batch: as it divides the update of the base, then of updates twice as large.
std::optional<TunerSetting> Tuner::larger() const {
    TunerSetting setting = result_.best;
    if (setting.accumulate > 1) {
        const std::int64_t items = items_of_update(setting);
        do ++setting.batch;
        while (items % setting.batch != 0 || setting.batch < 2 * result_.best.batch);
        setting.accumulate = items / setting.batch;
        return setting;
    }
    setting.batch *= 2;
    if (!options_.larger_updates || samples_ % setting.batch != 0 ||
        samples_ / setting.batch < fewest_updates)
        return std::nullopt;
    const double times =
        static_cast<double>(setting.batch) / static_cast<double>(items_of_update(result_.base));
    setting.learning_rate = result_.base.learning_rate * std::pow(times, options_.learning_rate_exponent);
    return setting;
}

void Tuner::grow() {
    too_large_.reset();
    while (const std::optional<TunerSetting> next = larger()) {
        const bool is_other = items_of_update(*next) != items_of_update(result_.base);
        const Verdict verdict =
            consider({.step = (is_other ? "larger update: " : "") + batch_of(*next), .setting = *next});
        if (verdict == Verdict::no_memory) too_large_ = next;
        if (verdict != Verdict::kept) return;
    }
}

bool Tuner::try_workers() {
    const auto waits = [this] {
        return current_.bottleneck && current_.bottleneck->kind == Bottleneck::Kind::input;
    };
    if (!waits()) {
        skip("more workers",
             fmt::format("not tried: it waits for data only {:.0f} % of the time", 100.0 * current_.waiting));
        return false;
    }
    bool kept = false;
    while (waits()) {
        TunerRow row{.setting = result_.best};
        row.setting.workers = std::min(std::max(1, 2 * result_.best.workers), options_.max_workers);
        if (row.setting.workers <= result_.best.workers) {
            if (kept) break;  // said when all else has been tried with them
            skip("more workers",
                 fmt::format("not tried: it waits for data {:.0f} % of the time, but there are {} "
                             "workers already, the most that are to be tried",
                             100.0 * current_.waiting, result_.best.workers));
            break;
        }
        row.step = fmt::format("workers {}", row.setting.workers);
        if (consider(std::move(row)) != Verdict::kept) break;
        kept = true;
    }
    return kept;
}

void Tuner::recompute_for_more() {
    if (options_.recompute.empty()) return;
    if (!too_large_) return skip("recomputation", "not tried: memory did not limit the batch");
    std::string missing = "there is no policy that needs less";
    auto policy = options_.recompute.begin();
    while (too_large_ && policy != options_.recompute.end()) {
        TunerRow row{.setting = *too_large_};
        row.setting.recompute = *policy++;
        if (row.setting.recompute.what == nn::RecomputePolicy::What::nothing) continue;
        if (missing = misfit(row.setting); !missing.empty()) continue;
        row.step = fmt::format("recompute {}, {}", name_of(row.setting.recompute), batch_of(row.setting));
        if (consider(std::move(row)) != Verdict::kept) return;
        grow();  // and what is too large then needs one of the next policies
    }
    if (!missing.empty()) skip("recomputation", fmt::format("not tried: {}", missing));
}

/// Why a setting does not fit into the memory; empty when it does.
std::string Tuner::misfit(const TunerSetting& setting) const {
    try {
        const MemoryNeed need = trials_.memory_of(setting);
        if (need.fits()) return "";
        return fmt::format("{} would need {}, {} more than there are", batch_of(setting),
                           megabytes(need.needed), megabytes(need.needed - need.available));
    } catch (const OutOfMemory&) {
        return "not even a small micro-batch fits into the memory";
    } catch (const Error&) {  // what is wrong with it, its trial will tell
        return "";
    }
}

/// Tries a change of what was kept, and keeps it if it is worth it.
Tuner::Verdict Tuner::consider(TunerRow row) {
    if (result_.stopped) return Verdict::stopped;
    row.why = misfit(row.setting);
    if (!row.why.empty()) return take(std::move(row), Verdict::no_memory);
    const Verdict verdict = judge(row);
    return take(std::move(row), verdict);
}

Tuner::Verdict Tuner::judge(TunerRow& row) {
    row.trial = trials_.run(row.setting, samples_, /*only_speed=*/false);
    const Trial& trial = *row.trial;
    if (trial.stopped) return Verdict::stopped;
    if (!trial.failure.empty()) {
        row.why = trial.failure;
        return trial.out_of_memory ? Verdict::no_memory : Verdict::refused;
    }
    row.loss_difference = relative(trial.loss, base_.loss);
    if (trial.validation_loss && base_.validation_loss)
        row.validation_difference = relative(*trial.validation_loss, *base_.validation_loss);
    row.why = disagreement("the loss", row.loss_difference, options_.tolerance);
    if (row.why.empty())
        row.why = disagreement("the validation loss", row.validation_difference, options_.tolerance);
    if (!row.why.empty()) return Verdict::refused;
    const bool faster = is_faster(row);
    if (result_.stopped) return Verdict::stopped;
    if (row.why.empty())
        row.why = fmt::format("{:.2f} times as fast as before{}", *row.speed_ratio,
                              faster                   ? ""
                              : *row.speed_ratio > 1.0 ? ", no more than the noise"
                                                       : "");
    return faster ? Verdict::kept : Verdict::refused;
}

/// Whether each run of the setting is faster than each of what was kept, with which they alternate.
bool Tuner::is_faster(TunerRow& row) {
    std::vector<double> here = {row.trial->samples_per_second}, before;
    const auto time = [&](const TunerSetting& setting, std::vector<double>& speeds) {
        const Trial trial = trials_.run(setting, samples_for_speed(setting), /*only_speed=*/true);
        result_.stopped = result_.stopped || trial.stopped;
        if (!trial.failure.empty()) row.why = trial.failure;
        if (!trial.stopped && trial.failure.empty()) speeds.push_back(trial.samples_per_second);
        return !trial.stopped && trial.failure.empty();
    };
    bool faster = true;
    for (std::int64_t round = 0; round < options_.rounds && faster; ++round) {
        if (round > 0 && !time(row.setting, here)) return false;
        if (!time(result_.best, before)) return false;
        faster =
            *std::min_element(here.begin(), here.end()) > *std::max_element(before.begin(), before.end());
    }
    row.trial->samples_per_second = median(here);
    row.speed_ratio = median(here) / median(before);
    return faster;
}

/// A quarter of the samples, or the fewest updates, which are enough for the speed.
std::int64_t Tuner::samples_for_speed(const TunerSetting& setting) const {
    const std::int64_t items = items_of_update(setting);
    return std::min(samples_, std::max(fewest_updates, samples_ / 4 / items) * items);
}

Tuner::Verdict Tuner::take(TunerRow row, Verdict verdict) {
    if (verdict == Verdict::stopped) {
        result_.stopped = true;
        return verdict;
    }
    row.kept = verdict == Verdict::kept;
    if (row.kept) {
        result_.best = row.setting;
        result_.speed_ratio *= *row.speed_ratio;
        current_ = *row.trial;
    }
    result_.rows.push_back(row);
    if (options_.on_row) options_.on_row(row);
    return verdict;
}

void Tuner::skip(const std::string& step, const std::string& why) {
    if (result_.stopped) return;
    (void)take({.step = step, .setting = result_.best, .why = why}, Verdict::refused);
}

}  // namespace potluck
