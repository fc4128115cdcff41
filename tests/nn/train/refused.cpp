// An update that fails half-way leaves nothing behind: the next one is as if it had not been attempted.

#include <doctest/doctest.h>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

struct Line : nn::Module {
    nn::Linear layer{4, 1};
    void members(nn::Members& m) override { m("layer", layer); }
    Tensor forward(const Tensor& x) override { return layer(x); }
    Tensor loss(const Tensor& inputs, const Tensor& targets) override {
        return mse_loss((*this)(inputs), targets);
    }
};

data::Batch line_batch(std::int64_t rows) {
    return {.inputs = potluck::ones({rows, 4}), .targets = potluck::full({rows, 1}, -100.0)};
}

}  // namespace

TEST_CASE("execution: a step that was refused does not count for the next one's bias correction") {
    on_each_device([] {
        manual_seed(1);
        Line model;
        model.to(test_device());
        optim::AdamW optimizer(model, {.learning_rate = 0.1, .weight_decay = 0.0});
        OneDevice execution(model, optimizer);
        const std::vector<data::Batch> batches{line_batch(8)};
        const std::vector<double> before = model.layer.weight.to_vector();
        const nn::Linear kept = model.layer;
        model.layer = nn::Linear(4, 1);
        model.to(test_device());
        check_error([&] { execution.update(batches, {.learning_rate = 0.1}); }, {"[adamw]", "layer.weight"});
        model.layer = kept;
        CHECK(execution.update(batches, {.learning_rate = 0.1}).outcome == UpdateResult::Outcome::applied);
        const std::vector<double> after = model.layer.weight.to_vector();
        for (std::size_t i = 0; i < before.size(); ++i)
            CHECK(before[i] - after[i] == doctest::Approx(0.1).epsilon(1e-5));
    });
}

TEST_CASE("execution: the sum of a half type's mean keeps its range and its precision") {
    on_each_device([] {
        for (const DType dtype : {DType::f16, DType::bf16}) {
            for (const std::int64_t rows : {1000, 8192}) {
                Line model;
                model.to(test_device());
                model.to(dtype);
                optim::SGD optimizer(model, {.learning_rate = 1e-6});
                const Tensor target = potluck::full({rows, 1}, 5.0, {dtype});
                OneDevice execution(model, optimizer, [&](const Tensor& x, const Tensor& y) {
                    return mean(square(model(x) * 0.0 - y));
                });
                const UpdateResult result =
                    execution.update(std::vector<data::Batch>{{.inputs = potluck::zeros({rows, 4}, {dtype}),
                                                               .targets = target}},
                                     {});
                CHECK(result.loss == doctest::Approx(25.0).epsilon(1e-6));
            }
        }
    });
}

TEST_CASE(
    "execution: unsaved buffers and random numbers of a refused update are put back, and validation draws "
    "none") {
    struct Counting : nn::Module {
        Tensor w = nn::parameter(potluck::ones({1})), saved = potluck::zeros({}),
               unsaved = potluck::zeros({});
        void members(nn::Members& m) override {
            m("w", w).buffer("saved", saved).buffer("unsaved", unsaved, false);
        }
        Tensor loss(const Tensor& inputs, const Tensor&) override {
            const NoGrad guard;
            saved.add_(potluck::ones({}));
            unsaved.add_(potluck::ones({}));
            const Tensor noise = rand({1});
            const GradMode recorded(true);
            return mean(w * inputs) + sum(noise) * 0.0;
        }
    } model;
    manual_seed(5);
    optim::SGD optimizer(model);
    OneDevice execution(model, optimizer);
    const auto update = [&](double value) {
        return execution
            .update(std::vector<data::Batch>{{.inputs = potluck::full({1, 1}, value)}},
                    {.learning_rate = 0.1})
            .outcome;
    };
    CHECK(update(1.0) == UpdateResult::Outcome::applied);
    const std::uint64_t drawn = default_generator().state().offset;
    CHECK(update(std::numeric_limits<double>::infinity()) == UpdateResult::Outcome::not_finite);
    CHECK(default_generator().state().offset == drawn);
    CHECK(model.saved.item() == 1.0);
    CHECK(model.unsaved.item() == 1.0);
    data::Loader loader(data::TensorDataset(potluck::ones({3, 1})));
    CHECK(execution.evaluate(loader).count == 3);
    CHECK(default_generator().state().offset == drawn);
}

TEST_CASE(
    "execution: an unsaved buffer that was written, moved or replaced between updates is put back as it was "
    "then") {
    struct Tabled : nn::Module {
        Tensor w = nn::parameter(potluck::ones({1})), table = potluck::zeros({2});
        bool spoils = false;
        void members(nn::Members& m) override { m("w", w).buffer("table", table, false); }
        Tensor loss(const Tensor& inputs, const Tensor&) override {
            const NoGrad guard;
            if (spoils) table.mul_(-1.0);
            const GradMode recorded(true);
            return mean(w * inputs);
        }
    } model;
    optim::SGD optimizer(model);
    OneDevice execution(model, optimizer);
    const auto update = [&](double value, bool spoils) {
        model.spoils = spoils;
        return execution
            .update(std::vector<data::Batch>{{.inputs = potluck::full({1, 1}, value)}},
                    {.learning_rate = 0.1})
            .outcome;
    };
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const auto check_refused = [&](double expected) {
        CHECK(update(1.0, false) == UpdateResult::Outcome::applied);
        CHECK(update(infinity, true) == UpdateResult::Outcome::not_finite);
        CHECK(model.table.to_vector() == std::vector<double>{expected, expected});
        CHECK(update(1.0, true) == UpdateResult::Outcome::applied);
        CHECK(update(infinity, true) == UpdateResult::Outcome::not_finite);
        CHECK(model.table.to_vector() == std::vector<double>{-expected, -expected});
    };
    model.table.fill_(2.0);
    check_refused(2.0);
    model.table.fill_(3.0);
    check_refused(3.0);
    model.table = potluck::full({2}, 4.0);
    check_refused(4.0);
    model.table.set_elements(potluck::full({2}, 5.0));
    check_refused(5.0);
    const Tensor kept = model.table;
    CHECK(update(1.0, false) == UpdateResult::Outcome::applied);
    CHECK(model.table.is_same(kept));
}

TEST_CASE("execution: two views of one element count once in the norm") {
    struct Shared : nn::Module {
        Tensor w = nn::parameter(potluck::zeros({1})), v = w.detach();
        Shared() { v.set_requires_grad(); }
        void members(nn::Members& m) override { m("w", w)("v", v); }
        Tensor loss(const Tensor& inputs, const Tensor&) override {
            return mean((w * 3.0 + v * 4.0) * inputs);
        }
    } model;
    optim::SGD optimizer(model);
    OneDevice execution(model, optimizer);
    const UpdateResult result = execution.update(std::vector<data::Batch>{{.inputs = potluck::ones({1, 1})}},
                                                 {.learning_rate = 1.0, .max_norm = 1.0});
    CHECK(result.gradient_norm == doctest::Approx(7.0));
    CHECK(model.w.item() == doctest::Approx(-1.0));
}

TEST_CASE("execution, update: what cannot be is refused in words") {
    nn::Dropout nothing_to_train;
    Line model;
    optim::AdamW optimizer(model);
    check_error([&] { OneDevice(nothing_to_train, optimizer); }, {"[trainer]", "no parameters"});
    check_error([&] { LossFunction()(potluck::ones({1}), {}, 1); }, {"[loss]", "no function"});
    sum(model(potluck::ones({1, 4}))).backward();
    UpdateControl control;
    check_error([&] { optimizer.step(control); }, {"[adamw]", "decide()"});
    control.write({.learning_rate = 0.1});
    check_error([&] { optimizer.step(control); }, {"[adamw]", "decide()"});
    check_error([&] { control.add_loss(potluck::ones({}, {DType::i64})); }, {"[update]", "i64"});
    if (test_device() != Device::cpu()) {
        check_error([&] { control.add_loss(ones({})); }, {"[update]", "lies on"});
    }
    check_error([&] { optim::AdamW(model, {.epsilon = std::numeric_limits<double>::infinity()}); },
                {"epsilon"});
    for (const auto& [name, value] : std::map<std::string, Tensor>{
             {"steps", potluck::tensor(2.5, {DType::f64})},
             {"steps/layer.bias", potluck::full({}, std::numeric_limits<std::int64_t>::max(), {DType::i64})},
             {"steps/layer.weight", Tensor()}}) {
        nn::StateDict state = optimizer.state_dict();
        state[name] = value;
        check_error([&] { optimizer.load_state_dict(state); }, {name, "Nothing was loaded"});
    }
    optimizer.step();
    nn::StateDict state = optimizer.state_dict();
    state["second_moment/layer.bias"] = potluck::full({1}, -5.0);
    check_error([&] { optimizer.load_state_dict(state); }, {"second_moment/layer.bias", "negative"});
}

}  // namespace potluck::test
