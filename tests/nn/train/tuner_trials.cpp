// The trials of a Tuner with real models: same samples, same start, own memory, and nothing left behind.

#include "nn/train/trial.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include "potluck.h"
#include "tests/nn/support.h"

namespace potluck::test {
namespace {

struct Net : nn::Module {
    nn::Linear up{16, 32}, down{32, 4};
    void members(nn::Members& m) override { m("up", up)("down", down); }
    Tensor forward(const Tensor& x) override { return down(relu(up(x))); }
    Tensor loss(const Tensor& x, const Tensor& y) override { return cross_entropy((*this)(x), y); }
};

/// A CPU device of its own: its memory holds nothing else.
Device device_of_test() {
    static const Device device = add_cpu_device();
    return device;
}

data::TensorDataset points(std::int64_t count = 512) {
    Generator generator(11);
    const Tensor x = randn({count, 16}, {}, &generator);
    return data::TensorDataset(x, argmax(x.narrow(1, 0, 4), 1));
}

TrialTraining make_net(const TunerSetting& setting) {
    TrialTraining training;
    training.module = std::make_unique<Net>();
    training.module->to(device_of_test());
    training.optimizer = std::make_unique<optim::AdamW>(*training.module);
    training.loader = std::make_unique<data::Loader>(
        points(),
        data::LoaderOptions{.batch = setting.batch, .shuffle = true, .workers = setting.workers, .seed = 3});
    training.validation = std::make_unique<data::Loader>(points(64), data::LoaderOptions{.batch = 64});
    return training;
}

TrialTraining make_gpt(const TunerSetting& setting) {
    auto model = std::make_unique<nn::GPT2>(
        nn::GPT2Config{.vocabulary = 64, .context = 32, .width = 32, .heads = 4, .layers = 4});
    model->to(device_of_test());
    model->set_recompute(setting.recompute);
    TrialTraining training;
    training.optimizer = std::make_unique<optim::AdamW>(*model);
    training.module = std::move(model);
    Generator generator(12);
    const Tensor text = randint(0, 64, {2048}, {DType::i64}, &generator).to(DType::u8);
    training.loader = std::make_unique<data::Loader>(data::TokenWindows(text, 32),
                                                     data::LoaderOptions{.batch = setting.batch});
    return training;
}

/// A net whose loss is so large that the first scales of f16 overflow.
TrialTraining make_overflowing(const TunerSetting& setting) {
    TrialTraining training = make_net(setting);
    training.loss = [net = training.module.get()](const Tensor& x, const Tensor& y) {
        return static_cast<Net*>(net)->loss(x, y) * 1000.0;
    };
    return training;
}

const TunerSetting base = {.batch = 16, .learning_rate = 1e-2};

}  // namespace

TEST_CASE("trials: a setting that changes nothing of the training gives the loss of the base") {
    ModelTrials trials(make_net, base);
    CHECK(trials.dataset_size() == 512);
    const Trial first = trials.run(base, 256, false);
    REQUIRE(first.failure.empty());
    CHECK(first.loss > 0.0);
    CHECK(first.loss < std::log(4.0));  // it has learned
    CHECK(first.samples_per_second > 0.0);
    CHECK(first.peak_bytes > 0);
    CHECK(first.bottleneck.has_value());
    CHECK(trials.run(base, 256, false).loss == first.loss);
    const Trial in_parts =
        trials.run({.batch = 4, .accumulate = 4, .workers = 2, .learning_rate = 1e-2}, 256, false);
    CHECK(in_parts.loss == doctest::Approx(first.loss).epsilon(1e-4));
    CHECK(in_parts.validation_loss.value() == doctest::Approx(first.validation_loss.value()).epsilon(1e-4));
    const Trial other = trials.run({.batch = 32, .learning_rate = 1e-2}, 256, false);
    CHECK(std::abs(other.loss - first.loss) > 1e-3 * first.loss);
    const Trial rounded =
        trials.run({.precision = Precision::bf16, .batch = 16, .learning_rate = 1e-2}, 256, false);
    CHECK(rounded.loss != first.loss);
    CHECK(rounded.loss == doctest::Approx(first.loss).epsilon(0.01));
    CHECK_FALSE(trials.run(base, 256, true).validation_loss.has_value());
}

TEST_CASE("trials: the program's own model, random numbers and memory stay as they were") {
    manual_seed(99);
    const Net mine;
    const std::vector<double> weights = mine.up.weight.to_vector();
    const RandomKey state = default_generator().state();
    const std::int64_t held = memory_statistics(device_of_test()).current;
    ModelTrials trials(make_net, base);
    (void)Tuner(trials, base, {.updates = 8, .rounds = 1}).run();
    (void)trials.memory_of(base);
    CHECK(mine.up.weight.to_vector() == weights);
    CHECK(default_generator().state().seed == state.seed);
    CHECK(default_generator().state().offset == state.offset);
    CHECK(memory_statistics(device_of_test()).current == held);
}

TEST_CASE("trials: a loss that is not finite is a failure of the trial") {
    const auto make = [](const TunerSetting& setting) {
        TrialTraining training = make_net(setting);
        auto* net = static_cast<Net*>(training.module.get());
        training.loss = [net](const Tensor& x, const Tensor& y) {
            return cross_entropy((*net)(x), y) * std::numeric_limits<double>::infinity();
        };
        return training;
    };
    ModelTrials trials(make, base);
    CHECK(trials.run(base, 64, false).failure == "the loss is not finite in update 1");
    check_error([&] { (void)Tuner(trials, base, {.updates = 4}).run(); },
                {"the loss is not finite in update 1"});
}

TEST_CASE("trials: updates that overflow in f16 are done again, so that the samples are those of the base") {
    ModelTrials trials(make_overflowing, base);
    const Trial exact = trials.run(base, 256, false);
    const Trial rounded =
        trials.run({.precision = Precision::f16, .batch = 16, .learning_rate = 1e-2}, 256, false);
    REQUIRE(rounded.failure.empty());
    CHECK(rounded.loss == doctest::Approx(exact.loss).epsilon(0.01));
}

TEST_CASE("trials: memory that runs out ends a trial and not the program, and the tuner goes round it") {
    const TunerSetting setting = {.batch = 2, .accumulate = 8};
    const MemoryNeed free = ModelTrials(make_gpt, setting).memory_of(setting);
    const std::int64_t cap = free.needed * 13 / 10;
    set_memory_cap(cap, device_of_test());
    ModelTrials trials(make_gpt, setting);
    CHECK(trials.memory_of(setting).available <= cap);
    const Trial too_large = trials.run({.batch = 16}, 64, false);
    CHECK(too_large.out_of_memory);
    CHECK_FALSE(too_large.failure.empty());
    const TunerResult result =
        Tuner(trials, setting,
              {.updates = 4, .rounds = 1, .precisions = {}, .recompute = recompute_policies(4)})
            .run();
    INFO(to_table(result));
    REQUIRE(result.rows.size() >= 3);
    CHECK(result.rows[1].step == "batch 4 x 4");
    CHECK(result.rows[1].why.find("batch 4 x 4 would need") != std::string::npos);
    const auto found = std::find_if(result.rows.begin(), result.rows.end(),
                                    [](const TunerRow& row) { return row.step.starts_with("recompute "); });
    REQUIRE(found != result.rows.end());
    const TunerRow& recomputed = *found;
    REQUIRE(recomputed.trial);
    CHECK(recomputed.trial->peak_bytes <= cap);
    CHECK(std::abs(recomputed.loss_difference.value()) < 1e-4);

    set_memory_cap(free.needed / 2, device_of_test());  // not even the measuring fits
    check_error([&] { (void)Tuner(trials, setting, {.updates = 4}).run(); }, {"[memory budget]", "not even"});
    set_memory_cap(0, device_of_test());
    ModelTrials within(make_gpt, setting, {.memory_bytes = free.needed / 2});
    check_error([&] { (void)Tuner(within, setting, {.updates = 4}).run(); },
                {"[memory budget]", "more than the budget of", "Recomputation"});
}

TEST_CASE("trials: more workers make up for slow items") {
    const auto make = [](const TunerSetting& setting) {
        TrialTraining training = make_net(setting);
        const data::FunctionDataset slow(64, [items = points(64)](std::int64_t index, RandomKey key) {
            std::this_thread::sleep_for(std::chrono::milliseconds(4));
            return items.get(index, key);
        });
        training.loader = std::make_unique<data::Loader>(
            slow, data::LoaderOptions{.batch = setting.batch, .workers = setting.workers});
        return training;
    };
    const TunerSetting one_worker = {.batch = 4, .workers = 1};
    ModelTrials trials(make, one_worker);
    const TunerResult result =
        Tuner(trials, one_worker,
              {.updates = 16, .rounds = 1, .precisions = {}, .larger_updates = false, .max_workers = 4})
            .run();
    INFO(to_table(result));
    REQUIRE(result.rows.size() >= 2);
    CHECK(result.rows[1].step == "workers 2");
    CHECK(result.rows[1].kept);
    CHECK(result.rows[1].speed_ratio.value() > 1.3);
    CHECK(result.rows[1].speed_ratio.value() < 3.0);  // what was read ahead is not taken for speed
}

TEST_CASE("trials: a stop is asked for before each update") {
    int asked = 0;
    ModelTrials trials(make_net, base, {.should_stop = [&] { return ++asked > 5; }});
    const Trial trial = trials.run(base, 256, false);
    CHECK(trial.stopped);
    CHECK(asked == 6);
    CHECK(Tuner(trials, base).run().stopped);
}

TEST_CASE("trials: what makes no training is refused") {
    check_error([] { ModelTrials trials(MakeTraining(), base); }, {"no function"});
    check_error([] { ModelTrials trials([](const TunerSetting&) { return TrialTraining{}; }, base); },
                {"no module"});
    const auto other_batch = [](const TunerSetting& setting) {
        TunerSetting other = setting;
        other.batch = 5;
        return make_net(other);
    };
    check_error([&] { ModelTrials trials(other_batch, base); }, {"a batch of 5", "16"});
    check_error([] { ModelTrials trials(make_net, base, {.memory_bytes = -1}); }, {"memory_bytes is -1"});
}

}  // namespace potluck::test
