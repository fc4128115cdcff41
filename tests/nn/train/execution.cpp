// The effects of an update on parameters, optimizer and buffers, and their absence when the update is not applied.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

constexpr std::int64_t ignored = -100;
constexpr double infinity = std::numeric_limits<double>::infinity();

/// One weight. The loss is the mean over the targets of weight * input.
struct Scale : nn::Module {
    Tensor w;
    explicit Scale(double start, DType dtype = DType::f32) : w(nn::parameter(full({1}, start, {dtype}))) {}
    void members(nn::Members& m) override { m("w", w); }
    Tensor loss(const Tensor& inputs, const Tensor&) override { return mean(w * inputs.to(w.dtype())); }
    double value() const { return w.to_vector<double>()[0]; }
};

/// A batch norm of one channel, followed by a weight.
struct Normalised : nn::Module {
    nn::BatchNorm norm{1};
    Tensor w = nn::parameter(ones({1}));
    void members(nn::Members& m) override { m("norm", norm)("w", w); }
    Tensor forward(const Tensor& x) override { return norm(x) * w; }
    Tensor loss(const Tensor& inputs, const Tensor&) override { return mean((*this)(inputs)); }
    std::vector<double> statistics() const {
        return {norm.running_mean.to_vector()[0], norm.running_var.to_vector()[0],
                static_cast<double>(norm.num_batches_tracked.item<std::int64_t>())};
    }
};

Tensor on_cpu(const std::vector<double>& values) {
    return potluck::tensor(values, {static_cast<std::int64_t>(values.size()), 1});
}

/// A batch of values (n, 1) as from a loader, on the CPU; without targets, so that every row counts.
data::Batch batch_of(const std::vector<double>& values) { return {.inputs = on_cpu(values), .targets = {}}; }

UpdateResult update(Execution& execution, const std::vector<data::Batch>& batches, double max_norm = 0.0) {
    return execution.update(batches, {.learning_rate = 0.1, .max_norm = max_norm});
}

nn::StateDict copy_of(const nn::StateDict& state) {
    const NoGrad guard;
    nn::StateDict copy;
    for (const auto& [name, tensor] : state) copy[name] = tensor.detach().clone();
    return copy;
}

void check_unchanged(const nn::StateDict& before, const nn::StateDict& now) {
    REQUIRE(before.size() == now.size());
    for (const auto& [name, tensor] : before) {
        INFO(name);
        CHECK(tensor.to_vector() == now.at(name).to_vector());
    }
}

using Outcome = UpdateResult::Outcome;

}  // namespace

TEST_CASE("execution: gradients of half types are added up in f32, however the window is cut") {
    on_each_device([] {
        for (const DType dtype : {DType::bf16, DType::f16}) {
            for (const std::int64_t micro_batches : {1, 16, 1024, 4096}) {
                INFO(name_of(dtype), " in ", micro_batches, " micro-batches");
                Scale model(0.0, dtype);
                model.to(test_device());
                optim::SGD optimizer(model, {.learning_rate = 0.1});
                OneDevice execution(model, optimizer);
                const std::vector<double> values(static_cast<std::size_t>(4096 / micro_batches), 2.0);
                const std::vector<data::Batch> batches(static_cast<std::size_t>(micro_batches),
                                                       batch_of(values));
                const UpdateResult result = update(execution, batches);
                CHECK(result.gradient_norm == doctest::Approx(2.0).epsilon(1e-6));
                CHECK(result.targets == 4096);
                CHECK(model.value() == doctest::Approx(-0.2).epsilon(4e-3));
                CHECK_FALSE(model.w.grad().defined());
            }
        }
    });
}

TEST_CASE("execution: an update without targets changes nothing, not even by old moments or decay") {
    on_each_device([] {
        const auto check = [](auto make_optimizer) {
            Scale model(1.0);
            model.to(test_device());
            const auto optimizer = make_optimizer(model);
            OneDevice execution(model, *optimizer);
            CHECK(update(execution, {batch_of({1.0, 3.0})}).outcome == Outcome::applied);
            const nn::StateDict before = copy_of(model.state_dict()),
                                state = copy_of(optimizer->state_dict());
            data::Batch none = batch_of({5.0, 5.0});
            none.targets = potluck::full({2}, ignored, {DType::i64});
            for (const auto& batches :
                 {std::vector{none}, std::vector{none, none}, std::vector<data::Batch>{}}) {
                const UpdateResult result = update(execution, batches);
                CHECK(result.outcome == Outcome::no_targets);
                CHECK(result.targets == 0);
                CHECK_FALSE(model.w.grad().defined());
            }
            check_unchanged(before, model.state_dict());
            check_unchanged(state, optimizer->state_dict());
            CHECK(optimizer->steps() == 1);
        };
        check([](nn::Module& m) {
            return std::make_unique<optim::AdamW>(m, optim::AdamWOptions{.weight_decay = 0.5});
        });
        check([](nn::Module& m) {
            return std::make_unique<optim::SGD>(m, optim::SGDOptions{.momentum = 0.9});
        });
    });
}

TEST_CASE("execution: a micro-batch without targets is left out, also where its own mean is 0 / 0") {
    on_each_device([] {
        Scale model(0.0);
        model.to(test_device());
        optim::SGD optimizer(model, {.learning_rate = 0.1});
        OneDevice execution(model, optimizer, [&](const Tensor& x, const Tensor& y) {
            const Tensor counts = (y != ignored).to(DType::f32);
            return sum(model.w * x * counts) / sum(counts);
        });
        data::Batch all = batch_of({2.0, 4.0}), none = batch_of({7.0, 7.0});
        all.targets = potluck::zeros({2, 1}, {DType::i64});
        none.targets = potluck::full({2, 1}, ignored, {DType::i64});
        const UpdateResult result = update(execution, {none, all, none});
        CHECK(result.outcome == Outcome::applied);
        CHECK(result.targets == 2);
        CHECK(result.gradient_norm == doctest::Approx(3.0));
        CHECK(model.value() == doctest::Approx(-0.3));
    });
}

TEST_CASE(
    "execution: an update that is not finite leaves parameters, optimizer and running statistics alone") {
    on_each_device([] {
        for (const bool momentum : {false, true}) {
            Normalised model;
            model.to(test_device());
            optim::SGD optimizer(model, {.momentum = momentum ? 0.9 : 0.0});
            OneDevice execution(model, optimizer);
            CHECK(update(execution, {batch_of({3.0, 5.0})}).outcome == Outcome::applied);
            CHECK(model.statistics()[0] == doctest::Approx(0.4));
            const nn::StateDict before = copy_of(model.state_dict()), state = copy_of(optimizer.state_dict());
            // alone, and as the second and the first micro-batch
            for (const auto& batches : {std::vector{batch_of({infinity, 1.0})},
                                        std::vector{batch_of({3.0, 5.0}), batch_of({infinity, 1.0})},
                                        std::vector{batch_of({infinity, 1.0}), batch_of({3.0, 5.0})}}) {
                const UpdateResult result = update(execution, batches);
                CHECK(result.outcome == Outcome::not_finite);
                CHECK_FALSE(std::isfinite(result.loss));
                CHECK_FALSE(model.w.grad().defined());
                check_unchanged(before, model.state_dict());
                check_unchanged(state, optimizer.state_dict());
                CHECK(optimizer.steps() == 1);
            }
            CHECK(update(execution, {batch_of({3.0, 5.0})}).outcome == Outcome::applied);
            CHECK(model.statistics()[0] == doctest::Approx(0.76));
            CHECK(model.statistics()[1] == doctest::Approx(1.19));
            CHECK(model.statistics()[2] == 2.0);
        }
    });
}

TEST_CASE("execution: the same when the gradient alone is not finite, and it is named") {
    on_each_device([] {
        Normalised model;
        model.to(test_device());
        optim::SGD optimizer(model);
        OneDevice execution(model, optimizer, [&](const Tensor& x, const Tensor&) {
            return mean(model(x)) +
                   sum(sqrt((model.w - model.w.detach()) * 0.0));  // 0, with the gradient 0 / 0
        });
        const nn::StateDict before = copy_of(model.state_dict());
        const UpdateResult result = update(execution, {batch_of({3.0, 5.0})}, 1.0);
        CHECK(result.outcome == Outcome::not_finite);
        CHECK(std::isfinite(result.loss));
        CHECK_FALSE(std::isfinite(result.gradient_norm));
        CHECK(result.culprit == "w");
        check_unchanged(before, model.state_dict());
    });
}

TEST_CASE(
    "execution: an op that refuses its input leaves everything as it was, and the next update is right") {
    on_each_device([] {
        manual_seed(3);
        struct Net : nn::Module {
            nn::Embedding table{4, 2};
            nn::BatchNorm norm{2};
            void members(nn::Members& m) override { m("table", table)("norm", norm); }
            Tensor forward(const Tensor& ids) override { return norm(table(ids)); }
            Tensor loss(const Tensor& ids, const Tensor&) override { return mean(square((*this)(ids))); }
        } net;
        net.to(test_device());
        optim::AdamW optimizer(net);
        OneDevice execution(net, optimizer);
        const auto ids = [](std::vector<std::int64_t> values) {
            const auto count = static_cast<std::int64_t>(values.size());
            return data::Batch{.inputs = potluck::tensor(values, {count}), .targets = {}};
        };
        CHECK(update(execution, {ids({0, 1, 3})}).outcome == Outcome::applied);
        const nn::StateDict before = copy_of(net.state_dict()), state = copy_of(optimizer.state_dict());
        check_error([&] { update(execution, {ids({1, 2, 0}), ids({0, 9, 1})}); }, {"[embedding]", "9"});
        check_unchanged(before, net.state_dict());
        check_unchanged(state, optimizer.state_dict());
        for (const Tensor& parameter : net.parameters()) CHECK_FALSE(parameter.grad().defined());
        CHECK(update(execution, {ids({0, 1, 3})}).outcome == Outcome::applied);
        CHECK(optimizer.steps() == 2);
    });
}

TEST_CASE("execution: a gradient of 60000 in f16 is scaled down to the norm asked for, not to nothing") {
    on_each_device([] {
        struct Wide : nn::Module {
            Tensor w = nn::parameter(zeros({1000000}, {DType::f16}));
            void members(nn::Members& m) override { m("w", w); }
            Tensor loss(const Tensor& inputs, const Tensor&) override {
                return sum(w * inputs.to(DType::f16)[0]);
            }
        } model;
        model.to(test_device());
        optim::SGD optimizer(model, {.learning_rate = 1.0});
        OneDevice execution(model, optimizer);
        const UpdateResult result = update(execution, {batch_of({60000.0})}, 1.0);
        CHECK(result.gradient_norm == doctest::Approx(6e7).epsilon(1e-3));
        const NoGrad guard;
        const Tensor moved = model.w.detach().to(DType::f64);
        CHECK(norm(moved).item() == doctest::Approx(0.1).epsilon(2e-3));  // learning rate 0.1
    });
}

TEST_CASE("execution: a loss may be a mean or a sum with its own count") {
    on_each_device([] {
        for (const bool as_sum : {false, true}) {
            Scale model(1.0);
            model.to(test_device());
            optim::SGD optimizer(model);
            const auto mean_loss = [&](const Tensor& x, const Tensor&) { return mean(model.w * x); };
            const auto sum_loss = [&](const Tensor& x, const Tensor&) {
                return LossSum{sum(model.w * x), x.size(0)};
            };
            OneDevice execution(model, optimizer, as_sum ? LossFunction(sum_loss) : LossFunction(mean_loss));
            const UpdateResult result = update(execution, {batch_of({4.0}), batch_of({1.0, 1.0, 1.0})});
            CHECK(result.loss == doctest::Approx(1.75));
            CHECK(result.targets == 4);
            CHECK(model.value() == doctest::Approx(1.0 - 0.175));
            CHECK(execution
                      .evaluate(*std::make_unique<data::Loader>(data::TensorDataset(on_cpu({4, 1, 1, 1})),
                                                                data::LoaderOptions{.batch = 3}))
                      .mean()
                      .value() == doctest::Approx(1.75 * 0.825));
        }
    });
}

TEST_CASE("execution: the first update warns of a layer that members() forgot") {
    struct Forgetful : nn::Module {
        nn::Linear named{2, 3}, forgotten{3, 1};
        void members(nn::Members& m) override { m("named", named); }
        Tensor forward(const Tensor& x) override { return forgotten(named(x)); }
        Tensor loss(const Tensor& inputs, const Tensor&) override { return mean((*this)(inputs)); }
    } model;
    optim::SGD optimizer(model);
    OneDevice execution(model, optimizer);
    const data::Batch batch{.inputs = potluck::ones({4, 2})};
    const TemporaryFolder folder;
    const std::string path = folder / "stderr";
    const auto said = [&] {
        std::fflush(stderr);
        const int kept = dup(STDERR_FILENO);
        const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(file, STDERR_FILENO);
        update(execution, {batch});
        std::fflush(stderr);
        dup2(kept, STDERR_FILENO);
        close(file);
        close(kept);
        return read_file(path);
    };
    const std::string first = said();
    CHECK(first.find("linear uses a f32 tensor (1, 3)") != std::string::npos);
    CHECK(first.find("(3, 2)") == std::string::npos);
    CHECK(said().empty());
}

}  // namespace potluck::test
