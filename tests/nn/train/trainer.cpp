// The trainer: updates of several micro-batches, schedules, files, stopping.

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/nn/train/scale.h"

using namespace potluck;
using test::check_error;
using test::ignored;
using test::on_each_device;
using test::ones_dataset;
using test::read_lines;
using test::Scale;
namespace fs = std::filesystem;

namespace {

/// Texts of 1 .. 8 tokens; targets after the end of a text are ignored.
data::TensorDataset ragged_texts() {
    Generator generator(3);
    const Tensor ids = randint(0, 20, {8, 8}, {DType::i64}, &generator);
    const Tensor targets = randint(0, 20, {8, 8}, {DType::i64}, &generator);
    for (std::int64_t row = 0; row < 8; ++row) {
        if (row < 7) targets.select(0, row).narrow(0, row + 1, 7 - row).fill_(ignored);
    }
    return data::TensorDataset(ids, targets);
}

nn::GPT2 tiny_model(DType dtype) {
    manual_seed(4);
    nn::GPT2 model({.vocabulary = 20, .context = 8, .width = 8, .heads = 2, .layers = 2});
    model.to(dtype);
    model.to(test::test_device());
    return model;
}

struct Step {
    double loss, gradient_norm;
    nn::StateDict weights;
};

/// One update of a new model on all 8 texts, in micro-batches of `batch`.
Step one_update(DType dtype, std::int64_t batch, bool own_loss) {
    nn::GPT2 model = tiny_model(dtype);
    optim::SGD optimizer(model, {.learning_rate = 1.0});
    data::Loader loader(ragged_texts(), {.batch = batch});
    Step step{};
    TrainerOptions options{.steps = 1, .accumulate = 8 / batch, .quiet = true};
    if (own_loss) {
        options.loss = [&](const Tensor& x, const Tensor& y) {
            return cross_entropy(model(x), y, {.reduction = Reduction::mean});
        };
    }
    options.on_step = [&](const StepMetrics& metrics) {
        step.loss = metrics.loss;
        step.gradient_norm = metrics.gradient_norm;
        CHECK(metrics.tokens == 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8);
    };
    Trainer(model, optimizer, loader, options).fit();
    for (const auto& [name, tensor] : model.state_dict()) step.weights[name] = tensor.detach();
    return step;
}

nlohmann::json read_json(const std::string& path) { return nlohmann::json::parse(test::read_file(path)); }

}  // namespace

TEST_CASE("trainer: a window's loss is the mean over its targets, not the mean of means") {
    on_each_device([] {
        Scale model(1.0);
        optim::SGD optimizer(model, {.learning_rate = 1.0});
        const data::TensorDataset dataset(
            tensor({{4., 9., 9.}, {1., 1., 1.}}),
            tensor(std::vector<std::int64_t>{0, ignored, ignored, 0, 0, 0}, {2, 3}));
        data::Loader loader(dataset);
        double loss = 0.0;
        Trainer(model, optimizer, loader,
                {.steps = 1,
                 .accumulate = 2,
                 .quiet = true,
                 .on_step = [&](const StepMetrics& m) { loss = m.loss; }})
            .fit();
        CHECK(loss == doctest::Approx(1.75));
        CHECK(model.value() == doctest::Approx(1.0 - 1.75));
    });
}

TEST_CASE("trainer: it does not matter how a batch is cut into micro-batches") {
    on_each_device([] {
        for (const DType dtype : {DType::f64, DType::f32}) {
            const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-5;
            const Step whole = one_update(dtype, 8, false);
            for (const bool own_loss : {false, true}) {
                for (const std::int64_t batch : {8, 4, 2, 1}) {
                    const Step cut = one_update(dtype, batch, own_loss);
                    CHECK(cut.loss == doctest::Approx(whole.loss).epsilon(1e-6));
                    CHECK(cut.gradient_norm == doctest::Approx(whole.gradient_norm).epsilon(1e-5));
                    for (const auto& [name, weight] : whole.weights) {
                        INFO(name, " in batches of ", batch);
                        CHECK(test::relative_error(cut.weights.at(name), weight) < tolerance);
                    }
                }
            }
        }
    });
}

TEST_CASE("trainer: the last window of an epoch is an update of its own, weighted by its own count") {
    on_each_device([] {
        for (const std::int64_t epochs : {1, 2}) {
            Scale model(0.0);
            optim::SGD optimizer(model, {.learning_rate = 1.0});
            data::Loader loader(ones_dataset(10));
            const TrainingSummary summary =
                Trainer(model, optimizer, loader, {.epochs = epochs, .accumulate = 4, .quiet = true}).fit();
            CHECK(summary.steps == 3 * epochs);
            CHECK(model.value() == doctest::Approx(-3.0 * static_cast<double>(epochs)));
            CHECK_FALSE(model.w.grad().defined());
        }
    });
}

TEST_CASE("trainer: the schedule counts updates") {
    on_each_device([] {
        const auto run = [](std::int64_t micro_batches, std::int64_t window) {
            Scale model(0.0);
            optim::SGD optimizer(model);
            data::Loader loader(ones_dataset(micro_batches));
            std::vector<double> rates;
            Trainer(model, optimizer, loader,
                    {.epochs = 1,
                     .accumulate = window,
                     .schedule = optim::linear_schedule({.peak = 1.0, .steps = 100, .warmup = 10}),
                     .quiet = true,
                     .on_step = [&](const StepMetrics& metrics) { rates.push_back(metrics.learning_rate); }})
                .fit();
            return rates;
        };
        const std::vector<double> rates = run(40, 4);
        REQUIRE(rates.size() == 10);
        for (std::size_t i = 0; i < 10; ++i)
            CHECK(rates[i] == doctest::Approx(0.1 * static_cast<double>(i + 1)));
        CHECK(run(2, 3) == std::vector<double>{0.1});  // accumulate above the epoch's batches still updates
        check_error([&] { run(2, 0); }, {"[trainer]", "accumulate is 0"});
    });
}

TEST_CASE("trainer: a schedule by epochs changes where it should") {
    Scale model(0.0);
    optim::SGD optimizer(model);
    data::Loader loader(ones_dataset(3));
    std::vector<double> rates;
    Trainer(model, optimizer, loader,
            {.epochs = 6,
             .schedule = [](std::int64_t step) { return step / 3 < 4 ? 100.0 : 10.0; },
             .quiet = true,
             .on_step = [&](const StepMetrics& metrics) { rates.push_back(metrics.learning_rate); }})
        .fit();
    REQUIRE(rates.size() == 18);
    CHECK(rates[11] == 100.0);
    CHECK(rates[12] == 10.0);
}

TEST_CASE("trainer: a schedule goes on where a resumed run does") {
    const auto rates_of = [](const optim::Schedule& schedule, std::int64_t stop_at, std::int64_t last) {
        const test::TemporaryFolder folder;
        std::vector<double> rates;
        for (const bool resume : {false, true}) {
            Scale model(0.0);
            optim::SGD optimizer(model);
            data::Loader loader(ones_dataset(3));
            Trainer(model, optimizer, loader,
                    {.steps = resume ? last : stop_at,
                     .schedule = schedule,
                     .run_folder = folder / "run",
                     .resume = resume,
                     .quiet = true,
                     .on_step = [&](const StepMetrics& metrics) { rates.push_back(metrics.learning_rate); }})
                .fit();
        }
        CHECK(static_cast<std::int64_t>(rates.size()) == last);
        return rates;
    };
    // Epochs of 3 updates; the rate falls with the fourth epoch, the run was saved at the end of the second.
    const auto at_epoch_4 = [](std::int64_t step) { return step / 3 < 4 ? 100.0 : 10.0; };
    const std::vector<double> stairs = rates_of(at_epoch_4, 6, 15);
    for (std::size_t i = 0; i < stairs.size(); ++i) CHECK(stairs[i] == (i < 12 ? 100.0 : 10.0));
    const std::vector<double> cosine = rates_of(optim::cosine_schedule({.peak = 1e-3, .steps = 100}), 45, 47);
    CHECK(cosine[44] == doctest::Approx(5.936907e-4).epsilon(1e-6));
    CHECK(cosine[45] == doctest::Approx(5.782172e-4).epsilon(1e-6));
    CHECK(cosine[46] == doctest::Approx(5.626666e-4).epsilon(1e-6));
    const std::vector<double> warmup =
        rates_of(optim::linear_schedule({.peak = 1.0, .steps = 1000, .warmup = 200}), 100, 101);
    CHECK(warmup[99] == doctest::Approx(100.0 / 200));
    CHECK(warmup[100] == doctest::Approx(101.0 / 200));
}

TEST_CASE("trainer: clips the gradient of the whole window once") {
    on_each_device([] {
        Scale model(0.0);
        optim::SGD optimizer(model, {.learning_rate = 1.0});
        data::Loader loader(data::TensorDataset(full({4, 1}, 8.0), zeros({4, 1}, {DType::i64})));
        std::vector<double> norms;
        Trainer(model, optimizer, loader,
                {.epochs = 1,
                 .accumulate = 2,
                 .clip = 0.5,
                 .quiet = true,
                 .on_step = [&](const StepMetrics& metrics) { norms.push_back(metrics.gradient_norm); }})
            .fit();
        CHECK(norms == std::vector<double>{8.0, 8.0});
        CHECK(model.value() == doctest::Approx(-1.0));
    });
}

TEST_CASE("trainer: writes metrics, a summary and a checkpoint") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "runs/one";
    nn::GPT2 model = tiny_model(DType::f32);
    optim::AdamW optimizer(model, {.learning_rate = 0.01});
    data::Loader loader(ragged_texts(), {.batch = 4, .shuffle = true});
    data::Loader validation(ragged_texts(), {.batch = 3});
    const TrainingSummary summary = Trainer(model, optimizer, loader,
                                            {.steps = 6,
                                             .clip = 1.0,
                                             .run_folder = run,
                                             .validation = &validation,
                                             .validate_every = 3,
                                             .quiet = true,
                                             .flops_per_token = model.flops_per_token(8)})
                                        .fit();
    const auto lines = read_lines(run + "/metrics.jsonl");
    REQUIRE(lines.size() == 6);
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK(lines[i]["step"] == i + 1);
        CHECK(lines[i]["epoch"] == i / 2);
        CHECK(lines[i]["learning_rate"] == 0.01);
        for (const char* key :
             {"loss", "gradient_norm", "tokens", "seconds", "tokens_per_second", "memory_bytes"}) {
            INFO(key);
            CHECK(lines[i][key].get<double>() > 0.0);
        }
        CHECK(lines[i].contains("val_loss") == (i == 2 || i == 5));
    }
    CHECK(lines[0]["tokens"].get<int>() + lines[1]["tokens"].get<int>() ==
          36);  // an epoch contains every target once

    const nlohmann::json written = read_json(run + "/summary.json");
    CHECK(written["steps"] == 6);
    CHECK(written["finished"] == true);
    CHECK(written["final_train_loss"] == lines[5]["loss"]);
    CHECK(written["final_val_loss"] == lines[5]["val_loss"]);
    CHECK(written["tokens_per_second"].get<double>() > 0.0);
    CHECK(written["mfu"].get<double>() > 0.0);
    CHECK(written["mfu"].get<double>() < 1.0);
    CHECK(written["mfu_formula"].get<std::string>().find("product of two f32 matrices") != std::string::npos);
    CHECK(written["peak_memory_bytes"].get<double>() > 0.0);
    CHECK(summary.steps == 6);
    CHECK(summary.checkpoint == latest_checkpoint(run + "/checkpoints").value());

    // The validation loss is the mean over all targets, in evaluation mode, for any batch size.
    const NoGrad guard;
    const data::TensorDataset all = ragged_texts();
    data::Loader whole(all, {.batch = 8});
    const data::Batch batch = whole.next();
    CHECK(summary.final_val_loss.value() ==
          doctest::Approx(cross_entropy(model(batch.inputs), batch.targets).item()).epsilon(1e-5));
    CHECK(model.is_training());
}

TEST_CASE("trainer: stopped after any step and resumed, a run of epochs has no step more and no step fewer") {
    const test::TemporaryFolder folder;
    for (const std::int64_t stop_at : {1, 2, 3, 4, 5}) {  // 2 and 4 end an epoch
        const std::string run = folder / std::to_string(stop_at);
        std::int64_t steps = 0;
        for (const bool resume : {false, true}) {
            Scale model(0.0);
            optim::SGD optimizer(model);
            data::Loader loader(ones_dataset(4), {.batch = 2});
            TrainerOptions options{.epochs = 3, .run_folder = run, .resume = resume, .quiet = true};
            if (!resume) options.should_stop = [&] { return ++steps == stop_at; };
            const TrainingSummary summary = Trainer(model, optimizer, loader, options).fit();
            CHECK(summary.steps == (resume ? 6 : stop_at));
            CHECK(summary.finished == resume);
        }
        const auto lines = read_lines(run + "/metrics.jsonl");
        REQUIRE(lines.size() == 6);
        for (std::size_t i = 0; i < 6; ++i) CHECK(lines[i]["epoch"] == i / 2);
    }
}

TEST_CASE("trainer: a folder that holds a run is not overwritten") {
    const test::TemporaryFolder folder;
    const auto train = [&](const std::string& run, bool resume) {
        Scale model(0.0);
        optim::SGD optimizer(model);
        data::Loader loader(ones_dataset(4));
        Trainer(model, optimizer, loader, {.steps = 2, .run_folder = run, .resume = resume, .quiet = true})
            .fit();
    };
    train(folder / "run", false);
    const std::string metrics = test::read_file(folder / "run/metrics.jsonl");
    check_error([&] { train(folder / "run", false); }, {"[run_folder]", "already holds a run"});
    CHECK(test::read_file(folder / "run/metrics.jsonl") == metrics);
    check_error([&] { train(folder / "absent", true); }, {"[run_folder]", "absent"});
    fs::create_directories(folder / "empty");
    check_error([&] { train(folder / "empty", true); }, {"no complete checkpoint"});
    test::write_file(folder / "file", "");
    check_error([&] { train(folder / "file/run", false); }, {"[run_folder]", "cannot write"});
}

TEST_CASE("trainer: stops when asked, saves, and goes on from there") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "run";
    const auto make = [] { return Scale(0.0); };
    {
        Scale model = make();
        optim::SGD optimizer(model, {.learning_rate = 1.0});
        data::Loader loader(ones_dataset(4));
        int asked = 0;
        const TrainingSummary summary =
            Trainer(
                model, optimizer, loader,
                {.steps = 10, .run_folder = run, .quiet = true, .should_stop = [&] { return ++asked == 5; }})
                .fit();
        CHECK(summary.steps == 5);
        CHECK_FALSE(summary.finished);
        CHECK(summary.checkpoint.ends_with("step_00000005"));
        CHECK(read_json(run + "/summary.json")["finished"] == false);
    }
    // Lines that the program wrote after its last checkpoint, and one that was cut off when it died.
    test::write_file(run + "/metrics.jsonl",
                     test::read_file(run + "/metrics.jsonl") + "{\"step\":6,\"loss\":1.0}\n{\"step\":7,\"lo");
    Scale model = make();
    optim::SGD optimizer(model, {.learning_rate = 0.5});
    data::Loader loader(ones_dataset(4));
    const TrainingSummary summary =
        Trainer(model, optimizer, loader, {.steps = 10, .run_folder = run, .resume = true, .quiet = true})
            .fit();
    CHECK(summary.steps == 10);
    CHECK(summary.finished);
    CHECK(model.value() == doctest::Approx(-10.0));
    const auto lines = read_lines(run + "/metrics.jsonl");
    REQUIRE(lines.size() == 10);
    for (std::size_t i = 0; i < 10; ++i) CHECK(lines[i]["step"] == i + 1);

    // A run that is complete has nothing left to do.
    const TrainingSummary again =
        Trainer(model, optimizer, loader, {.steps = 10, .run_folder = run, .resume = true, .quiet = true})
            .fit();
    CHECK(again.steps == 10);
    CHECK(again.final_train_loss == summary.final_train_loss);
    CHECK(read_lines(run + "/metrics.jsonl").size() == 10);
}

TEST_CASE("trainer: bad options are refused") {
    Scale model(0.0);
    optim::SGD optimizer(model);
    data::Loader loader(ones_dataset(4));
    const auto refused = [&](TrainerOptions options) {
        return [&model, &optimizer, &loader, options] { Trainer(model, optimizer, loader, options); };
    };
    nn::Dropout nothing_to_train;
    check_error([&] { Trainer(nothing_to_train, optimizer, loader, {.steps = 1}); },
                {"[trainer]", "no parameters"});
    Scale other(0.0);
    check_error([&] { Trainer(other, optimizer, loader, {.steps = 1}); },
                {"[trainer]", "updates none of the parameters of this Scale", "Make it from the module"});
    check_error(refused({}), {"[trainer]", "steps is 0 and epochs is 0"});
    check_error(refused({.steps = -1}), {"steps is -1"});
    check_error(refused({.steps = 1, .accumulate = -2}), {"accumulate is -2"});
    check_error(refused({.steps = 1, .clip = -1.0}), {"clip is -1"});
    check_error(refused({.steps = 1, .log_every = 0}), {"log_every is 0"});
    check_error(refused({.steps = 1, .flops_per_token = -1.0}), {"flops_per_token is -1"});
    check_error(refused({.steps = 1, .checkpoint_every = 5}), {"run_folder"});
    check_error(refused({.steps = 1, .resume = true}), {"run_folder"});
    check_error(refused({.steps = 1, .validate_every = 5}), {"validation loader"});
    check_error(
        [&] {
            Trainer(model, optimizer, loader,
                    {.steps = 1,
                     .quiet = true,
                     .loss =
                         [](const Tensor& x, const Tensor&) {
                             return cat({x, x});
                         }})
                .fit();
        },
        {"[loss]", "(2, 1)"});
}
