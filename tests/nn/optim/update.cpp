// Optimizers on parts of parameters, with the numbers of a control on the device, and user-defined optimizers.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

using Make = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<optim::ParameterSlice>&)>;

struct Case {
    std::string name;
    DType dtype;
    Make make;
};

std::vector<Case> cases() {
    std::vector<Case> cases;
    const auto add = [&](const std::string& name, DType dtype, bool stochastic) {
        cases.push_back({"adamw " + name, dtype, [=](const auto& parameters) {
                             return std::make_unique<optim::AdamW>(
                                 parameters, optim::AdamWOptions{.learning_rate = 0.01,
                                                                 .weight_decay = 0.1,
                                                                 .stochastic_rounding = stochastic});
                         }});
        cases.push_back({"sgd " + name, dtype, [=](const auto& parameters) {
                             return std::make_unique<optim::SGD>(
                                 parameters,
                                 optim::SGDOptions{.learning_rate = 0.01,
                                                   .momentum = 0.9,
                                                   .weight_decay = 0.1,
                                                   .groups = {{.pattern = "c", .weight_decay = 0.5}},
                                                   .stochastic_rounding = stochastic});
                         }});
    };
    add("f32", DType::f32, false);
    add("bf16 with a master", DType::bf16, false);
    add("bf16 with stochastic rounding", DType::bf16, true);
    return cases;
}

/// The gradient of a parameter at an update, the same for every caller.
Tensor gradient_at(int step, std::size_t index, const Shape& shape, DType dtype) {
    Generator generator(static_cast<std::uint64_t>(100 * step) + index);
    return randn(shape, {}, &generator).to(dtype).to(test_device());
}

const std::vector<Shape> shapes{{37, 11}, {50}, {5, 7, 3}};
const std::vector<std::string> names{"a", "b", "c"};

double first_value(const Tensor& x) { return x.to_vector()[0]; }

Tensor flat(const Tensor& x) { return x.detach().reshape({-1}); }

/// A simple user-defined optimizer.
class SignDescent final : public optim::Optimizer {
public:
    SignDescent(const std::vector<nn::NamedTensor>& parameters, double learning_rate,
                bool stochastic_rounding = false)
        : Optimizer({.op = "sign_descent"}, slices_of(parameters),
                    {.learning_rate = learning_rate,
                     .weight_decay = 0.0,
                     .stochastic_rounding = stochastic_rounding}) {}

private:
    void update(const UpdateGroup& group) override {
        for (const Update& one : group.updates)
            one.weights.add_(sign(one.gradient).to(one.weights.dtype()), -group.learning_rate);
    }
};

}  // namespace

TEST_CASE("optim: parameters cut at random, also into nothing, are updated as whole ones are") {
    on_each_device([] {
        Generator cuts(3);
        for (const Case& one : cases()) {
            INFO(one.name);
            std::vector<Tensor> whole, cut;
            std::vector<optim::ParameterSlice> of_whole;
            std::vector<std::vector<optim::ParameterSlice>> of_parts(3);
            struct Part {
                std::size_t parameter;
                std::int64_t begin;
                Tensor elements;
            };
            std::vector<Part> parts;
            for (std::size_t i = 0; i < shapes.size(); ++i) {
                Generator start(i);
                const Tensor values = randn(shapes[i], {}, &start).to(one.dtype).to(test_device());
                whole.push_back(nn::parameter(values.clone()));
                cut.push_back(values.clone());
                of_whole.emplace_back(nn::NamedTensor{names[i], whole.back()});
                const std::int64_t count = values.count();
                auto ends = randint(0, count + 1, {2}, {DType::i64}, &cuts).to_vector<std::int64_t>();
                if (i == 1) ends = {0, count};  // the first and the last part contain nothing of it
                std::sort(ends.begin(), ends.end());
                const std::vector<std::int64_t> begins{0, ends[0], ends[1], count};
                for (std::size_t part = 0; part < 3; ++part) {
                    const std::int64_t begin = begins[part];
                    const Tensor elements =
                        nn::parameter(flat(cut[i]).narrow(0, begin, begins[part + 1] - begin));
                    of_parts[part].emplace_back(names[i], elements, shapes[i], begin);
                    parts.push_back({i, begin, elements});
                }
            }
            Generator& numbers = default_generator(test_device());
            const auto optimizer = one.make(of_whole);
            std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
            for (const auto& list : of_parts) optimizers.push_back(one.make(list));
            for (int step = 0; step < 3; ++step) {
                // The second update has no gradient for "b".
                for (std::size_t i = 0; i < shapes.size(); ++i)
                    whole[i].set_grad(step == 1 && i == 1 ? Tensor()
                                                          : gradient_at(step, i, shapes[i], one.dtype));
                for (Part& part : parts)
                    part.elements.set_grad(
                        step == 1 && part.parameter == 1
                            ? Tensor()
                            : flat(gradient_at(step, part.parameter, shapes[part.parameter], one.dtype))
                                  .narrow(0, part.begin, part.elements.count())
                                  .clone());
                const RandomKey before = numbers.state();
                optimizer->step();
                const RandomKey after = numbers.state();
                for (const auto& part : optimizers) {
                    numbers.set_state(before);
                    part->step();
                    CHECK(numbers.state().offset == after.offset);
                }
            }
            for (std::size_t i = 0; i < shapes.size(); ++i) CHECK(same(flat(whole[i]), flat(cut[i])));
            // Names and counts are those of the whole; the tensors are the local part.
            const nn::StateDict state = optimizer->state_dict();
            for (const auto& part : optimizers) {
                const nn::StateDict own = part->state_dict();
                CHECK(own.size() == state.size());
                for (const auto& [name, value] : state) CHECK(own.contains(name));
                CHECK(own.at("steps/a").item() == 3);
                part->load_state_dict(own);
            }
        }
    });
}

TEST_CASE("optim: an optimizer without any element makes steps") {
    const optim::ParameterSlice nothing("w", nn::parameter(zeros({0})), {4, 4}, 16);
    optim::AdamW optimizer(std::vector<optim::ParameterSlice>{nothing});
    optimizer.step();
    CHECK(optimizer.steps() == 1);
    check_error(
        [] {
            optim::ParameterSlice("w", zeros({4}), {4, 4}, 13);
        },
        {"4 elements", "13", "w", "(4, 4)"});
    check_error([] { optim::ParameterSlice("w", zeros({4}), {4, 4}, -1); }, {"-1"});
}

TEST_CASE("optim: an update by a control has the bits of a plain one") {
    on_each_device([] {
        for (const Case& one : cases()) {
            INFO(one.name);
            const Tensor p = nn::parameter(full({40, 5}, 0.5, {one.dtype}));
            const Tensor q = nn::parameter(full({40, 5}, 0.5, {one.dtype}));
            const auto plain = one.make({optim::ParameterSlice(nn::NamedTensor{"c", p})});
            const auto controlled = one.make({optim::ParameterSlice(nn::NamedTensor{"c", q})});
            UpdateControl control(test_device(), controlled->steps());
            Generator& numbers = default_generator(test_device());
            for (int step = 0; step < 4; ++step) {
                const Tensor gradient = gradient_at(step, 0, {40, 5}, DType::f32);
                Tensor(p).set_grad(gradient);
                Tensor(q).set_grad(gradient);
                plain->set_learning_rate(0.1 / (1 + step));
                const RandomKey before = numbers.state();
                plain->step();
                numbers.set_state(before);
                control.write({.learning_rate = 0.1 / (1 + step)});
                control.measure(controlled->gradients());
                control.decide();
                controlled->step(control);
                controlled->finish_step(control.read().skip == 0.0);
                CHECK(same(p.detach(), q.detach()));
                CHECK(controlled->steps() == step + 1);
            }
            // A skipped update changes nothing.
            const nn::StateDict before = controlled->state_dict();
            std::map<std::string, Tensor> copies;
            for (const auto& [name, value] : before) copies[name] = value.clone();
            const Tensor weights = q.detach().clone();
            Tensor(q).set_grad(full({40, 5}, INFINITY));
            control.write({.learning_rate = 0.1});
            control.measure(controlled->gradients());
            control.decide();
            controlled->step(control);
            const UpdateNumbers numbers_read = control.read();
            CHECK(numbers_read.skip != 0.0);
            controlled->finish_step(numbers_read.skip == 0.0);
            CHECK(same(q.detach(), weights));
            CHECK(controlled->steps() == 4);
            for (const auto& [name, value] : controlled->state_dict()) CHECK(same(value, copies.at(name)));
        }
    });
}

TEST_CASE("optim: a parameter that had fewer updates keeps its own count under a control") {
    const Tensor p = nn::parameter(zeros({2})), late = nn::parameter(zeros({2}));
    optim::AdamW optimizer(std::vector<nn::NamedTensor>{{"p", p}, {"late", late}}, {.learning_rate = 0.1});
    UpdateControl control;
    for (int step = 0; step < 4; ++step) {
        Tensor(p).set_grad(ones({2}));
        if (step == 3) Tensor(late).set_grad(ones({2}));
        control.write({.learning_rate = 0.1});
        control.measure(optimizer.gradients());
        control.decide();
        optimizer.step(control);
        optimizer.finish_step(control.read().skip == 0.0);
    }
    CHECK(late.to_vector()[0] == doctest::Approx(-0.1));  // a first update moves by the learning rate
    CHECK(optimizer.state_dict().at("steps/late").item() == 1);
    CHECK(optimizer.state_dict().at("steps/p").item() == 4);
    UpdateControl fresh;
    check_error([&] { optimizer.step(fresh); }, {"[adamw]", "counts 0 updates", "4"});
}

TEST_CASE("optim: gradients of 60000 in f16 are clipped to norm 1 in the kernel") {
    on_each_device([] {
        const Tensor p = nn::parameter(zeros({1000000}, {DType::f16}));
        Tensor(p).set_grad(full({1000000}, 60000.0, {DType::f16}));
        optim::SGD optimizer(std::vector<nn::NamedTensor>{{"p", p}}, {.learning_rate = 1.0});
        UpdateControl control(test_device());
        control.write({.learning_rate = 1.0, .max_norm = 1.0});
        control.measure(optimizer.gradients());
        control.decide();
        optimizer.step(control);
        CHECK(control.read().gradient_norm == doctest::Approx(6e7).epsilon(1e-3));
        CHECK(first_value(p) == doctest::Approx(-1e-3).epsilon(1e-3));
    });
}

TEST_CASE("optim: an optimizer of one's own has its bf16 weights rounded at random") {
    on_each_device([] {
        manual_seed(5);
        const std::int64_t count = 4000;
        const Tensor p = nn::parameter(ones({count}, {DType::bf16}));
        SignDescent optimizer({{"p", p}}, 1.0 / 1024,
                              /*stochastic_rounding=*/true);  // an eighth of a bf16's step
        for (int i = 0; i < 64; ++i) {
            Tensor(p).set_grad(full({count}, -5.0, {DType::bf16}));
            optimizer.step();
        }
        // A sixteenth in all, of which rounding to nearest would leave nothing.
        CHECK(mean(p.detach().to(DType::f32)).item() == doctest::Approx(1.0625).epsilon(1e-3));
        CHECK_FALSE(optimizer.state_dict().contains("master/p"));
        // What bf16 holds stays as it is, and the control's way rounds, too.
        const Tensor whole = nn::parameter(ones({count}, {DType::bf16}));
        SignDescent exact({{"p", whole}}, 0.25, true);
        Tensor(whole).set_grad(full({count}, -5.0, {DType::bf16}));
        UpdateControl control(test_device());
        control.write({.learning_rate = 0.25});
        control.measure(exact.gradients());
        control.decide();
        exact.step(control);
        exact.finish_step(true);
        CHECK(whole.detach().to_vector() == std::vector<double>(static_cast<std::size_t>(count), 1.25));
    });
}

TEST_CASE("optim: a step that waits cannot be captured, on the CPU neither") {
    Tensor p = nn::parameter(ones({2}, {DType::f32, Device::cpu()}));
    p.set_grad(ones({2}, {DType::f32, Device::cpu()}));
    optim::SGD optimizer(std::vector<nn::NamedTensor>{{"p", p}}, {.learning_rate = 0.5});
    const auto work = capture(Device::cpu(), [&] { optimizer.step(); });
    check_error([&] { work->replay(); }, {"[sgd]", "a step cannot be recorded", "step(UpdateControl)"});
    UpdateControl control(Device::cpu());
    const auto read = capture(Device::cpu(), [&] { (void)control.read(); });
    check_error([&] { read->replay(); }, {"[update]", "captured work cannot read"});
    CHECK(p.detach().to_vector() == std::vector<double>{1.0, 1.0});
    CHECK(optimizer.steps() == 0);
}

TEST_CASE("optim: an update that was never started is not counted") {
    Tensor p = nn::parameter(ones({2}));
    optim::SGD optimizer(std::vector<nn::NamedTensor>{{"p", p}}, {.learning_rate = 0.5});
    check_error([&] { optimizer.finish_step(true); }, {"[sgd]", "none was started"});
    optimizer.finish_step(false);
    check_error([&] { optimizer.step(); }, {"[sgd]", "no parameter has a gradient"});
    check_error([&] { optimizer.finish_step(true); }, {"[sgd]", "none was started"});
    CHECK(optimizer.steps() == 0);
    p.set_grad(ones({2}));
    optimizer.step();
    optimizer.finish_step(true);  // as after a replay of it
    CHECK(optimizer.steps() == 2);
}

TEST_CASE("optim: an optimizer of one's own moves half types by what it does to their masters") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            const Tensor p = nn::parameter(ones({3}, {dtype}));
            SignDescent optimizer({{"p", p}}, 0.25);
            Tensor(p).set_grad(full({3}, -5.0, {dtype}));
            optimizer.step();
            CHECK(first_value(p) == 1.25);
            // With a control, too: update() gets the scaled gradient, and is not called for a skipped update.
            UpdateControl control(test_device(), 1);
            for (const double targets : {4.0, 0.0}) {
                control.write({.learning_rate = 0.5, .targets = targets});
                control.measure(optimizer.gradients());
                control.decide();
                optimizer.step(control);
                optimizer.finish_step(control.read().skip == 0.0);
            }
            CHECK(first_value(p) == 1.75);
            CHECK(optimizer.steps() == 2);
        }
    });
}

}  // namespace potluck::test
