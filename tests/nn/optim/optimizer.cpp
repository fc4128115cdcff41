// Optimizers: update rules, weight decay, groups, master copies, state by name.

#include <doctest/doctest.h>

#include <cmath>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

std::vector<nn::NamedTensor> one(const Tensor& p, const std::string& name = "p") { return {{name, p}}; }

/// Sets the gradient and updates.
void step_with(optim::Optimizer& optimizer, Tensor p, double gradient) {
    p.set_grad(full(p.shape(), gradient, {p.dtype()}));
    optimizer.step();
    optimizer.zero_grad();
}

double first_of(const Tensor& x) { return x.to_vector<double>()[0]; }

struct Pair : nn::Module {
    nn::Linear p1{8, 8}, p2{8, 8};
    void members(nn::Members& m) override { m("p1", p1)("p2", p2); }
    Tensor forward(const Tensor& x) override { return p2(relu(p1(x))); }
};
struct SwappedPair : Pair {
    void members(nn::Members& m) override { m("p2", p2)("p1", p1); }
};

void train(Pair& net, optim::Optimizer& optimizer, int steps) {
    Generator generator(5);
    for (int i = 0; i < steps; ++i) {
        const Tensor x = randn({4, 8}, {}, &generator);
        optimizer.zero_grad();
        mse_loss(net(x), x).backward();
        optimizer.step();
    }
    optimizer.zero_grad();
}

}  // namespace

TEST_CASE("optim: AdamW and Adam with L2 follow their own rules") {
    on_each_device([] {
        for (const DType dtype : {DType::f64, DType::f32}) {
            for (const bool decoupled : {true, false}) {
                const Tensor p = nn::parameter(ones({1, 1}, {dtype}));
                optim::AdamW optimizer(one(p),
                                       {.learning_rate = 0.01, .weight_decay = 0.1, .decoupled = decoupled});
                step_with(optimizer, p, 0.5);
                CHECK(first_of(p) == doctest::Approx(decoupled ? 0.9890000 : 0.9900000).epsilon(1e-6));
                step_with(optimizer, p, -0.25);
                step_with(optimizer, p, 0.125);
                CHECK(first_of(p) == doctest::Approx(decoupled ? 0.9809580 : 0.9797441).epsilon(1e-6));
                const nn::StateDict state = optimizer.state_dict();
                CHECK(first_of(state.at("first_moment/p")) ==
                      doctest::Approx(decoupled ? 0.0305 : 0.05736319).epsilon(1e-6));
                CHECK(first_of(state.at("second_moment/p")) ==
                      doctest::Approx(decoupled ? 3.275628e-4 : 4.320250e-4).epsilon(1e-6));
                CHECK(optimizer.steps() == 3);
            }
        }
    });
}

TEST_CASE("optim: SGD with momentum, dampening, nesterov and weight decay") {
    on_each_device([] {
        const double lr = 0.1, momentum = 0.9, decay = 0.01;
        for (const bool nesterov : {false, true}) {
            const double dampening = nesterov ? 0.0 : 0.2;
            const Tensor p = nn::parameter(full({1, 1}, 2.0, {DType::f64}));
            optim::SGD optimizer(one(p), {.learning_rate = lr,
                                          .momentum = momentum,
                                          .dampening = dampening,
                                          .weight_decay = decay,
                                          .nesterov = nesterov});
            double expected = 2.0, velocity = 0.0;
            for (int i = 0; i < 4; ++i) {
                const double raw = 0.5 - 0.3 * i;
                const double gradient = raw + decay * expected;
                velocity = i == 0 ? gradient : momentum * velocity + (1.0 - dampening) * gradient;
                expected -= lr * (nesterov ? gradient + momentum * velocity : velocity);
                step_with(optimizer, p, raw);
                CHECK(first_of(p) == doctest::Approx(expected).epsilon(1e-12));
            }
        }
    });
}

TEST_CASE("optim: biases and norms are not decayed unless a group says so") {
    Pair net;
    {
        const NoGrad guard;
        for (const Tensor& p : net.parameters()) p.fill_(1.0);
    }
    const auto decayed = [&](const std::vector<optim::ParameterGroup>& groups) {
        Pair copy = nn::clone(net);
        optim::SGD optimizer(copy, {.learning_rate = 1.0, .weight_decay = 0.5, .groups = groups});
        for (Tensor p : copy.parameters()) p.set_grad(zeros(p.shape()));
        optimizer.step();
        std::map<std::string, double> factors;
        for (const auto& [name, p] : copy.named_parameters()) {
            factors[name] = first_of(p);
        }
        return factors;
    };
    using Factors = std::map<std::string, double>;
    CHECK(decayed({}) == Factors{{"p1.weight", 0.5}, {"p1.bias", 1.0}, {"p2.weight", 0.5}, {"p2.bias", 1.0}});
    CHECK(decayed({{.pattern = "p1.*", .weight_decay = 0.25},
                   {.pattern = "*.weight", .learning_rate_factor = 0.0}}) ==
          Factors{{"p1.weight", 0.75}, {"p1.bias", 0.75}, {"p2.weight", 1.0}, {"p2.bias", 1.0}});
}

TEST_CASE("optim: patterns") {
    CHECK(optim::matches("*.bias", "h.0.bias"));
    CHECK(optim::matches("h.?.bias", "h.0.bias"));
    CHECK(optim::matches("*", ""));
    CHECK(optim::matches("a*b*c", "aXbYbZc"));
    CHECK_FALSE(optim::matches("*.bias", "h.0.bias.x"));
    CHECK_FALSE(optim::matches("h.?.bias", "h.10.bias"));
    CHECK_FALSE(optim::matches("", "a"));
}

TEST_CASE("optim: bad options are refused") {
    Pair net;
    check_error([&] { optim::AdamW(net, {.groups = {{.pattern = "p3.*"}}}); },
                {"[adamw]", "p3.*", "p1.weight"});
    for (const double bad : {-1.0, double(INFINITY), double(NAN)}) {
        check_error([&] { optim::AdamW(net, {.groups = {{.pattern = "*", .learning_rate_factor = bad}}}); },
                    {"[adamw]", "group \"*\"", "finite"});
        check_error([&] { optim::AdamW(net, {.groups = {{.pattern = "*", .weight_decay = bad}}}); },
                    {"[adamw]", "group \"*\"", "finite"});
    }
    check_error([&] { optim::AdamW(net, {.learning_rate = -1.0}); }, {"[adamw]", "learning rate", "-1"});
    check_error([&] { optim::AdamW(net, {.beta1 = 1.0}); }, {"beta1", "1"});
    check_error([&] { optim::AdamW(net, {.epsilon = -1e-8}); }, {"epsilon"});
    check_error([&] { optim::AdamW(net, {.weight_decay = -0.1}); }, {"weight_decay", "-0.1"});
    check_error([&] { optim::AdamW(net, {.weight_decay = INFINITY}); }, {"weight_decay", "inf"});
    check_error([&] { optim::SGD(net, {.momentum = 1.5}); }, {"[sgd]", "momentum", "1.5"});
    check_error([&] { optim::SGD(net, {.nesterov = true}); }, {"[sgd]", "nesterov"});
    check_error([&] { optim::SGD(std::vector<nn::NamedTensor>{}); }, {"[sgd]", "no parameter"});
    check_error([&] { optim::SGD(one(zeros({1}, {DType::i64}))); }, {"p is i64"});
    optim::SGD optimizer(net);
    check_error([&] { optimizer.set_learning_rate(-0.1); }, {"-0.1"});
}

TEST_CASE("optim: a step without any gradient is an error, a parameter without one is left alone") {
    Pair net;
    optim::AdamW optimizer(net);
    check_error([&] { optimizer.step(); }, {"[adamw]", "no parameter has a gradient", "backward()"});
    const Tensor before = net.p2.weight.clone();
    net.p1(ones({1, 8})).sum().backward();
    optimizer.step();
    CHECK(same(net.p2.weight.detach(), before.detach()));
    CHECK(optimizer.state_dict().at("steps/p2.weight").item<int>() == 0);
    CHECK(optimizer.state_dict().at("steps/p1.weight").item<int>() == 1);
}

TEST_CASE("optim: an optimizer that was made before to() goes on with the same parameters") {
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
        manual_seed(5);
        Pair net;
        Pair other = nn::clone(net);
        optim::AdamW optimizer(net, {.learning_rate = 0.01});
        optim::AdamW reference(other, {.learning_rate = 0.01});
        train(net, optimizer, 3);
        train(other, reference, 3);
        const Tensor handle = net.p1.weight;
        net.p1.bias.set_grad(ones({8}));
        net.to(dtype);
        CHECK(handle.dtype() == dtype);
        CHECK(handle.is_same(net.p1.weight));
        CHECK(net.p1.bias.grad().dtype() == dtype);
        // Moments and masters follow, also in a state that is saved before the next update.
        for (const auto& [name, value] : optimizer.state_dict())
            if (value.ndim() > 0) CHECK(value.dtype() == (dtype == DType::f64 ? DType::f64 : DType::f32));
        CHECK(optimizer.state_dict().contains("master/p1.weight") == (dtype != DType::f64));
        optimizer.zero_grad();
        const auto step = [](Pair& one, optim::Optimizer& by, DType of) {
            for (Tensor p : one.parameters()) p.set_grad(full(p.shape(), 0.25, {of}));
            by.step();
        };
        step(net, optimizer, dtype);
        step(other, reference, DType::f32);
        const std::vector<double> now = net.p1.weight.to_vector(), expected = other.p1.weight.to_vector();
        for (std::size_t i = 0; i < now.size(); ++i)
            CHECK(now[i] == doctest::Approx(expected[i]).epsilon(dtype == DType::f64 ? 1e-5 : 0.01));
        CHECK(optimizer.state_dict().at("steps/p1.weight").item<int>() == 4);
    }
}

TEST_CASE("optim: a graph from before to() says that its values changed") {
    Pair net;
    Tensor x = ones({1, 8});
    x.set_requires_grad();
    const Tensor loss = net(x).sum();
    net.to(DType::f64);
    check_error([&] { loss.backward(); }, {"changed"});
}

TEST_CASE("optim: a layer that was replaced after the optimizer was made is named") {
    struct Net : nn::Module {
        nn::Linear up{1, 1}, down{1, 1};
        void members(nn::Members& m) override { m("up", up)("down", down); }
        Tensor forward(const Tensor& x) override { return down(up(x)); }
    };
    Net net;
    net.up = nn::Linear(1, 1, {.bias = false});
    net.down = nn::Linear(1, 1, {.bias = false});
    const auto set_to_one = [](const Tensor& x) {
        const NoGrad guard;
        x.fill_(1.0);
    };
    set_to_one(net.up.weight);
    set_to_one(net.down.weight);
    const auto backward_of = [&](const DType dtype) { net(full({1, 1}, 2.0, {dtype})).sum().backward(); };
    optim::SGD optimizer(net, {.learning_rate = 0.1});
    backward_of(DType::f32);
    optimizer.step();
    CHECK(net.up.weight.item() == doctest::Approx(0.8));
    CHECK(net.down.weight.item() == doctest::Approx(0.8));
    optimizer.zero_grad();
    net.to(DType::f64);  // converted: the same parameters
    backward_of(DType::f64);
    optimizer.step();
    CHECK(net.up.weight.item() == doctest::Approx(0.64));
    CHECK(net.down.weight.item() == doctest::Approx(0.64));
    optimizer.zero_grad();
    net.down = nn::Linear(1, 1, {.bias = false});
    net.to(DType::f32);
    backward_of(DType::f32);
    check_error([&] { optimizer.step(); }, {"[sgd]", "no longer has", "down.weight"});
    // On purpose: a part of a module that is replaced elsewhere.
    const Net whole = net;
    optim::SGD part(std::vector<nn::NamedTensor>{{"up.weight", net.up.weight}});
    net.down = nn::Linear(1, 1);
    part.step();
    // A layer that was added later is named, too.
    optim::SGD again(net);
    struct Grown : nn::Module {
        std::vector<nn::Linear> layers;
        void members(nn::Members& m) override { m("layers", layers); }
    };
    Grown grown;
    grown.layers.emplace_back(1, 1);
    optim::SGD of_grown(grown);
    grown.layers.emplace_back(1, 1);
    Tensor(grown.layers[0].weight).set_grad(ones({1, 1}));
    check_error([&] { of_grown.step(); }, {"does not know", "layers.1.weight"});
    // A frozen layer is not reported.
    grown.layers[1].set_requires_grad(false);
    of_grown.step();
}

TEST_CASE("optim: modules that end or move while an optimizer knows them") {
    auto net = std::make_unique<Pair>();
    optim::SGD optimizer(*net);
    const std::vector<Tensor> parameters = net->parameters();
    const auto give_gradients = [&] {
        for (Tensor p : parameters) p.set_grad(ones(p.shape()));
    };
    give_gradients();
    optimizer.step();
    Pair moved = std::move(*net);
    give_gradients();
    optimizer.step();
    net.reset();
    give_gradients();
    optimizer.step();
    CHECK(optimizer.steps() == 3);
    optim::SGD of_copy(moved);
    const Pair copy = moved;
    moved = Pair();
    give_gradients();
    check_error([&] { of_copy.step(); }, {"p1.weight"});
}

TEST_CASE("optim: the same elements given twice are updated once") {
    on_each_device([] {
        const auto value_after = [](bool adamw, const std::vector<Tensor>& given, Tensor w) {
            std::vector<nn::NamedTensor> list;
            for (std::size_t i = 0; i < given.size(); ++i)
                list.push_back({"w" + std::to_string(i), given[i]});
            (w * 3.0).sum().backward();
            if (adamw)
                optim::AdamW(list, {.learning_rate = 0.1}).step();
            else
                optim::SGD(list, {.learning_rate = 0.1}).step();
            return first_of(w);
        };
        for (const bool adamw : {false, true}) {
            const double expected = adamw ? -0.1 : -0.3;
            const Tensor w = nn::parameter(zeros({2, 2}));
            CHECK(value_after(adamw, {w, w}, w) == doctest::Approx(expected));
            const Tensor viewed = nn::parameter(zeros({2, 2}));
            const Tensor view = nn::parameter(viewed.detach().reshape({4}));
            CHECK(value_after(adamw, {viewed, view}, viewed) == doctest::Approx(expected));
        }
        // Two tensors with the same elements, each with its own gradient: the sum is used.
        const Tensor w = nn::parameter(zeros({2}));
        const Tensor twin = nn::parameter(w.detach());
        (w * 1.0).sum().backward();
        (twin * 2.0).sum().backward();
        optim::SGD optimizer(std::vector<nn::NamedTensor>{{"w", w}, {"twin", twin}}, {.learning_rate = 0.1});
        optimizer.step();
        CHECK(first_of(w) == doctest::Approx(-0.3));
        optimizer.zero_grad();
        CHECK_FALSE(twin.grad().defined());
    });
}

TEST_CASE("optim: views of one block are parameters of their own, unless they share elements") {
    const Tensor block = zeros({4, 6});
    const auto list = [](const Tensor& a, const Tensor& b) {
        return std::vector<nn::NamedTensor>{{"a", nn::parameter(a)}, {"b", nn::parameter(b)}};
    };
    optim::SGD rows(list(block.narrow(0, 0, 2), block.narrow(0, 2, 2)));
    optim::SGD columns(list(block.narrow(1, 0, 3), block.narrow(1, 3, 3)), {.learning_rate = 1.0});
    CHECK(columns.slices().size() == 2);
    for (const auto& slice : columns.slices()) {
        Tensor p = slice.elements();
        p.set_grad(full(p.shape(), slice.name() == "a" ? 1.0 : 2.0));
    }
    columns.step();
    CHECK(block.to_vector() == std::vector<double>{-1, -1, -1, -2, -2, -2, -1, -1, -1, -2, -2, -2,
                                                   -1, -1, -1, -2, -2, -2, -1, -1, -1, -2, -2, -2});
    check_error([&] { optim::SGD(list(block.narrow(0, 0, 3), block.narrow(0, 2, 2))); },
                {"[sgd]", "a and b share some"});
    check_error([&] { optim::SGD(list(block.narrow(1, 0, 4), block.narrow(1, 3, 3))); },
                {"a and b share some"});
    check_error([&] { optim::SGD(list(block, block.transpose(0, 1))); }, {"a and b share some"});
}

TEST_CASE("optim: parameters that repeat elements are refused, those that run backwards are updated") {
    check_error([] { optim::SGD(one(nn::parameter(zeros({1, 3}).expand({4, 3})))); }, {"[sgd]", "p repeats"});
    const Tensor block = arange(0, 6, 1, {DType::f32});
    const Tensor p = nn::parameter(block.alias({3}, {-2}, 5));
    optim::SGD optimizer(one(p), {.learning_rate = 1.0});
    Tensor(p).set_grad(tensor({10.0, 20.0, 30.0}));
    optimizer.step();
    CHECK(block.to_vector() == std::vector<double>{0, -29, 2, -17, 4, -5});
}

TEST_CASE("optim: changing parameters is noticed by a graph that still needs the old values") {
    Pair net;
    optim::SGD optimizer(net);
    const Tensor x = ones({1, 8});
    const Tensor loss = net(x).sum();
    backward(loss, {.retain_graph = true});
    optimizer.step();
    check_error([&] { backward(loss); }, {"changed"});
}

TEST_CASE("optim: bf16 weights keep an f32 master, so that small steps add up") {
    on_each_device([] {
        const Tensor w = nn::parameter(ones({1}, {DType::bf16}));
        optim::SGD optimizer(one(w, "w"), {.learning_rate = 6e-4});
        for (int i = 0; i < 100; ++i) step_with(optimizer, w, 1.0);
        const nn::StateDict state = optimizer.state_dict();
        CHECK(state.at("master/w").dtype() == DType::f32);
        CHECK(first_of(state.at("master/w")) == doctest::Approx(0.94).epsilon(1e-5));
        CHECK(first_of(w) == 0.94140625);

        // A resumed run continues from the master, not from the rounded weight.
        for (const bool weights_first : {true, false}) {
            const Tensor again = nn::parameter(ones({1}, {DType::bf16}));
            optim::SGD resumed(one(again, "w"), {.learning_rate = 6e-4});
            const auto load_weights = [&] {
                const NoGrad guard;
                again.copy_(w);
            };
            if (weights_first) load_weights();
            resumed.load_state_dict(state);
            if (!weights_first) load_weights();
            step_with(resumed, again, 1.0);
            CHECK(first_of(resumed.state_dict().at("master/w")) ==
                  doctest::Approx(0.94 - 6e-4).epsilon(1e-5));
        }
        // Weights that other code has set are used.
        {
            const NoGrad guard;
            w.fill_(2.0);
        }
        step_with(optimizer, w, 1.0);
        CHECK(first_of(optimizer.state_dict().at("master/w")) == doctest::Approx(2.0 - 6e-4).epsilon(1e-6));
    });
}

TEST_CASE("optim: with stochastic rounding bf16 weights have no master, and small steps add up in the mean") {
    on_each_device([] {
        default_generator(test_device()).set_state({3, 0});
        constexpr std::int64_t count = 4000;
        Tensor w = nn::parameter(ones({count}, {DType::bf16}));
        Tensor half = nn::parameter(ones({2}, {DType::f16}));
        optim::SGD optimizer(std::vector<nn::NamedTensor>{{"w", w}, {"half", half}},
                             {.learning_rate = 6e-4, .momentum = 0.5, .stochastic_rounding = true});
        // 6e-4 is 0.15 of the spacing of bf16 numbers below 1: with rounding to nearest, w would stay 1 forever.
        for (int i = 0; i < 100; ++i) {
            w.set_grad(full(w.shape(), i == 0 ? 1.0 : 0.5, {DType::bf16}));  // so that the momentum stays 1
            half.set_grad(ones({2}, {DType::f16}));
            optimizer.step();
        }
        const std::vector<double> values = w.to_vector();
        double mean = 0.0, square = 0.0;
        for (const double value : values) mean += value / count;
        for (const double value : values) square += (value - mean) * (value - mean) / count;
        // A weight makes 100 random steps, each with a root mean square error below half of 2^-8.
        CHECK(square < 100.0 * 0x1p-18);
        CHECK(std::abs(mean - 0.94) < 5.0 * std::sqrt(100.0 * 0x1p-18 / count));
        CHECK(square > 0.0);
        const nn::StateDict state = optimizer.state_dict();
        CHECK_FALSE(state.contains("master/w"));
        CHECK(state.contains("master/half"));  // f16 keeps its master: the option applies only to bf16
        CHECK(state.at("momentum/w").dtype() == DType::f32);
    });
}

TEST_CASE("optim: stochastic rounding goes on with the same bits after a resume") {
    on_each_device([] {
        const auto make = [] {
            Pair net;
            {
                const NoGrad guard;
                Generator generator(9);
                for (const Tensor& p : net.parameters()) p.copy_(randn(p.shape(), {}, &generator));
            }
            net.to(test_device());
            net.to(DType::bf16);
            return net;
        };
        const auto update = [](Pair& net, optim::Optimizer& optimizer, int steps) {
            for (int i = 0; i < steps; ++i) {
                for (const Tensor& p : net.parameters())
                    Tensor(p).set_grad(full(p.shape(), 0.3, {p.dtype()}));
                optimizer.step();
            }
        };
        const optim::AdamWOptions options{.learning_rate = 1e-4, .stochastic_rounding = true};
        Generator& numbers = default_generator(test_device());
        numbers.set_state({21, 0});
        Pair net = make();
        optim::AdamW optimizer(net, options);
        update(net, optimizer, 3);
        Pair copy = nn::clone(net);
        optim::AdamW resumed(copy, options);
        resumed.load_state_dict(optimizer.state_dict());
        const RandomKey saved = numbers.state();  // as a checkpoint does
        update(net, optimizer, 3);
        CHECK(numbers.state().offset > saved.offset);
        numbers.set_state(saved);
        update(copy, resumed, 3);
        for (std::size_t i = 0; i < net.parameters().size(); ++i)
            CHECK(same(net.parameters()[i].detach(), copy.parameters()[i].detach()));
    });
}

TEST_CASE("optim: parameters that are not contiguous are updated in place") {
    on_each_device([] {
        const Tensor base = ones({2, 3});
        Tensor p = nn::parameter(base.transpose(0, 1));
        optim::AdamW optimizer(one(p), {.learning_rate = 0.1, .weight_decay = 0.0});
        step_with(optimizer, p, 1.0);
        CHECK(first_of(base) == doctest::Approx(0.9));
        CHECK(base.to_vector<double>()[5] == doctest::Approx(0.9));
    });
}

TEST_CASE("optim: state belongs to names, whatever the order and the groups") {
    manual_seed(11);
    Pair net;
    optim::AdamW optimizer(net);
    train(net, optimizer, 10);
    const nn::StateDict state = optimizer.state_dict();
    CHECK_FALSE(same(state.at("first_moment/p1.weight"), state.at("first_moment/p2.weight")));

    SwappedPair swapped;
    optim::AdamW other(swapped, {.groups = {{.pattern = "p1.*", .weight_decay = 0.0}, {.pattern = "p2.*"}}});
    swapped.load_state_dict(net.state_dict());
    other.load_state_dict(state);
    for (const auto& [name, value] : state) {
        INFO(name);
        CHECK(same(other.state_dict().at(name), value));
        CHECK((value.ndim() == 0 || !other.state_dict().at(name).is_same(value)));
    }
}

TEST_CASE("optim: a resumed optimizer gives the same bits") {
    manual_seed(12);
    Pair net;
    optim::AdamW optimizer(net, {.learning_rate = 0.01});
    train(net, optimizer, 5);
    Pair copy = nn::clone(net);
    optim::AdamW resumed(copy, {.learning_rate = 0.5});  // the state contains its own learning rate
    resumed.load_state_dict(optimizer.state_dict());
    CHECK(resumed.steps() == 5);
    train(net, optimizer, 5);
    train(copy, resumed, 5);
    CHECK(same(net.p1.weight.detach(), copy.p1.weight.detach()));
    CHECK(same(net.p2.bias.detach(), copy.p2.bias.detach()));
}

TEST_CASE("optim: a state that does not fit is refused as a whole") {
    Pair net;
    optim::AdamW optimizer(net);
    train(net, optimizer, 2);
    nn::StateDict state = optimizer.state_dict();
    state.erase("second_moment/p1.bias");
    state["first_moment/p9"] = zeros({8});
    state["first_moment/p2.bias"] = zeros({9});
    Pair copy;
    optim::AdamW other(copy);
    check_error([&] { other.load_state_dict(state); },
                {"[adamw]", "Missing: second_moment/p1.bias.", "Unknown: first_moment/p9.",
                 "first_moment/p2.bias has shape (8) here and (9)", "Nothing was loaded"});
    CHECK(other.steps() == 0);
    // Numbers that are invalid for any optimizer.
    const nn::StateDict good = optimizer.state_dict();
    const auto refuses = [&](const std::string& name, const Tensor& value, const std::string& text) {
        nn::StateDict bad = good;
        bad[name] = value;
        check_error([&] { other.load_state_dict(bad); }, {"[adamw]", text, "Nothing was loaded"});
        CHECK(other.steps() == 0);
    };
    refuses("steps/p1.bias", potluck::tensor(std::vector<std::int64_t>{-5}, {}), "steps/p1.bias is -5");
    refuses("steps", potluck::tensor(std::vector<std::int64_t>{-5}, {}), "steps is -5");
    refuses("first_moment/p1.bias", full({8}, NAN), "first_moment/p1.bias holds a number that is not finite");
    refuses("second_moment/p1.bias", full({8}, INFINITY), "second_moment/p1.bias holds");
    refuses("learning_rate", tensor(-0.1, {DType::f64}), "learning_rate is -0.1");
    optim::SGD sgd(copy);
    check_error([&] { sgd.load_state_dict(optimizer.state_dict()); },
                {"[sgd]", "Unknown: first_moment/p1.bias"});
}

}  // namespace potluck::test
