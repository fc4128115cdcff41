// What a Tuner keeps and refuses, by trials with planted speeds, losses and memory.

#include "nn/train/tuner.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "nn/train/choose_recompute.h"
#include "tests/nn/support.h"

namespace potluck::test {
namespace {

/// A training of which everything follows from the setting.
class PlantedTrials final : public Trials {
public:
    std::function<double(const TunerSetting&)> speed = [](const TunerSetting&) { return 100.0; };
    std::function<double(const TunerSetting&)> loss = [](const TunerSetting&) { return 2.0; };
    std::function<double(const TunerSetting&)> validation_loss = [](const TunerSetting&) { return 3.0; };
    std::function<std::int64_t(const TunerSetting&)> needed = [](const TunerSetting&) { return 1'000'000; };
    std::function<bool(const TunerSetting&)> waits = [](const TunerSetting&) { return false; };
    std::function<std::string(const TunerSetting&)> failure = [](const TunerSetting&) { return ""; };
    bool runs_out_of_memory = false;  // when it fails
    std::int64_t available = 10'000'000, size = 100'000;
    std::int64_t stop_after = 1'000'000;  // runs

    std::int64_t runs = 0, full_runs = 0;
    std::vector<std::int64_t> samples_of_full_runs = {}, samples_of_speed_runs = {};

    Trial run(const TunerSetting& setting, std::int64_t samples, bool only_speed) override {
        CHECK(samples % items_of_update(setting) == 0);
        (only_speed ? samples_of_speed_runs : samples_of_full_runs).push_back(samples);
        Trial trial;
        trial.failure = failure(setting);
        trial.out_of_memory = !trial.failure.empty() && runs_out_of_memory;
        if (trial.stopped = ++runs > stop_after; trial.stopped || !trial.failure.empty()) return trial;
        trial.samples_per_second = speed(setting);
        trial.loss = loss(setting);
        trial.validation_loss = validation_loss(setting);
        trial.peak_bytes = needed(setting);
        trial.waiting = waits(setting) ? 0.4 : 0.02;
        using Kind = Bottleneck::Kind;
        trial.bottleneck = Bottleneck{waits(setting) ? Kind::input : Kind::compute, "So it was planted."};
        return trial;
    }
    MemoryNeed memory_of(const TunerSetting& setting) override { return {needed(setting), available}; }
    std::string advice(const TunerSetting&) override { return "it needs 2.00 MB more. Less would help."; }
    std::int64_t dataset_size() override { return size; }
};

const TunerSetting base = {.batch = 8, .workers = 1, .learning_rate = 1e-3};

const TunerRow& row_of(const TunerResult& result, const std::string& step) {
    const auto found = std::find_if(result.rows.begin(), result.rows.end(),
                                    [&](const TunerRow& row) { return row.step.starts_with(step); });
    INFO(step, " in\n", to_table(result));
    REQUIRE(found != result.rows.end());
    return *found;
}
bool has_row(const TunerResult& result, const std::string& step) {
    return std::any_of(result.rows.begin(), result.rows.end(),
                       [&](const TunerRow& row) { return row.step.starts_with(step); });
}
void check_refused(const TunerResult& result, const std::string& step, const std::string& why) {
    const TunerRow& row = row_of(result, step);
    CAPTURE(row.why);
    CHECK_FALSE(row.kept);
    CHECK(row.why.find(why) != std::string::npos);
}

bool is_half(const TunerSetting& setting) { return setting.precision != Precision::f32; }

}  // namespace

TEST_CASE("tuner: nothing is kept where no change is faster, and the base is the best") {
    PlantedTrials trials;
    const TunerResult result = Tuner(trials, base).run();
    CHECK(result.speed_ratio == 1.0);
    CHECK(tuned_options(result).empty());
    for (const char* step : {"precision bf16", "precision f16", "larger update: batch 16"})
        check_refused(result, step, "1.00 times as fast as before");
    check_refused(result, "more workers", "not tried: it waits for data only 2 %");
    REQUIRE(result.bottleneck);
    CHECK(result.bottleneck->kind == Bottleneck::Kind::compute);
    CHECK_FALSE(has_row(result, "recompute"));
}

TEST_CASE("tuner: a faster precision that agrees is kept, the other one is compared with it") {
    PlantedTrials trials;
    trials.speed = [](const TunerSetting& setting) {
        return setting.precision == Precision::bf16  ? 180.0
               : setting.precision == Precision::f16 ? 150.0
                                                     : 100.0;
    };
    trials.loss = [](const TunerSetting& setting) { return is_half(setting) ? 2.01 : 2.0; };
    const TunerResult result = Tuner(trials, base).run();
    CHECK(row_of(result, "precision bf16").kept);
    CHECK(row_of(result, "precision bf16").loss_difference.value() == doctest::Approx(0.005));
    check_refused(result, "precision f16", "0.83 times as fast as before");
    CHECK(result.best.precision == Precision::bf16);
    CHECK(result.speed_ratio == doctest::Approx(1.8));
}

TEST_CASE(
    "tuner: a change is refused when its loss or validation differs from the base, however fast it is") {
    PlantedTrials trials;
    trials.speed = [](const TunerSetting& setting) { return is_half(setting) ? 400.0 : 100.0; };
    trials.loss = [](const TunerSetting& s) { return s.precision == Precision::bf16 ? 2.05 : 2.0; };
    trials.validation_loss = [](const TunerSetting& s) { return s.precision == Precision::f16 ? 2.7 : 3.0; };
    const TunerResult result = Tuner(trials, base).run();
    check_refused(result, "precision bf16", "the loss is 2.50 % above that of the base");
    check_refused(result, "precision f16", "the validation loss is 10.00 % below that of the base");
    CHECK(result.best.precision == Precision::f32);
    CHECK(Tuner(trials, base, {.tolerance = 0.2}).run().best.precision == Precision::bf16);
}

TEST_CASE("tuner: the loss is compared with that of the base, not with what was kept last") {
    PlantedTrials trials;  // each change adds 0.8 %: the first agrees, the second no longer
    trials.speed = [](const TunerSetting& s) {
        return (is_half(s) ? 200.0 : 100.0) + 10.0 * static_cast<double>(s.batch);
    };
    trials.loss = [](const TunerSetting& s) {
        return 2.0 + (is_half(s) ? 0.016 : 0.0) + (s.batch > 8 ? 0.016 : 0.0);
    };
    const TunerResult result = Tuner(trials, base).run();
    CHECK(row_of(result, "precision bf16").kept);
    check_refused(result, "larger update: batch 16", "the loss is 1.60 % above");
}

TEST_CASE("tuner: a gain within the noise is no gain") {
    PlantedTrials trials;
    trials.speed = [](const TunerSetting& setting) { return is_half(setting) ? 104.0 : 100.0; };
    CHECK(row_of(Tuner(trials, base).run(), "precision bf16").kept);
    trials.speed = [count = 0](const TunerSetting& setting) mutable {
        if (is_half(setting)) return 104.0;
        return ++count % 3 == 0 ? 105.0 : 100.0;  // one run in three is as fast
    };
    const TunerResult result = Tuner(trials, base).run();
    check_refused(result, "precision bf16", "times as fast as before, no more than the noise");
    CHECK(Tuner(trials, base, {.rounds = 1}).run().best.precision == Precision::bf16);
}

TEST_CASE(
    "tuner: a micro-batch grows within the update first, and then the update, whose learning rate grows "
    "too") {
    PlantedTrials trials;
    trials.speed = [](const TunerSetting& s) { return 100.0 + static_cast<double>(s.batch); };
    const TunerResult result =
        Tuner(trials, {.batch = 3, .accumulate = 4, .learning_rate = 1e-3}, {.updates = 32, .precisions = {}})
            .run();
    REQUIRE(result.rows.size() == 7);
    CHECK(result.rows[1].step == "batch 6 x 2");
    CHECK(result.rows[2].step == "batch 12");
    CHECK(result.rows[2].setting.learning_rate == 1e-3);
    CHECK(result.rows[3].step == "larger update: batch 24");
    CHECK(result.rows[3].setting.learning_rate == doctest::Approx(1e-3 * std::sqrt(2.0)));
    CHECK(result.rows[5].step == "larger update: batch 96");  // 32 updates of 12 items are 4 of 96
    CHECK(result.rows[5].setting.learning_rate == doctest::Approx(1e-3 * std::sqrt(8.0)));
    CHECK(result.best.batch == 96);
    for (const std::int64_t samples : trials.samples_of_full_runs) CHECK(samples == 32 * 12);
    for (const std::int64_t samples : trials.samples_of_speed_runs) CHECK(samples < 400);
    const TunerResult same = Tuner(trials, {.batch = 3, .accumulate = 4},
                                   {.updates = 32, .precisions = {}, .larger_updates = false})
                                 .run();
    CHECK(same.best.batch == 12);
    CHECK(same.best.accumulate == 1);
    const auto linear = [&](double exponent) {
        return Tuner(trials, base, {.updates = 32, .precisions = {}, .learning_rate_exponent = exponent})
            .run()
            .best.learning_rate;
    };
    CHECK(linear(1.0) == doctest::Approx(8e-3));
}

TEST_CASE("tuner: a batch that does not fit is not tried, and recomputation makes room for it") {
    PlantedTrials trials;
    const auto is_recomputed = [](const TunerSetting& s) {
        return s.recompute.what != nn::RecomputePolicy::What::nothing;
    };
    trials.needed = [&](const TunerSetting& s) {
        const std::int64_t of_item = !is_recomputed(s)                                       ? 500'000
                                     : s.recompute.what == nn::RecomputePolicy::What::blocks ? 200'000
                                                                                             : 400'000;
        return s.batch * of_item;
    };
    trials.speed = [&](const TunerSetting& s) {
        return (50.0 + static_cast<double>(s.batch)) * (is_recomputed(s) ? 0.95 : 1.0);
    };
    const TunerOptions options{.precisions = {}, .recompute = recompute_policies(8)};
    const TunerResult result = Tuner(trials, {.batch = 8, .accumulate = 8}, options).run();
    CHECK(row_of(result, "batch 16 x 4").kept);
    check_refused(result, "batch 32 x 2", "batch 32 x 2 would need 16.00 MB, 6.00 MB more than there are");
    CHECK_FALSE(row_of(result, "batch 32 x 2").trial.has_value());
    CHECK_FALSE(has_row(result, "recompute parts"));  // 12.80 MB
    CHECK(row_of(result, "recompute blocks, batch 32 x 2").kept);
    check_refused(result, "recomputation", "not tried: batch 64 would need 12.80 MB");
    CHECK(name_of(result.best.recompute) == "blocks");
    CHECK(result.best.batch == 32);
    CHECK(result.best.accumulate == 2);
}

TEST_CASE("tuner: a trial that runs out of memory or fails is a row of the table") {
    PlantedTrials trials;
    trials.speed = [](const TunerSetting& s) { return 100.0 * static_cast<double>(s.batch); };
    trials.failure = [](const TunerSetting& s) {
        return s.batch > 8 ? "cpu has no 64 bytes" : is_half(s) ? "the loss is not finite in update 3" : "";
    };
    trials.runs_out_of_memory = true;
    const TunerResult result = Tuner(trials, base, {.recompute = recompute_policies(2)}).run();
    check_refused(result, "precision bf16", "the loss is not finite in update 3");
    check_refused(result, "larger update: batch 16", "cpu has no 64 bytes");
    check_refused(result, "recompute parts, batch 16", "cpu has no 64 bytes");
    CHECK(result.best.batch == 8);
    CHECK(to_table(result).find("cpu has no 64 bytes") != std::string::npos);
}

TEST_CASE("tuner: recomputation is not tried where memory did not limit the batch, or where none suffices") {
    PlantedTrials trials;
    check_refused(Tuner(trials, base, {.recompute = recompute_policies(4)}).run(), "recomputation",
                  "memory did not limit the batch");
    trials.needed = [](const TunerSetting& s) { return s.batch * 1'000'000; };
    check_refused(Tuner(trials, base, {.recompute = recompute_policies(4)}).run(), "recomputation",
                  "batch 16 would need 16.00 MB, 6.00 MB more");
}

TEST_CASE("tuner: workers are doubled while the device waits for data, then the rest is tried again") {
    PlantedTrials trials;
    trials.waits = [](const TunerSetting& s) { return s.workers < 4; };
    trials.speed = [](const TunerSetting& s) {
        return s.workers < 4 ? 100.0 * s.workers : is_half(s) ? 900.0 : 400.0;
    };
    const TunerResult result =
        Tuner(trials, base, {.precisions = {Precision::bf16}, .max_workers = 16}).run();
    CHECK(result.best.workers == 4);
    CHECK(result.best.precision == Precision::bf16);  // as long as data was waited for it was no faster
    CHECK(has_row(result, "workers 2"));
    CHECK(has_row(result, "workers 4"));
    CHECK_FALSE(has_row(result, "workers 8"));
    CHECK(result.speed_ratio == doctest::Approx(9.0));

    trials.waits = [](const TunerSetting&) { return true; };
    trials.speed = [](const TunerSetting& s) { return 100.0 * s.workers; };
    const TunerResult few = Tuner(trials, base, {.precisions = {}, .max_workers = 3}).run();
    CHECK(few.best.workers == 3);
    check_refused(few, "more workers", "there are 3 workers already");
    CHECK(std::count_if(few.rows.begin(), few.rows.end(),
                        [](const TunerRow& row) { return row.step == "more workers"; }) == 1);
    REQUIRE(few.bottleneck);
    CHECK(few.bottleneck->kind == Bottleneck::Kind::input);
}

TEST_CASE("tuner: stopped, it tells what was done until then") {
    PlantedTrials trials;
    trials.stop_after = 3;
    const TunerResult result = Tuner(trials, base).run();
    CHECK(result.stopped);
    CHECK(result.rows.size() < 4);
    CHECK(to_table(result).find("stopped before everything was tried") != std::string::npos);
    trials.runs = trials.stop_after = 0;
    CHECK(Tuner(trials, base).run().rows.empty());
}

TEST_CASE("tuner: a base that does not fit or does not run is an Error that says what would help") {
    PlantedTrials trials;
    trials.available = 1000;
    check_error([&] { (void)Tuner(trials, base).run(); },
                {"[memory budget] it needs 2.00 MB more. Less would help."});
    CHECK(trials.runs == 0);
    PlantedTrials failing;
    failing.failure = [](const TunerSetting&) { return "the loss is not finite in update 1"; };
    check_error([&] { (void)Tuner(failing, base).run(); },
                {"the loss is not finite in update 1", "Change its options"});
}

TEST_CASE("tuner: options and settings out of range are refused") {
    PlantedTrials trials;
    const auto refused = [&](const TunerSetting& setting, const TunerOptions& options, const char* word) {
        check_error([&] { const Tuner tuner(trials, setting, options); }, {"[tuner]", word});
    };
    refused({.batch = 0}, {}, "a batch of 0");
    refused({.workers = -1}, {}, "-1 workers");
    refused({.learning_rate = 0.0}, {}, "learning rate of 0");
    refused(base, {.updates = 3}, "updates is 3");
    refused(base, {.rounds = 0}, "rounds is 0");
    refused(base, {.tolerance = 0.0}, "tolerance is 0");
    refused(base, {.max_workers = -2}, "max_workers is -2");
    trials.size = 31;
    refused(base, {}, "the dataset has 31 items");
    trials.size = 100;  // 12 updates of 8 items
    (void)Tuner(trials, base).run();
    CHECK(trials.samples_of_full_runs.front() == 96);
}

TEST_CASE("tuner: the table") {
    TunerResult result;
    result.rows = {
        {.step = "base",
         .trial =
             Trial{.samples_per_second = 100.0, .loss = 2.0, .validation_loss = 3.0, .peak_bytes = 1'500'000},
         .kept = true},
        {.step = "precision bf16",
         .trial = Trial{.samples_per_second = 150.5, .peak_bytes = 1'250'000},
         .loss_difference = 0.0012,
         .validation_difference = -0.0004,
         .kept = true,
         .why = "1.51 times as fast as before"},
        {.step = "more workers", .why = "not tried: it waits for data only 2 % of the time"}};
    result.bottleneck = Bottleneck{Bottleneck::Kind::compute, "It multiplies."};
    CHECK(to_table(result) ==
          "step            samples/s       memory       loss  validation  kept\n"
          "base                100.0      1.50 MB     2.0000      3.0000\n"
          "precision bf16      150.5      1.25 MB    +0.12 %     -0.04 %  yes: 1.51 times as fast as before\n"
          "more workers                                                   no: not tried: it waits for data "
          "only 2 % of the time\n"
          "the limit is compute now: It multiplies.\n");
}

TEST_CASE("tuner: the options that make the best setting, and the command line with them") {
    TunerResult result;
    result.base = {.batch = 8, .accumulate = 2, .workers = 1, .learning_rate = 3e-3};
    result.best = {.precision = Precision::bf16,
                   .batch = 32,
                   .accumulate = 1,
                   .workers = 4,
                   .recompute = {nn::RecomputePolicy::What::blocks, 2},
                   .learning_rate = 3e-3 * std::sqrt(2.0)};
    using Options = std::vector<std::pair<std::string, std::string>>;
    const Options options = {{"--precision", "bf16"},     {"--batch", "32"},
                             {"--accumulate", "1"},       {"--workers", "4"},
                             {"--recompute", "blocks:2"}, {"--learning-rate", "0.004243"}};
    CHECK(tuned_options(result) == options);
    Options with_steps = options;
    with_steps.emplace_back("--steps", "500");
    CHECK(tuned_options(result, 1000) == with_steps);

    const std::vector<std::pair<std::string, int>> of_tuner = {{"--tune", 0}, {"--tune-updates", 1}};
    const Options changes = {{"--batch", "32"}, {"--precision", "bf16"}};
    CHECK(command_line_of({"./demo", "--tune", "--batch", "8", "--text", "my novel.txt", "--tune-updates=8"},
                          changes, of_tuner) == "./demo --text 'my novel.txt' --batch 32 --precision bf16");
    CHECK(command_line_of({"./demo", "--batch=8", "--tune", "--tune-updates", "8", "--prompt", "it's"},
                          changes, of_tuner) == "./demo --prompt 'it'\\''s' --batch 32 --precision bf16");
    CHECK(command_line_of({"./demo", ""}, {}) == "./demo ''");
}

}  // namespace potluck::test
