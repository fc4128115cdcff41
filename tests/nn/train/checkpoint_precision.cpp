// Checkpoints that are loaded under another dtype, another rounding or another optimizer than they were saved under.

#include <doctest/doctest.h>

#include <memory>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::check_error;
using test::same;

namespace {

struct Net : nn::Module {
    nn::Linear up{3, 5}, down{5, 3};
    Tensor tied = up.weight;
    void members(nn::Members& m) override { m("up", up)("down", down)("tied", tied); }
    Tensor forward(const Tensor& x) override { return down(up(x)); }
};

/// A net in some dtype and its optimizer after some steps.
struct Trained {
    explicit Trained(DType dtype, bool stochastic_rounding = false, int steps = 0) {
        manual_seed(static_cast<std::uint64_t>(steps) + 1);
        net = Net();
        net.to(test::test_device());
        net.to(dtype);
        optimizer.emplace(
            net, optim::AdamWOptions{.learning_rate = 1e-3, .stochastic_rounding = stochastic_rounding});
        for (int i = 0; i < steps; ++i) step();
    }
    void step() {
        const DType dtype = net.up.weight.dtype();
        sum(net(full({2, 3}, 0.3, {dtype, test::test_device()}))).backward();
        optimizer->step();
        optimizer->zero_grad();
    }
    Tensor weight(const std::string& name) const { return net.state_dict().at(name).detach(); }
    nn::StateDict state() const { return optimizer->state_dict(); }

    Net net;
    std::optional<optim::AdamW> optimizer;
};

std::string save(const test::TemporaryFolder& folder, const Trained& trained) {
    return save_checkpoint(folder.path(), trained.net, *trained.optimizer, {.step = 1});
}

void check_moments(const Trained& a, const Trained& b) {
    for (const auto& [name, tensor] : a.state())
        if (name.starts_with("first_moment/") || name.starts_with("second_moment/"))
            CHECK(same(tensor.to(DType::f32), b.state().at(name).to(DType::f32)));
}

}  // namespace

TEST_CASE("checkpoint: saved in f32 and loaded in a half type, the weights are its masters, bit for bit") {
    test::on_each_device([] {
        for (const DType dtype : {DType::bf16, DType::f16}) {
            const test::TemporaryFolder folder;
            Trained saved(DType::f32, false, 3);
            Trained half(dtype);
            load_checkpoint(save(folder, saved), half.net, *half.optimizer);
            for (const auto& [name, weight] : saved.net.state_dict()) {
                INFO(name);
                CHECK(same(half.weight(name), weight.detach().to(dtype)));
                if (name != "tied") CHECK(same(half.state().at("master/" + name), weight.detach()));
            }
            check_moments(half, saved);
            CHECK(half.net.tied.is_same(half.net.up.weight));
            half.step();
            CHECK(half.optimizer->steps() == 4);
            // And back: what the half type cannot hold was in the masters.
            Trained back(DType::f32);
            load_checkpoint(save(folder, half), back.net, *back.optimizer);
            for (const auto& [name, weight] : back.net.state_dict())
                if (name != "tied") CHECK(same(weight.detach(), half.state().at("master/" + name)));
            CHECK_FALSE(back.state().contains("master/up.weight"));
            CHECK(back.net.tied.is_same(back.net.up.weight));
            check_moments(back, half);
            back.step();
        }
    });
}

TEST_CASE("checkpoint: through a half type and back without an update, no bit has changed") {
    const test::TemporaryFolder folder;
    Trained saved(DType::f32, false, 3), half(DType::bf16), back(DType::f32);
    load_checkpoint(save(folder, saved), half.net, *half.optimizer);
    load_checkpoint(save(folder, half), back.net, *back.optimizer);
    for (int i = 0; i < 2; ++i) {
        for (const auto& [name, weight] : saved.net.state_dict())
            CHECK(same(back.weight(name), weight.detach()));
        check_moments(back, saved);
        saved.step();
        back.step();
    }
}

TEST_CASE("checkpoint: weights that were written to after the last update count, not their masters") {
    const test::TemporaryFolder folder;
    Trained half(DType::bf16, false, 2), back(DType::f32);
    {
        const NoGrad guard;
        half.net.down.bias.select(0, 1).fill_(0.5);
    }
    load_checkpoint(save(folder, half), back.net, *back.optimizer);
    CHECK(back.weight("down.bias").select(0, 1).item() == 0.5);
    const Tensor master = half.state().at("master/down.bias");
    for (const std::int64_t i : {0, 2})
        CHECK(back.weight("down.bias").select(0, i).item() == master.select(0, i).item());
}

TEST_CASE("checkpoint: masters come and go with stochastic rounding") {
    const test::TemporaryFolder folder;
    Trained with_masters(DType::bf16, false, 3), without(DType::bf16, true), again(DType::bf16);
    load_checkpoint(save(folder, with_masters), without.net, *without.optimizer);
    CHECK(same(without.weight("up.weight"), with_masters.weight("up.weight")));
    CHECK_FALSE(without.state().contains("master/up.weight"));
    check_moments(without, with_masters);
    without.step();
    load_checkpoint(save(folder, without), again.net, *again.optimizer);
    CHECK(same(again.weight("up.weight"), without.weight("up.weight")));
    CHECK(same(again.state().at("master/up.weight"), without.weight("up.weight").to(DType::f32)));
    again.step();
}

TEST_CASE("checkpoint: f64 is rounded to f32, and f32 fits into f64") {
    const test::TemporaryFolder folder;
    Trained wide(DType::f64, false, 2), narrow(DType::f32), back(DType::f64);
    load_checkpoint(save(folder, wide), narrow.net, *narrow.optimizer);
    CHECK(same(narrow.weight("up.weight"), wide.weight("up.weight").to(DType::f32)));
    load_checkpoint(save(folder, narrow), back.net, *back.optimizer);
    CHECK(same(back.weight("up.weight"), narrow.weight("up.weight").to(DType::f64)));
    CHECK(back.state().at("first_moment/up.weight").dtype() == DType::f64);
    Trained half(DType::bf16);
    load_checkpoint(save(folder, wide), half.net, *half.optimizer);
    CHECK(same(half.state().at("master/up.weight"), wide.weight("up.weight").to(DType::f32)));
}

TEST_CASE("checkpoint: parameters that were never updated have nothing to convert") {
    const test::TemporaryFolder folder;
    Trained saved(DType::f32), half(DType::bf16);
    load_checkpoint(save(folder, saved), half.net, *half.optimizer);
    CHECK(same(half.weight("up.weight"), saved.weight("up.weight").to(DType::bf16)));
    CHECK_FALSE(half.state().contains("master/up.weight"));
    half.step();
}

TEST_CASE("trainer: a run in f32 goes on in bf16") {
    const test::TemporaryFolder folder;
    std::vector<double> losses;
    for (const DType dtype : {DType::f32, DType::bf16}) {
        manual_seed(3);
        nn::GPT2 model({.vocabulary = 20, .context = 8, .width = 16, .heads = 2, .layers = 1});
        model.to(dtype);
        optim::AdamW optimizer(model, {.learning_rate = 0.01});
        data::Loader loader(data::TokenWindows(arange(0, 20), 8), {.batch = 4});
        Trainer(model, optimizer, loader,
                {.steps = losses.empty() ? 40 : 50,
                 .run_folder = folder / "run",
                 .resume = !losses.empty(),
                 .quiet = true,
                 .on_step = [&](const StepMetrics& metrics) { losses.push_back(metrics.loss); }})
            .fit();
    }
    REQUIRE(losses.size() == 50);
    CHECK(losses[39] < 0.6 * losses[0]);
    CHECK(losses[40] < 1.1 * losses[39]);
    CHECK(losses[49] < losses[40]);
}

TEST_CASE("checkpoint: the state of another kind of optimizer is refused, which is told") {
    const test::TemporaryFolder folder;
    const auto make = [](const std::string& kind, Net& net) -> std::unique_ptr<optim::Optimizer> {
        if (kind == "adamw") return std::make_unique<optim::AdamW>(net);
        return std::make_unique<optim::SGD>(net, optim::SGDOptions{.momentum = kind == "sgd" ? 0.0 : 0.9});
    };
    const std::map<std::string, std::string> moments = {
        {"adamw", "first_moment and second_moment"}, {"sgd", "no moments"}, {"momentum", "momentum"}};
    for (const auto& [from, held] : moments) {
        Net saved;
        const auto optimizer = make(from, saved);
        const auto save = [&] { return save_checkpoint(folder.path(), saved, *optimizer, {.step = 1}); };
        for (const auto& [to, kept] : moments) {
            Net net;
            const auto other = make(to, net);
            load_checkpoint(save(), net, *other);  // before the first update they are all alike
        }
        saved(ones({1, 3})).sum().backward();
        optimizer->step();
        for (const auto& [to, kept] : moments) {
            CAPTURE(from);
            CAPTURE(to);
            Net net;
            const Tensor before = net.up.weight.detach().clone();
            const auto other = make(to, net);
            if (from == to) {
                load_checkpoint(save(), net, *other);
                continue;
            }
            check_error([&] { load_checkpoint(save(), net, *other); },
                        {"another kind of optimizer: it holds " + held + " of each parameter",
                         "this one keeps " + kept + ".", "Nothing was loaded"});
            CHECK(same(net.up.weight.detach(), before));
            CHECK(other->steps() == 0);
        }
    }
}
