// Memory does not grow over a long training, whatever users do between the steps.

#include <memory>
#include <stdexcept>

#include "core/memory.h"
#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

namespace {

struct TwoLayers {
    Tensor up = randn({16, 8}).set_requires_grad();
    Tensor down = randn({4, 16}).set_requires_grad();
    std::function<void(const std::shared_ptr<TwoLayers>&, const Tensor&)> watch = [](const auto&,
                                                                                     const Tensor&) {};
    int seen = 0;
};

Tensor loss_of(const std::shared_ptr<TwoLayers>& net) {
    const Tensor hidden = relu(linear(ones({2, 8}), net->up));
    net->watch(net, hidden);
    return mean(square(linear(hidden, net->down)));
}

/// Live bytes after 100 and after 2,000 steps.
template <class Step>
std::pair<std::int64_t, std::int64_t> live_bytes(Step&& step) {
    std::pair<std::int64_t, std::int64_t> live;
    for (int i = 1; i <= 2000; ++i) {
        step();
        if (i == 100) live.first = memory_statistics().current;
    }
    live.second = memory_statistics().current;
    return live;
}

}  // namespace

TEST_CASE("memory stays level with a hook that holds its module") {
    const auto net = std::make_shared<TwoLayers>();
    net->watch = [](const std::shared_ptr<TwoLayers>& self, const Tensor& hidden) {
        // The hook captures the module and even the tensor that it belongs to.
        add_gradient_hook(hidden, [self, hidden](const Tensor&) {
            ++self->seen;
            return Tensor();
        });
    };
    const auto live = live_bytes([&] { loss_of(net).backward(); });
    CHECK(net->seen == 2000);
    CHECK(live.first == live.second);
}

TEST_CASE("losses kept for a log keep four bytes each, not their graphs") {
    const auto net = std::make_shared<TwoLayers>();
    std::vector<Tensor> log;
    const auto live = live_bytes([&] {
        log.push_back(loss_of(net));
        log.back().backward();
    });
    CHECK(live.second - live.first == 1900 * 4);

    Tensor total = zeros({});
    const auto summed = live_bytes([&] {
        const Tensor loss = loss_of(net);
        loss.backward();
        total = total + loss.detach();
    });
    CHECK(summed.first == summed.second);
}

TEST_CASE("memory stays level when every backward is cut off by an exception") {
    const auto net = std::make_shared<TwoLayers>();
    net->watch = [](const auto&, const Tensor& hidden) {
        add_gradient_hook(hidden, [](const Tensor&) -> Tensor { throw std::runtime_error("stop"); });
    };
    const auto live = live_bytes([&] { CHECK_THROWS(loss_of(net).backward()); });
    CHECK(live.first == live.second);
    CHECK(!net->down.grad().defined());
}

TEST_CASE("memory stays level over second derivatives") {
    const Tensor x = randn({8}).set_requires_grad();
    const auto live = live_bytes([&] {
        const Tensor slope = gradients(sum(tanh(x) * x), {x}, {.create_graph = true})[0];
        sum(square(slope)).backward();
    });
    CHECK(live.first == live.second);
}

TEST_CASE("a gradient made with create_graph is freed once it is dropped") {
    const std::int64_t before = memory_statistics().current;
    {
        Tensor x = randn({1000}).set_requires_grad();
        backward(sum(x * x * x), {.create_graph = true});
        CHECK(x.grad().requires_grad());
        x.set_grad({});
    }
    CHECK(memory_statistics().current == before);
}

TEST_CASE("cross-entropy writes the gradient over logits that nobody else can see") {
    const Tensor weight = randn({2000, 4}).set_requires_grad();
    const Tensor x = randn({256, 4});
    const Tensor labels = zeros({256}, {DType::i64});
    const std::int64_t logits_bytes = 256 * 2000 * 4;

    const auto peak_of = [&](bool hold) {
        weight.node()->gradient = Tensor();
        Tensor logits = linear(x, weight);
        const Values before = logits.to_vector();
        const Tensor loss = cross_entropy(logits, labels);
        const Tensor held = hold ? logits : Tensor();
        logits = Tensor();
        reset_peak_memory();
        const std::int64_t start = memory_statistics().current;
        loss.backward();
        if (hold) CHECK(held.to_vector() == before);
        return memory_statistics().peak - start;
    };
    const std::int64_t held = peak_of(true);
    const Values expected = weight.grad().to_vector();
    const std::int64_t dropped = peak_of(false);
    CHECK(held >= logits_bytes);
    CHECK(dropped < logits_bytes / 2);
    CHECK(weight.grad().to_vector() == expected);
}

TEST_CASE("cross-entropy never writes over memory that belongs to the user, or that is needed again") {
    std::vector<float> mine{1, 2, 3, 4, 5, 6};
    Tensor logits = borrow(mine.data(), {2, 3}).set_requires_grad();
    Tensor loss = cross_entropy(logits.reshape({2, 3}), zeros({2}, {DType::i64}));
    logits = Tensor();
    loss.backward();
    CHECK(mine == std::vector<float>{1, 2, 3, 4, 5, 6});

    const Tensor x = leaf({1, 2, 3, 4}, {2, 2});
    loss = cross_entropy(x * 2, zeros({2}, {DType::i64}));
    backward(loss, {.retain_graph = true});
    const Values once = x.grad().to_vector();
    backward(loss, {.retain_graph = true});
    CHECK(near(x.grad() - x.detach() * 0, {2 * once[0], 2 * once[1], 2 * once[2], 2 * once[3]}));
}
