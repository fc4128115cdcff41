// The loss scaler alone, in a plain loop, and in a Trainer.

#include "nn/train/loss_scaler.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// w of these values, with SGD at rate 1.
struct Weights {
    Tensor w;
    optim::SGD optimizer;
    explicit Weights(const std::vector<double>& values)
        : w(nn::parameter(tensor(values, {static_cast<std::int64_t>(values.size())}))),
          optimizer(std::vector<nn::NamedTensor>{{"w", w}}, {.learning_rate = 1.0}) {}
    /// Adds the gradient of sum(w * slope).
    void add(LossScaler& scaler, const std::vector<double>& slope) {
        scaler.backward(sum(w * tensor(slope, w.shape())));
    }
    std::vector<double> values() const { return w.to_vector(); }
};

bool near(const std::vector<double>& a, const std::vector<double>& b, double tolerance = 1e-6) {
    bool same = a.size() == b.size();
    for (std::size_t i = 0; same && i < a.size(); ++i)
        same = std::abs(a[i] - b[i]) <= tolerance * (1e-3 + std::abs(b[i]));
    return same;
}

}  // namespace

TEST_CASE("loss scaler: the step does not depend on the scale, and clipping counts the true gradient") {
    on_each_device([] {
        for (const double scale : {1.0, 1024.0, 65536.0}) {
            CAPTURE(scale);
            LossScaler scaler({.initial = scale});
            Weights model({0, 0});
            model.add(scaler, {0.003, 0.004});
            CHECK(scaler.gradient_norm(model.optimizer) == doctest::Approx(0.005));
            CHECK(scaler.step(model.optimizer, {.max_norm = 1.0}));
            CHECK(near(model.values(), {-0.003, -0.004}, 1e-5));
        }
        // Two micro-batches: the norm is that of the window.
        LossScaler scaler({.initial = 1024});
        Weights model({0, 0});
        model.add(scaler, {1, 2});
        model.add(scaler, {2, 2});
        CHECK(scaler.gradient_norm(model.optimizer) == doctest::Approx(5.0));
        CHECK(scaler.step(model.optimizer, {.max_norm = 1.0}));
        CHECK(near(model.values(), {-0.6, -0.8}, 1e-5));
    });
}

TEST_CASE("loss scaler: an overflow in any micro-batch skips the window and halves the scale once") {
    on_each_device([] {
        LossScaler scaler({.initial = 1024});
        Weights model({1, 2});
        model.add(scaler, {infinity, 1});
        model.add(scaler, {1, 1});
        CHECK_FALSE(scaler.step(model.optimizer));
        CHECK(model.values() == std::vector<double>{1, 2});
        CHECK(model.optimizer.steps() == 0);
        CHECK(scaler.scale() == 512);
        model.optimizer.zero_grad();
        model.add(scaler, {1, 1});
        CHECK(scaler.step(model.optimizer));
        CHECK(near(model.values(), {0, 1}));
        CHECK(scaler.scale() == 512);
        CHECK(model.optimizer.steps() == 1);
    });
}

TEST_CASE("loss scaler: an iteration that the user leaves without a step changes nothing") {
    on_each_device([] {
        LossScaler scaler({.initial = 64});
        Weights model({0, 0});
        model.add(scaler, {300, 400});
        CHECK(scaler.gradient_norm(model.optimizer) == doctest::Approx(500.0));
        CHECK(scaler.gradient_norm(model.optimizer) ==
              doctest::Approx(500.0));  // looked at twice, divided once
        model.optimizer.zero_grad();
        model.add(scaler, {3, 4});
        CHECK(scaler.step(model.optimizer));
        CHECK(near(model.values(), {-3, -4}));
        CHECK(scaler.scale() == 64);
    });
}

TEST_CASE("loss scaler: NaN in every batch stops the run, and the scale never falls below its floor") {
    on_each_device([] {
        LossScaler scaler({.give_up_after = 40});
        Weights model({1, 2});
        std::string text;
        int updates = 0;
        for (; updates < 400 && text.empty(); ++updates) {
            model.add(scaler, {std::nan(""), 1});
            try {
                const bool applied = scaler.step(model.optimizer);
                CHECK_FALSE(applied);
            } catch (const Error& error) {
                text = error.what();
            }
            CHECK(scaler.scale() >= 1.0);
            model.optimizer.zero_grad();
        }
        CHECK(updates == 40);
        CHECK(contains(text, "[loss_scaler] 40 updates in a row"));
        CHECK(contains(text, "loss scale of 1"));
        CHECK(model.values() == std::vector<double>{1, 2});
    });
}

TEST_CASE("loss scaler: grows to its bound and stays there, by state too") {
    on_each_device([] {
        LossScaler scaler({.growth_interval = 1});
        Weights model({1, 2});
        for (int i = 0; i < 1000; ++i) {
            model.add(scaler, {0, 0});
            CHECK(scaler.step(model.optimizer));
            model.optimizer.zero_grad();
        }
        CHECK(scaler.scale() == 16777216.0);
        CHECK(model.values() == std::vector<double>{1, 2});
        LossScaler other({.growth_interval = 1, .largest = 65536});
        other.set_state(scaler.state());
        CHECK(other.scale() == 65536);
    });
}

TEST_CASE(
    "loss scaler: two optimizers in an iteration advance it once, and each steps by its own gradients") {
    on_each_device([] {
        LossScaler scaler({.growth_interval = 4});
        Weights one({0}), two({0});
        for (int i = 0; i < 4; ++i) {
            one.add(scaler, {1});
            two.add(scaler, {1});
            CHECK(scaler.step(one.optimizer));
            CHECK(scaler.step(two.optimizer));
            one.optimizer.zero_grad();
            two.optimizer.zero_grad();
        }
        CHECK(scaler.scale() == 131072);
        one.add(scaler, {infinity});
        two.add(scaler, {1});
        CHECK_FALSE(scaler.step(one.optimizer));
        CHECK(scaler.step(two.optimizer));
        CHECK(scaler.scale() == 65536);
        CHECK(near(two.values(), {-5}));
    });
}

TEST_CASE("loss scaler: options and states out of range are refused") {
    check_error([] { LossScaler({.initial = 0}); }, {"[loss_scaler]", "0"});
    check_error([] { LossScaler({.initial = infinity, .largest = infinity}); }, {"[loss_scaler]", "inf"});
    check_error([] { LossScaler({.growth = 1.0}); }, {"growth is 1"});
    check_error([] { LossScaler({.backoff = 1.0}); }, {"backoff 1"});
    check_error([] { LossScaler({.growth_interval = 0}); }, {"growth_interval is 0"});
    check_error([] { LossScaler().set_state({.scale = std::nan("")}); }, {"nan"});
    check_error([] { LossScaler().set_state({.scale = 1, .good_updates = -1}); }, {"-1"});
    check_error([] { LossScaler().backward(Tensor()); }, {"undefined"});
    check_error([] { LossScaler().backward(ones({2}).set_requires_grad()); }, {"(2)", "sum()"});
}

TEST_CASE("loss scaler: a step by gradients that it did not make is refused") {
    LossScaler scaler;
    Weights model({1, 2});
    sum(model.w).backward();
    check_error([&] { scaler.step(model.optimizer); }, {"[loss_scaler]", "scaler.backward(loss)"});
    CHECK(model.values() == std::vector<double>{1, 2});
}

// ---- in a Trainer ----

namespace {

/// One weight and one input a row; the loss is their product, computed by a product so that Autocast has its say.
struct Product : nn::Module {
    Tensor w;
    explicit Product(double start) : w(nn::parameter(full({1, 1}, start))) {}
    void members(nn::Members& m) override { m("w", w); }
    Tensor loss(const Tensor& inputs, const Tensor&) override { return mean(linear(inputs, w)); }
};

data::TensorDataset rows(const std::vector<double>& values) {
    return data::TensorDataset(potluck::tensor(values, {static_cast<std::int64_t>(values.size()), 1}));
}

}  // namespace

TEST_CASE("loss scaler: a run of f16 with one overflow skips one update, and no more") {
    on_each_device([] {
        // 20 micro-batches, 2 an update: the loss of the fifth is infinite.
        std::vector<double> inputs(20, 1.0);
        inputs[4] = infinity;
        Product model(1.0);
        optim::SGD optimizer(model, {.learning_rate = 0.01});
        data::Loader loader(rows(inputs), {.batch = 1});
        auto execution = std::make_unique<OneDevice>(model, optimizer, LossFunction(),
                                                     OneDeviceOptions{.precision = Precision::f16});
        const OneDevice& update = *execution;
        std::vector<double> rates, scales;
        const auto on_step = [&](const StepMetrics& metrics) {
            rates.push_back(metrics.learning_rate);
            scales.push_back(update.loss_scaler_state()->scale);
        };
        Trainer trainer(model, optimizer, loader,
                        {.epochs = 1,
                         .accumulate = 2,
                         .schedule = [](std::int64_t step) { return 0.01 * static_cast<double>(step + 1); },
                         .quiet = true,
                         .on_step = on_step},
                        std::move(execution));
        const TrainingSummary summary = trainer.fit();
        CHECK(summary.steps == 9);
        CHECK(optimizer.steps() == 9);
        REQUIRE(rates.size() == 9);
        CHECK(rates.back() == doctest::Approx(0.09));
        std::vector<double> expected(9, 32768);
        expected[0] = expected[1] = 65536;
        CHECK(scales == expected);
        CHECK(model.w.item() == doctest::Approx(1.0 - 0.01 * 45).epsilon(1e-3));
    });
}

TEST_CASE(
    "loss scaler: a window that is cut short by the end of an epoch is clipped and scaled by its own count") {
    on_each_device([] {
        // 3 micro-batches of 2 rows, 2 an update: gradients 3 and 4 together, and 8 alone.
        const auto end = [](Precision precision, double initial, double clip) {
            Product model(1.0);
            optim::SGD optimizer(model, {.learning_rate = 0.125});
            data::Loader loader(rows({3, 3, 4, 4, 8, 8}), {.batch = 2});
            std::vector<double> found;
            Trainer(model, optimizer, loader,
                    {.epochs = 1,
                     .accumulate = 2,
                     .clip = clip,
                     .quiet = true,
                     .precision = precision,
                     .loss_scaler = {.initial = initial},
                     .on_step = [&](const StepMetrics& metrics) { found.push_back(metrics.gradient_norm); }})
                .fit();
            found.push_back(model.w.item());
            return found;
        };
        const std::vector<double> clipped = {3.5, 8, 1 - 0.125 * (3.5 + 4)},
                                  whole = {3.5, 8, 1 - 0.125 * 11.5};
        CHECK(end(Precision::f32, 1, 4) == clipped);
        CHECK(end(Precision::f32, 1, 0) == whole);
        for (const double scale : {1.0, 64.0, 4096.0}) {
            CAPTURE(scale);
            CHECK(near(end(Precision::f16, scale, 4), clipped, 1e-5));
            CHECK(near(end(Precision::f16, scale, 0), whole, 1e-5));
        }
    });
}

TEST_CASE(
    "loss scaler: a state that is set in the middle of an update counts at once, and nothing before it") {
    on_each_device([] {
        LossScaler used({.growth_interval = 3});
        Weights model({0});
        for (const double slope : {1.0, infinity}) {  // a growth half counted, and a lowering under way
            model.add(used, {slope});
            (void)used.step(model.optimizer);
            model.optimizer.zero_grad();
            used.set_state({.scale = 256, .good_updates = 1});
            CHECK(used.scale() == 256);
            CHECK(used.state().good_updates == 1);
            CHECK(used.state().skipped_in_a_row == 0);
        }
        CHECK(model.optimizer.steps() == 1);
        for (const double scale : {256.0, 512.0}) {
            model.add(used, {1});
            CHECK(used.step(model.optimizer));
            model.optimizer.zero_grad();
            CHECK(used.scale() == scale);
        }
    });
}

TEST_CASE("loss scaler: a resumed run goes on with the scale and the counter, bit for bit") {
    on_each_device([] {
        const TemporaryFolder folder;
        const auto train = [&](const std::string& name, std::int64_t steps, bool resume) {
            manual_seed(1);
            Product model(0.5);
            optim::AdamW optimizer(model, {.learning_rate = 0.01});
            std::vector<double> inputs;
            for (int i = 0; i < 8; ++i) inputs.push_back(0.1 * (i + 1));
            data::Loader loader(rows(inputs), {.batch = 2, .shuffle = true});
            Trainer trainer(model, optimizer, loader,
                            {.steps = steps,
                             .run_folder = folder / name,
                             .resume = resume,
                             .quiet = true,
                             .precision = Precision::f16,
                             .loss_scaler = {.initial = 256, .growth_interval = 9}});
            trainer.fit();
            return model.w.to_vector();
        };
        const std::vector<double> whole = train("whole", 27, false);
        train("parts", 7, false);
        const auto checkpoint = latest_checkpoint(folder / "parts/checkpoints");
        REQUIRE(checkpoint.has_value());
        const Manifest manifest = read_manifest(*checkpoint);
        REQUIRE(manifest.state.loss_scaler.has_value());
        CHECK(manifest.state.loss_scaler->scale == 256);
        CHECK(manifest.state.loss_scaler->good_updates == 7);
        CHECK(train("parts", 27, true) == whole);
    });
}

TEST_CASE("precision: bf16 and f16 end near f32, with parameters and state in f32") {
    const auto train = [](Precision precision) {
        manual_seed(3);
        nn::GPT2 model(
            {.vocabulary = 17, .context = 8, .width = 16, .heads = 2, .layers = 2, .dropout = 0.1});
        Generator generator(5);
        const Tensor text = randint(0, 17, {400}, {DType::i64}, &generator);
        optim::AdamW optimizer(model, {.learning_rate = 1e-2});
        data::Loader loader(data::TokenWindows(text.to(DType::u8), 8), {.batch = 4, .shuffle = true});
        Trainer trainer(model, optimizer, loader,
                        {.steps = 60, .clip = 1.0, .quiet = true, .precision = precision});
        const TrainingSummary summary = trainer.fit();
        for (const Tensor& parameter : model.parameters()) CHECK(parameter.dtype() == DType::f32);
        return summary.final_train_loss.value();
    };
    const double expected = train(Precision::f32);
    CHECK(train(Precision::bf16) == doctest::Approx(expected).epsilon(0.02));
    CHECK(train(Precision::f16) == doctest::Approx(expected).epsilon(0.02));
}

TEST_CASE("precision: is parsed from its name") {
    CHECK(parse_precision("bf16") == Precision::bf16);
    CHECK(parse_precision("f16") == Precision::f16);
    check_error([] { parse_precision("fp8"); }, {"[precision]", "fp8", "bf16"});
}

}  // namespace potluck::test
