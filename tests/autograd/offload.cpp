// What ops keep, in the memory of another device: the same bits, and less memory at home.

#include "autograd/offload.h"

#include "autograd/autocast.h"
#include "autograd/recompute.h"
#include "core/backend.h"
#include "core/memory.h"
#include "tests/autograd/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::contains, test::error_of, test::on_each_device, test::test_device;

namespace {

/// Where the tensors are: the device under test, or a second CPU device where that is the CPU that keeps what is moved.
Device home() {
    static const Device second = add_cpu_device();
    return test_device() == Device::cpu() ? second : test_device();
}

Tensor numbers(const Shape& shape, std::uint64_t seed) {
    Generator generator(seed);
    return randn(shape, {DType::f32}, &generator).to(home());
}

struct Stack {
    std::vector<Tensor> weights;
    explicit Stack(std::int64_t layers, std::int64_t width) {
        for (std::int64_t i = 0; i < layers; ++i)
            weights.push_back(
                (numbers({width, width}, static_cast<std::uint64_t>(i)) * 0.1).detach().set_requires_grad());
    }
    Tensor layer(std::size_t i, const Tensor& x) const {
        return x + gelu(linear(tanh(linear(x, weights[i])), weights[i]));
    }
    Tensor loss(const Tensor& input, bool recomputed) const {
        Tensor x = input;
        for (std::size_t i = 0; i < weights.size(); ++i)
            x = recomputed ? recompute([this, i](const Tensor& in) { return layer(i, in); }, x) : layer(i, x);
        return square(x).sum();
    }
    std::vector<test::Values> take_gradients() {
        std::vector<test::Values> values;
        for (Tensor& w : weights) {
            values.push_back(w.grad().to_vector());
            w.set_grad({});
        }
        return values;
    }
};

}  // namespace

TEST_CASE(
    "offload: gradients have the same bits, with recomputation and Autocast too, whatever is read ahead") {
    on_each_device([] {
        Stack stack(4, 32);
        const Tensor x = numbers({16, 32}, 9);
        const auto loss_in = [&](DType precision, bool recomputed) {
            const detail::LossIsScaled quiet;
            const Autocast guard(precision);
            return stack.loss(x, recomputed);
        };
        for (const DType precision : {DType::f32, DType::bf16, DType::f16}) {
            loss_in(precision, false).backward();
            const std::vector<test::Values> expected = stack.take_gradients();
            for (const bool recomputed : {false, true}) {
                for (const std::int64_t read_ahead : {0, 1, 2, 100}) {
                    CAPTURE(precision);
                    CAPTURE(recomputed);
                    CAPTURE(read_ahead);
                    Tensor loss;
                    {
                        const Offload guard({.smallest = 0, .read_ahead = read_ahead});
                        loss = loss_in(precision, recomputed);
                    }
                    backward(loss, {.retain_graph = true});
                    CHECK(stack.take_gradients() == expected);
                    loss.backward();
                    CHECK(stack.take_gradients() == expected);
                }
            }
        }
    });
}

TEST_CASE("offload: what ops keep is not at home, and each tensor is moved once") {
    on_each_device([] {
        Stack stack(6, 64);
        const Tensor x = numbers({256, 64}, 9);
        const std::int64_t activation = x.bytes();
        const auto held = [&](bool offloaded, bool recomputed) {
            const std::int64_t at_home = memory_statistics(home()).current;
            const std::int64_t away = memory_statistics(Device::cpu()).current;
            Tensor loss;
            if (offloaded) {
                const Offload guard;
                loss = stack.loss(x, recomputed);
            } else {
                loss = stack.loss(x, recomputed);
            }
            backend(home()).synchronize();
            return std::pair{memory_statistics(home()).current - at_home,
                             memory_statistics(Device::cpu()).current - away};
        };
        const auto [all, nothing] = held(false, false);
        CHECK(all >= 6 * 3 * activation);
        CHECK(nothing < activation);
        const auto [left, moved] = held(true, false);
        CHECK(left <= 2 * activation);
        CHECK(moved >= 6 * 3 * activation);
        CHECK(moved <= all + activation);  // no tensor twice
        const auto [inputs_left, inputs] = held(true, true);
        CHECK(inputs_left <= 2 * activation);
        CHECK(inputs <= 8 * activation);
    });
}

TEST_CASE("offload: parameters, small tensors and what lies there already stay") {
    const Tensor w = ones({300, 300}).set_requires_grad(), x = ones({300, 300});
    const std::int64_t before = memory_statistics(Device::cpu()).current;
    const Offload guard({.smallest = 0});
    const Tensor y = linear(x, w);
    CHECK(memory_statistics(Device::cpu()).current - before == y.bytes());
}

TEST_CASE("offload: a tensor that was changed since and options out of range are Errors") {
    on_each_device([] {
        const Tensor w = numbers({4, 4}, 1).set_requires_grad(), x = numbers({2, 4}, 2);
        Tensor loss;
        {
            const Offload guard({.smallest = 0});
            loss = linear(x, w).sum();
        }
        x.fill_(0.0);
        CHECK(contains(error_of([&] { loss.backward(); }), "changed in place"));
    });
    CHECK(contains(error_of([] { const Offload guard({.smallest = -1}); }), "[offload] smallest is -1"));
    CHECK(contains(error_of([] { const Offload guard({.read_ahead = -2}); }), "read_ahead is -2"));
}

TEST_CASE("offload: one guard around a loop keeps nothing of the graphs that are gone") {
    on_each_device([] {
        Stack stack(3, 32);
        const Tensor x = numbers({64, 32}, 9);
        const Offload guard({.smallest = 0});
        std::int64_t away = 0, at_home = 0;
        for (int i = 0; i < 8; ++i) {
            x.fill_(0.1 * i);  // the batch's memory is used again
            stack.loss(x, false).backward();
            (void)stack.take_gradients();
            backend(home()).synchronize();
            if (i == 2) {
                away = memory_statistics(Device::cpu()).current;
                at_home = memory_statistics(home()).current;
            }
        }
        CHECK(memory_statistics(Device::cpu()).current <= away);
        CHECK(memory_statistics(home()).current <= at_home);
    });
}
