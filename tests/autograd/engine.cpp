// The traversal of the tape: what it computes, what it frees, and the state after an exception.

#include <stdexcept>

#include "core/memory.h"
#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

TEST_CASE("backward gives each leaf the gradient of the root") {
    const Tensor a = leaf({1, 2, 3}, {3}), b = leaf({4, 5, 6}, {3});
    sum(a * b + a).backward();
    CHECK(near(a.grad(), {5, 6, 7}));
    CHECK(near(b.grad(), {1, 2, 3}));
}

TEST_CASE("a value used several times gets the sum of its gradients") {
    const Tensor x = leaf({3}, {1});
    const Tensor y = x * x;      // 9
    const Tensor z = y * y + y;  // a diamond: z = x^4 + x^2
    sum(z).backward();
    CHECK(near(x.grad(), {4 * 27 + 2 * 3}));
}

TEST_CASE("branches of unequal depth are complete before they go on") {
    const Tensor x = leaf({2}, {1});
    Tensor deep = x;
    for (int i = 0; i < 10; ++i) deep = deep * 1.5;
    sum(deep * x + x).backward();  // 1.5^10 x^2 + x
    CHECK(near(x.grad(), {2 * std::pow(1.5, 10) * 2 + 1}));
}

TEST_CASE("the root may be a leaf") {
    const Tensor x = leaf({2}, {});
    x.backward();
    CHECK(near(x.grad(), {1}));
    x.backward();
    CHECK(near(x.grad(), {2}));
}

TEST_CASE("gradients add up over several runs, in the same memory") {
    const Tensor x = leaf({1, 2, 3, 4}, {4});
    sum(x * x).backward();
    const void* place = x.grad().raw_data();
    for (int run = 2; run <= 4; ++run) {
        sum(x * x).backward();
        CHECK(near(x.grad(), {2.0 * run, 4.0 * run, 6.0 * run, 8.0 * run}));
        CHECK(x.grad().raw_data() == place);
    }
}

TEST_CASE("a gradient that the user still holds is not changed by the next run") {
    const Tensor x = leaf({1, 2}, {2});
    sum(x * x).backward();
    const Tensor held = x.grad();
    const Tensor seen = x.grad().narrow(0, 0, 1);
    sum(x * x).backward();
    CHECK(near(held, {2, 4}));
    CHECK(near(seen, {2}));
    CHECK(near(x.grad(), {4, 8}));
}

TEST_CASE("a linear layer adds micro-batches to its gradients without a temporary of their size") {
    for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
        const bool in_first = layout == WeightLayout::in_out;
        const Tensor weight = randn(in_first ? Shape{2048, 64} : Shape{64, 2048}).set_requires_grad();
        const Tensor x = randn({2, 2048});
        sum(linear(x, weight, {}, layout)).backward();
        const Tensor loss = sum(linear(x, weight, {}, layout));
        reset_peak_memory();
        const std::int64_t before = memory_statistics().current;
        loss.backward();
        CHECK(memory_statistics().peak - before < weight.bytes() / 2);
    }
}

TEST_CASE("gradients of two leaves never share memory") {
    const Tensor a = leaf({1, 2}, {2}), b = leaf({3, 4}, {2});
    sum(a + b).backward();
    const NoGrad guard;
    a.grad().fill_(7);
    CHECK(near(b.grad(), {1, 1}));
    CHECK(a.grad().is_contiguous());
    CHECK(b.grad().is_contiguous());

    const Tensor seed = tensor({5, 6});
    Tensor c = leaf({0, 0}, {2});
    backward(c, {.gradient = seed});
    seed.fill_(0);
    CHECK(near(c.grad(), {5, 6}));
}

TEST_CASE("a leaf's gradient does not keep a larger block alive") {
    const Tensor a = leaf({1, 2}, {2}), b = leaf({3, 4, 5}, {3});
    sum(cat({a, b}) * tensor({1, 2, 3, 4, 5})).backward();
    CHECK(near(a.grad(), {1, 2}));
    CHECK(near(b.grad(), {3, 4, 5}));
    CHECK(a.grad().storage()->bytes() == 8);
    CHECK(b.grad().storage()->bytes() == 12);
}

TEST_CASE("an existing gradient takes part whatever its layout and dtype") {
    Tensor x = leaf({1, 2, 3, 4}, {2, 2});
    x.set_grad(tensor({{10, 20}, {30, 40}}).transpose(0, 1));
    sum(x).backward();
    CHECK(near(x.grad(), {11, 31, 21, 41}));

    Tensor h = leaf({1, 2}, {2}, DType::bf16);
    h.set_grad(tensor({1000, 2000}));  // f32, like the gradients of master weights
    sum(h * 1.0).backward();
    CHECK(h.grad().dtype() == DType::f32);
    CHECK(near(h.grad(), {1001, 2001}));
}

TEST_CASE("a second backward needs retain_graph") {
    const Tensor x = leaf({2}, {1});
    SUBCASE("without it the Error says so and changes nothing") {
        const Tensor y = sum(x * x);
        y.backward();
        const std::string text = error_of([&] { y.backward(); });
        CHECK(contains(text, "[backward]"));
        CHECK(contains(text, "retain_graph"));
        CHECK(near(x.grad(), {4}));
    }
    SUBCASE("with it the gradient doubles") {
        const Tensor y = sum(x * x);
        backward(y, {.retain_graph = true});
        y.backward();
        CHECK(near(x.grad(), {8}));
    }
    SUBCASE("a graph that shares a freed part is refused as well") {
        const Tensor shared = x * x;
        const Tensor first = sum(shared), second = sum(shared * 3);
        first.backward();
        CHECK(contains(error_of([&] { second.backward(); }), "freed"));
        CHECK(near(x.grad(), {4}));
    }
}

TEST_CASE("backward frees what ops saved as it goes") {
    const Tensor x = randn({100, 100}).set_requires_grad();
    const std::int64_t before = memory_statistics().current;
    Tensor y = x;
    for (int i = 0; i < 20; ++i) y = tanh(y);
    const Tensor loss = sum(y);
    y = Tensor();
    CHECK(memory_statistics().current - before >= 20 * x.bytes());
    reset_peak_memory();
    loss.backward();
    CHECK(memory_statistics().current - before < 2 * x.bytes());                // only the gradient
    CHECK(memory_statistics().peak - before < 20 * x.bytes() + 5 * x.bytes());  // never both at once
}

TEST_CASE("roots and gradients that do not fit are refused") {
    const Tensor x = leaf({1, 2, 3}, {3});
    CHECK(contains(error_of([&] { (x * 2).backward(); }), "(3)"));
    CHECK(contains(error_of([&] { tensor({1, 2}).backward(); }), "not on the tape"));
    CHECK(contains(error_of([&] { backward(x * 2, {.gradient = tensor({1, 2})}); }), "(2)"));
    CHECK(contains(error_of([&] { backward(x * 2, {.gradient = arange(0, 3)}); }), "floating"));
    backward(x * 2, {.gradient = tensor({1, 10, 100})});
    CHECK(near(x.grad(), {2, 20, 200}));
    CHECK_THROWS_AS(Tensor().backward(), Error);
}

TEST_CASE("empty tensors have empty gradients") {
    const Tensor x = zeros({0, 3}).set_requires_grad();
    sum(tanh(x) * 2).backward();
    CHECK(x.grad().shape() == Shape{0, 3});
}

TEST_CASE("set_requires_grad and set_grad refuse what makes no sense") {
    Tensor x = leaf({1, 2}, {2});
    Tensor y = x * 2;
    CHECK(contains(error_of([&] { y.set_requires_grad(false); }), "detach()"));
    CHECK(contains(error_of([&] { arange(0, 3).set_requires_grad(); }), "i64"));
    CHECK(contains(error_of([&] { x.set_grad(tensor({1, 2, 3})); }), "(3)"));
    CHECK(contains(error_of([&] { tensor({1, 2}).set_grad(tensor({1, 2})); }), "set_requires_grad"));
    x.set_grad(tensor({1, 2}));
    CHECK(x.grad().defined());
    x.set_grad({});
    CHECK(!x.grad().defined());
    x.set_requires_grad(false);
    CHECK(!x.requires_grad());
    CHECK(!(x * 2).requires_grad());
}

TEST_CASE("no_grad records nothing, detach cuts") {
    const Tensor x = leaf({1, 2}, {2});
    {
        const NoGrad guard;
        CHECK(!is_grad_enabled());
        CHECK(!(x * 2).requires_grad());
        {
            const GradMode again(true);
            CHECK((x * 2).requires_grad());
        }
        CHECK(!is_grad_enabled());
    }
    CHECK(is_grad_enabled());
    const Tensor y = x * 3;
    CHECK(!y.detach().requires_grad());
    CHECK(y.detach().raw_data() == y.raw_data());
    sum(y * y.detach()).backward();
    CHECK(near(x.grad(), {9, 18}));
    CHECK((argmax(x).requires_grad() || (x > 1).requires_grad() || x.to(DType::i64).requires_grad()) ==
          false);
}

TEST_CASE("gradients() touches nobody's grad()") {
    const Tensor x = leaf({1, 2}, {2}), w = leaf({3, 4}, {2}), other = leaf({5}, {1});
    const Tensor y = x * w;
    const Tensor loss = sum(y * y);
    const auto found = gradients(loss, {w, y, other, w}, {.retain_graph = true});
    CHECK(near(found[0], {2 * 3, 2 * 8 * 2}));
    CHECK(near(found[1], {6, 16}));
    CHECK(!found[2].defined());
    CHECK(near(found[3], {6, 32}));
    CHECK(!x.grad().defined());
    CHECK(!w.grad().defined());
    CHECK(near(gradients(loss, {loss})[0], {1}));
    CHECK(contains(error_of([&] { gradients(sum(x), {tensor({1})}); }), "input 0"));
}

TEST_CASE("an exception in the middle of backward leaves leaves and graph consistent") {
    const Tensor x = leaf({1, 2}, {2}), w = leaf({3, 4}, {2}), late = leaf({1, 1}, {2});
    bool fail = true;
    const auto loss_of = [&] {
        const Tensor y = x * w;
        add_gradient_hook(y, [&](const Tensor&) -> Tensor {
            if (fail) throw std::runtime_error("hook failed");
            return {};
        });
        return sum(y * late);
    };

    SUBCASE("leaves without a gradient stay without one, even those already reached") {
        const Tensor loss = loss_of();
        CHECK_THROWS_WITH(backward(loss, {.retain_graph = true}), "hook failed");
        CHECK(!x.grad().defined());
        CHECK(!w.grad().defined());
        CHECK(!late.grad().defined());
        CHECK(is_grad_enabled());
        fail = false;
        loss.backward();  // retained, so it can run again
        CHECK(near(x.grad(), {3, 4}));
        CHECK(near(late.grad(), {3, 8}));
    }
    SUBCASE("leaves with a gradient still have one") {
        fail = false;
        loss_of().backward();
        fail = true;
        CHECK_THROWS(loss_of().backward());
        CHECK(x.grad().defined());
        CHECK(late.grad().defined());
        CHECK(near(x.grad(), {3, 4}));
    }
    SUBCASE("a graph that was half freed says so") {
        const Tensor loss = loss_of();
        CHECK_THROWS_WITH(loss.backward(), "hook failed");
        CHECK(contains(error_of([&] { loss.backward(); }), "freed"));
    }
}

TEST_CASE("a backward that misbehaves is named") {
    const Tensor x = leaf({1, 2}, {2});
    const auto custom = [&](BackwardFunction backward) {
        return record("custom", tensor({1, 2}), {x}, {}, std::move(backward));
    };
    CHECK(contains(
        error_of([&] {
            sum(custom([](const Saved&, const Tensor&, Gradients& dx) { dx.add(0, zeros({3})); })).backward();
        }),
        "[custom]"));
    CHECK(contains(
        error_of([&] {
            sum(custom([](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(1, dy); })).backward();
        }),
        "input 1"));
    CHECK(
        contains(error_of([&] {
                     sum(custom([](const Saved& saved, const Tensor&, Gradients&) { saved[0]; })).backward();
                 }),
                 "[custom]"));
    CHECK(contains(
        error_of([&] {
            sum(custom([](const Saved&, const Tensor&, Gradients& dx) { dx.add(0, Tensor()); })).backward();
        }),
        "undefined"));
    // The gradient is summed to the input's shape and converted to its dtype.
    sum(custom([](const Saved&, const Tensor&, Gradients& dx) {
        dx.add(0, ones({3, 2}, {DType::f64}));
    })).backward();
    CHECK(near(x.grad(), {3, 3}));
    CHECK(x.grad().dtype() == DType::f32);
}

TEST_CASE("a backward within a backward adds to the same leaves") {
    const Tensor w = leaf({2}, {1});
    const auto loss_of = [&] {
        const Tensor y = w * 3;
        add_gradient_hook(y, [&](const Tensor&) {
            const GradMode recording(true);
            sum(w * 10).backward();
            return Tensor();
        });
        return sum(y * w);  // w gets one contribution before the hook runs, and another one after it
    };
    loss_of().backward();
    CHECK(near(w.grad(), {12 + 10}));
    loss_of().backward();
    CHECK(near(w.grad(), {2 * (12 + 10)}));
}

TEST_CASE("a chain of a million ops neither overflows the stack in backward nor when it is freed") {
    const Tensor x = leaf({1}, {});
    const auto chain = [&] {
        Tensor y = x;
        for (int i = 0; i < 1000000; ++i)
            y = record("step", y.detach(), {y}, {},
                       [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
        return y;
    };
    SUBCASE("backward") {
        chain().backward();
        CHECK(near(x.grad(), {1}));
    }
    SUBCASE("freed without a backward") { CHECK(chain().node()->depth == 1000000); }
    SUBCASE("freed through what was saved") {
        Tensor y = x;
        for (int i = 0; i < 100000; ++i)
            y = record("step", zeros({}), {y}, {y}, [](const Saved&, const Tensor&, Gradients&) {});
        CHECK(y.node()->depth == 100000);
    }
}

TEST_CASE("an op whose backward gives nothing leaves its inputs without a gradient") {
    const Tensor x = leaf({1}, {}), w = leaf({2}, {});
    const Tensor y = record("wall", zeros({}), {x * 2}, {}, [](const Saved&, const Tensor&, Gradients&) {});
    (y + w).backward();
    CHECK(!x.grad().defined());
    CHECK(near(w.grad(), {1}));
}
