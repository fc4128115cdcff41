// Updates that are not applied: non-finite numbers end a run or are skipped, batches without valid targets are skipped.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/nn/train/scale.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// `count` rows of 1; the targets of those in `without` are ignored.
data::TensorDataset partly_ignored(std::int64_t count, const std::vector<std::int64_t>& without) {
    const Tensor targets = zeros({count, 1}, {DType::i64});
    for (const std::int64_t row : without) targets.select(0, row).fill_(ignored);
    return data::TensorDataset(ones({count, 1}), targets);
}

}  // namespace

TEST_CASE("trainer: batches of which no target counts are passed over, and no step or schedule counts them") {
    for (const bool with_momentum : {false, true}) {
        std::vector<std::vector<double>> weights, rates;
        for (const bool ignore : {false, true}) {
            Scale model(1.0);
            optim::SGD optimizer(model, {.momentum = with_momentum ? 0.9 : 0.0,
                                         .weight_decay = 0.1,
                                         .groups = {{.pattern = "w", .weight_decay = 0.1}}});
            data::Loader loader(ignore ? partly_ignored(10, {0, 1, 4, 5, 8, 9}) : ones_dataset(4),
                                {.batch = 2});
            auto& seen = weights.emplace_back();
            auto& used = rates.emplace_back();
            const TrainingSummary summary =
                Trainer(model, optimizer, loader,
                        {.epochs = 2,
                         .schedule = optim::linear_schedule({.peak = 0.1, .steps = 10, .warmup = 3}),
                         .quiet = true,
                         .on_step =
                             [&](const StepMetrics& metrics) {
                                 CHECK(metrics.step == static_cast<std::int64_t>(seen.size()) + 1);
                                 seen.push_back(model.value());
                                 used.push_back(metrics.learning_rate);
                             }})
                    .fit();
            CHECK(summary.steps == 4);
            CHECK(summary.finished);
        }
        CHECK(weights[0] == weights[1]);
        CHECK(rates[0] == rates[1]);
    }
}

TEST_CASE("trainer: when no target of an epoch counts, a run of epochs ends and a run of steps is refused") {
    const TemporaryFolder folder;
    Scale model(1.0);
    optim::SGD optimizer(model);
    data::Loader loader(partly_ignored(4, {0, 1, 2, 3}), {.batch = 2});
    const TrainingSummary summary =
        Trainer(model, optimizer, loader, {.epochs = 2, .run_folder = folder / "run", .quiet = true}).fit();
    CHECK(summary.steps == 0);
    CHECK(summary.finished);
    CHECK_FALSE(summary.final_train_loss.has_value());
    CHECK(nlohmann::json::parse(read_file(folder / "run/summary.json"))["final_train_loss"].is_null());
    CHECK(model.value() == 1.0);
    check_error([&] { Trainer(model, optimizer, loader, {.steps = 3, .quiet = true}).fit(); },
                {"[trainer]", "no update", "3 steps"});
}

TEST_CASE("trainer: a validation of which no target counts has no loss") {
    const TemporaryFolder folder;
    Scale model(1.0);
    optim::SGD optimizer(model);
    data::Loader loader(ones_dataset(4)), validation(partly_ignored(2, {0, 1}));
    const TrainingSummary summary = Trainer(model, optimizer, loader,
                                            {.steps = 2,
                                             .run_folder = folder / "run",
                                             .validation = &validation,
                                             .validate_every = 1,
                                             .quiet = true,
                                             .on_step =
                                                 [](const StepMetrics& metrics) {
                                                     CHECK(metrics.validated);
                                                     CHECK_FALSE(metrics.validation_loss.has_value());
                                                 }})
                                        .fit();
    CHECK_FALSE(summary.final_val_loss.has_value());
    for (const nlohmann::json& line : read_lines(folder / "run/metrics.jsonl"))
        CHECK(line.at("val_loss").is_null());
    CHECK(nlohmann::json::parse(read_file(folder / "run/summary.json"))["final_val_loss"].is_null());
}

TEST_CASE("trainer: what is not finite can be passed over") {
    Scale model(0.0);
    optim::SGD optimizer(model, {.learning_rate = 1.0});
    const Tensor inputs = ones({6, 1});
    inputs.select(0, 2).fill_(infinity);
    data::Loader loader(data::TensorDataset(inputs, zeros({6, 1}, {DType::i64})));
    const TrainingSummary summary =
        Trainer(model, optimizer, loader, {.epochs = 1, .quiet = true, .on_non_finite = NonFinite::skip})
            .fit();
    CHECK(summary.steps == 5);
    CHECK(model.value() == -5.0);
    inputs.fill_(infinity);
    check_error(
        [&] {
            Trainer(model, optimizer, loader, {.steps = 9, .quiet = true, .on_non_finite = NonFinite::skip})
                .fit();
        },
        {"[trainer]", "not finite", "9 steps"});
    CHECK(model.value() == -5.0);
}

TEST_CASE("trainer: running statistics after a refused batch are those before it, after resuming too") {
    struct Normalised : nn::Module {
        nn::BatchNorm norm{1};
        void members(nn::Members& m) override { m("norm", norm); }
        Tensor forward(const Tensor& x) override { return norm(x); }
        Tensor loss(const Tensor& inputs, const Tensor&) override { return mean((*this)(inputs)); }
    };
    const TemporaryFolder folder;
    const std::string run = folder / "run";
    const auto train = [&](Normalised& model, const std::vector<double>& values, bool resume) {
        const auto count = static_cast<std::int64_t>(values.size());
        optim::SGD optimizer(model, {.learning_rate = 0.1});
        data::Loader loader(data::TensorDataset(tensor(values, {count, 1})), {.batch = 2});
        Trainer(model, optimizer, loader,
                {.epochs = 1, .run_folder = run, .resume = resume, .checkpoint_every = 1, .quiet = true})
            .fit();
    };
    Normalised model;
    check_error([&] { train(model, {3, 5, infinity, 5, 3, 5}, false); }, {"[trainer]", "step 2"});
    CHECK(model.norm.running_mean.item() == doctest::Approx(0.4));
    CHECK(model.norm.running_var.item() == doctest::Approx(1.1));
    CHECK(model.norm.num_batches_tracked.item<std::int64_t>() == 1);
    Normalised resumed;
    train(resumed, {3, 5, 3, 5, 3, 5}, true);
    CHECK(resumed.norm.num_batches_tracked.item<std::int64_t>() == 3);
    CHECK(resumed.norm.running_mean.item() == doctest::Approx(4 * (1 - 0.9 * 0.9 * 0.9)));
}

TEST_CASE(
    "trainer: a loss that is not finite ends the run at its step, with the weights of the step before") {
    const TemporaryFolder folder;
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        Scale model(0.5);
        optim::SGD optimizer(model, {.learning_rate = 0.01});
        const Tensor inputs = ones({10, 1});
        inputs.select(0, 5).fill_(bad);
        data::Loader loader(data::TensorDataset(inputs, zeros({10, 1}, {DType::i64})));
        const std::string run = folder / (std::isnan(bad) ? "nan" : "inf");
        check_error(
            [&] {
                Trainer(model, optimizer, loader,
                        {.epochs = 1, .run_folder = run, .checkpoint_every = 2, .quiet = true})
                    .fit();
            },
            {"[trainer]", "at step 6"});
        CHECK(model.value() == doctest::Approx(0.45));
        CHECK(read_lines(run + "/metrics.jsonl").size() == 5);
        CHECK(latest_checkpoint(run + "/checkpoints").value().ends_with("step_00000004"));
    }
}

TEST_CASE("trainer: a gradient that is not finite ends the run and names the parameter") {
    Scale model(0.0);
    optim::SGD optimizer(model);
    data::Loader loader(ones_dataset(3));
    check_error(
        [&] {
            Trainer(
                model, optimizer, loader,
                {.epochs = 1,
                 .quiet = true,
                 .loss = [&](const Tensor&, const Tensor&) { return sqrt(abs(model.w) * 0.0) + model.w; }})
                .fit();
        },
        {"[trainer]", "at step 1", "in w"});
    CHECK(model.value() == 0.0);
}

}  // namespace potluck::test
