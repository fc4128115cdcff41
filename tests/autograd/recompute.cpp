// Regions that are computed again in backward: the same bits as without, and nothing else changed.

#include "autograd/recompute.h"

#include "autograd/autocast.h"
#include "core/memory.h"
#include "core/random_scope.h"
#include "tests/autograd/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::contains, test::error_of, test::on_each_device, test::test_device;

namespace {

Tensor numbers(const Shape& shape, std::uint64_t seed) {
    Generator generator(seed);
    return randn(shape, {DType::f32}, &generator).to(test_device());
}

using Layer = std::function<Tensor(const Tensor&)>;
Tensor plain(const Layer& layer, const Tensor& x) { return layer(x); }
Tensor again(const Layer& layer, const Tensor& x) { return recompute(layer, x); }

/// All that a step leaves: loss, gradients, and where the generator stands.
struct Step {
    test::Values loss;
    std::vector<test::Values> gradients;
    RandomKey generator;
    bool operator==(const Step& other) const {
        return loss == other.loss && gradients == other.gradients &&
               generator.offset == other.generator.offset;
    }
};

}  // namespace

TEST_CASE(
    "recompute: dropout in layers, twice in one, nested: the same bits as without, and the same generator") {
    on_each_device([] {
        const auto steps = [](int mode) {
            default_generator(test_device()) = Generator(7);
            default_generator(Device::cpu()) = Generator(7);
            std::vector<Tensor> weights;
            for (std::uint64_t i = 0; i < 3; ++i)
                weights.push_back((numbers({32, 32}, i) * 0.2).detach().set_requires_grad());
            std::vector<Step> found;
            for (int step = 0; step < 5; ++step) {
                Tensor x = numbers({8, 32}, 100 + static_cast<std::uint64_t>(step));
                const auto layer = [&](std::size_t i) -> Layer {
                    return [&weights, i](const Tensor& in) {
                        return dropout(gelu(dropout(linear(in, weights[i]), 0.1)), 0.1);
                    };
                };
                if (mode == 2) {  // a region in a region, and a layer beside
                    x = recompute(
                        [&](const Tensor& in) { return again(layer(1), again(layer(0), in) * 2.0); }, x);
                    x = again(layer(2), x);
                } else {
                    x = mode == 0 ? plain(layer(0), x) : again(layer(0), x);
                    x = x * 2.0;
                    for (std::size_t i = 1; i < 3; ++i)
                        x = mode == 0 ? plain(layer(i), x) : again(layer(i), x);
                }
                const Tensor loss = square(x).sum();
                loss.backward();
                Step now{loss.to_vector(), {}, default_generator(test_device()).state()};
                for (Tensor& w : weights) {
                    now.gradients.push_back(w.grad().to_vector());
                    const NoGrad guard;
                    w.add_(w.grad(), -1e-4);
                    w.set_grad({});
                }
                found.push_back(now);
            }
            return found;
        };
        const std::vector<Step> expected = steps(0);
        CHECK(std::isfinite(expected.back().loss[0]));
        CHECK(steps(1) == expected);
        CHECK(steps(2) == expected);
    });
}

TEST_CASE("recompute: masks that follow from update and site are drawn again") {
    const Tensor w = numbers({16, 16}, 1).set_requires_grad(), x = numbers({4, 16}, 2);
    const auto gradient = [&](bool recomputed) {
        Tensor loss;
        {
            const RandomUpdateScope update(3);
            const RandomItemsScope items(8, 4);
            const RandomSiteScope site(11);
            const Layer layer = [&](const Tensor& in) { return dropout(linear(dropout(in, 0.5), w), 0.5); };
            loss = (recomputed ? again(layer, x) : layer(x)).sum() + dropout(x, 0.5).sum() * 0.0;
        }
        loss.backward();
        const test::Values values = w.grad().to_vector();
        Tensor(w).set_grad({});
        return values;
    };
    CHECK(gradient(true) == gradient(false));
}

TEST_CASE("recompute: batch norm counts a batch once") {
    on_each_device([] {
        const Tensor weight = ones({1}).to(test_device()).set_requires_grad();
        const Tensor mean = zeros({1}).to(test_device()), variance = ones({1}).to(test_device());
        const Tensor x = tensor({3.0, 5.0}, {2, 1}).to(test_device());
        const Tensor y = recompute(
            [&](const Tensor& in) {
                return square(
                    batch_norm(in, weight, {}, mean, variance, {.training = true, .momentum = 0.1}));
            },
            x);
        y.sum().backward();
        CHECK(mean.item() == doctest::Approx(0.4));
        CHECK(variance.item() == doctest::Approx(1.1));
        CHECK(weight.grad().item() == doctest::Approx(4.0).epsilon(1e-3));
    });
}

TEST_CASE("recompute: inputs that need no gradient, of any dtype, and regions with nothing to train") {
    on_each_device([] {
        const Tensor w = tensor({3.0}, {1, 1}).to(test_device()).set_requires_grad(),
                     b = tensor({0.5}, {1}).to(test_device()).set_requires_grad();
        const Tensor x = tensor({2.0}, {1, 1}).to(test_device());
        const Tensor y = recompute([&](const Tensor& in) { return linear(in, w, b); }, x);
        REQUIRE(y.requires_grad());
        y.backward();
        CHECK(y.item() == 6.5);
        CHECK(w.grad().item() == 2.0);
        CHECK(b.grad().item() == 1.0);
        Tensor(w).set_grad({});

        const Tensor mask = tensor({1.0}, {1, 1}).to(test_device()).to(DType::boolean),
                     ids = zeros({1}, {DType::i64}).to(test_device());
        const Tensor mixed = recompute(
            [&](const std::vector<Tensor>& in) {
                return where(in[1], embedding(in[0], in[2]) * in[0], in[3]).sum();
            },
            {w, mask, ids, x});
        mixed.backward();
        CHECK(w.grad().item() == 6.0);

        const Tensor none = recompute([&](const Tensor& in) { return square(in); }, x);
        CHECK_FALSE(none.requires_grad());
    });
}

TEST_CASE("recompute: in the precision of the forward pass, wherever backward runs") {
    on_each_device([] {
        for (const DType half : {DType::bf16, DType::f16, DType::f32}) {
            for (const bool backward_inside : {false, true}) {
                CAPTURE(half);
                const Tensor x = tensor({300.0}, {1, 1}).to(test_device()),
                             w = tensor({300.0}, {1, 1}).to(test_device()).set_requires_grad();
                const auto gradient = [&](bool recomputed) {
                    Tensor loss;
                    const auto region = [&](const Tensor& in) { return square(linear(in, w)); };
                    {
                        const Autocast guard(half);
                        loss = (recomputed ? recompute(region, x) : region(x)).sum() * 1e-9;
                    }
                    const Autocast other(backward_inside ? DType::f16 : DType::f32);
                    const detail::LossIsScaled quiet;
                    loss.backward();
                    const test::Values value = w.grad().to_vector();
                    Tensor(w).set_grad({});
                    return value;
                };
                const test::Values expected = gradient(false);
                CHECK(gradient(true) == expected);
                if (half == DType::bf16) CHECK(expected[0] == doctest::Approx(0.0540672).epsilon(1e-2));
                if (half == DType::f32) CHECK(expected[0] == doctest::Approx(0.054).epsilon(1e-5));
            }
        }
    });
}

TEST_CASE(
    "recompute: keeps the inputs alone, and a second backward and a second derivative compute it once more") {
    const Tensor w = numbers({64, 64}, 1).set_requires_grad();
    const Tensor x = numbers({128, 64}, 2).set_requires_grad();
    int runs = 0;
    const Layer region = [&](const Tensor& in) {
        ++runs;
        return tanh(linear(exp(tanh(linear(in, w))), w));
    };
    const std::int64_t before = memory_statistics(Device::cpu()).current;
    const Tensor y = recompute(region, x);
    const std::int64_t kept = memory_statistics(Device::cpu()).current - before;
    CHECK(kept <= y.bytes() + 64);
    const std::vector<Tensor> expected = gradients(tanh(linear(exp(tanh(linear(x, w))), w)).sum(), {x, w});
    runs = 0;
    for (int i = 1; i <= 2; ++i) {
        const std::vector<Tensor> found = gradients(y.sum(), {x, w}, {.retain_graph = true});
        CHECK(found[0].to_vector() == expected[0].to_vector());
        CHECK(found[1].to_vector() == expected[1].to_vector());
        CHECK(runs == i);
    }
    const Tensor slope = gradients(y.sum(), {x}, {.create_graph = true})[0];
    const Tensor twice = gradients(square(slope).sum(), {w})[0];
    const Tensor plain_slope =
        gradients(tanh(linear(exp(tanh(linear(x, w))), w)).sum(), {x}, {.create_graph = true})[0];
    CHECK(test::near(twice, gradients(square(plain_slope).sum(), {w})[0].to_vector(), 1e-5));
}

TEST_CASE("recompute: ends when backward has what it needs, and the tape shows the region") {
    int parts = 0;
    const Tensor w = ones({2, 2}).set_requires_grad();
    const Tensor y = recompute(
        [&](const Tensor& in) {
            ++parts;
            const Tensor hidden = tanh(linear(in, w));
            ++parts;
            const Tensor out = linear(hidden, w);  // backward needs its operand, not its result
            ++parts;
            return out;
        },
        ones({1, 2}));
    CHECK(contains(tape_to_text(y), "recompute"));
    y.sum().backward();
    CHECK(parts == 5);
    CHECK(w.grad().defined());
}

TEST_CASE("recompute: under NoGrad a plain call; a changed input or another region is an Error") {
    const Tensor w = ones({2, 2}).set_requires_grad();
    {
        const NoGrad guard;
        CHECK_FALSE(recompute([&](const Tensor& in) { return linear(in, w); }, ones({1, 2})).requires_grad());
    }
    const Tensor x = ones({1, 2});
    const Tensor changed = recompute([&](const Tensor& in) { return tanh(linear(in, w)); }, x).sum();
    x.fill_(2.0);
    CHECK(contains(error_of([&] { changed.backward(); }), "changed in place"));

    int runs = 0;
    const Tensor other = recompute(
                             [&](const Tensor& in) {
                                 const Tensor y = linear(in, w);
                                 return ++runs == 1 ? tanh(tanh(y)) : tanh(y);
                             },
                             ones({1, 2}))
                             .sum();
    CHECK(contains(error_of([&] { other.backward(); }), "[recompute]"));

    int failing = 0;
    const Tensor fails = recompute(
                             [&](const Tensor& in) {
                                 if (++failing == 2) throw Error("region", "it failed.");
                                 return tanh(linear(in, w));
                             },
                             ones({1, 2}))
                             .sum();
    CHECK(contains(error_of([&] { fails.backward(); }), "[region] it failed."));
    CHECK_FALSE(w.grad().defined());
    CHECK(contains(error_of([&] { recompute(std::function<Tensor(const Tensor&)>(), x); }), "empty"));
}

TEST_CASE("recompute: a parameter that was changed since is found under Autocast, too") {
    const Tensor w = ones({2, 2}).set_requires_grad(), x = ones({1, 2}).set_requires_grad();
    Tensor y;
    {
        const Autocast guard(DType::bf16);
        y = recompute([&](const Tensor& in) { return gelu(matmul(in * 1.0, w)); }, x).sum();
    }
    {
        const NoGrad guard;
        w.mul_(0.0);
    }
    CHECK(contains(error_of([&] { y.backward(); }),
                   "[recompute] a parameter that the region uses was changed"));
}

TEST_CASE("recompute: masks of a region on another device than its inputs are drawn again") {
    const Device other = add_cpu_device();
    const Tensor w = ones({16, 16}).to(other).set_requires_grad(), x = ones({4, 16});
    const Tensor y = recompute(
        [&](const Tensor& in) { return dropout(square(dropout(in.to(other), 0.5) * w.sum()), 0.5); }, x);
    const double loss = y.sum().item();
    y.sum().backward();
    // y = (mask x sum(w))^2 mask, so dy/dw = 2 y / sum(w) for each element of w.
    CHECK(w.grad().to_vector()[0] == doctest::Approx(2 * loss / 256));
}

TEST_CASE("recompute: a backward inside a region is refused by name, and the next one works") {
    const Tensor w = ones({2, 2}).set_requires_grad(), x = ones({1, 2});
    const auto penalty = [&](const Tensor& in) {
        const Tensor y = tanh(linear(in, w));
        return y + gradients(y.sum(), {w}, {.create_graph = true})[0].sum();
    };
    CHECK(contains(error_of([&] { recompute(penalty, x); }), "[gradients] it is called inside a region"));
    const auto collects = [&](const Tensor& in) {
        backward(linear(in, w).sum());
        return tanh(linear(in, w));
    };
    CHECK(contains(error_of([&] { recompute(collects, x); }), "[backward] it is called inside a region"));
    CHECK_FALSE(w.grad().defined());
    recompute([&](const Tensor& in) { return tanh(linear(in, w)); }, x).sum().backward();
    CHECK(w.grad().defined());
}
