// Hooks on gradients, and retained gradients of non-leaf tensors.

#include <any>
#include <functional>
#include <utility>

#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

TEST_CASE("hooks see and may replace the gradient") {
    const Tensor x = leaf({1, 2}, {2});
    SUBCASE("of an inner tensor") {
        const Tensor y = x * 2;
        Values seen;
        add_gradient_hook(y, [&](const Tensor& gradient) {
            seen = gradient.to_vector();
            return gradient * 10;
        });
        sum(y * 3).backward();
        CHECK(seen == Values{3, 3});
        CHECK(near(x.grad(), {60, 60}));
    }
    SUBCASE("of a leaf: this run's part alone, also when there is a gradient already") {
        int calls = 0;
        add_gradient_hook(x, [&](const Tensor& gradient) {
            ++calls;
            CHECK(near(gradient, {2, 4}));
            return Tensor();
        });
        sum(x * x).backward();
        sum(x * x).backward();
        CHECK(calls == 2);
        CHECK(near(x.grad(), {4, 8}));
    }
    SUBCASE("several run in the order they were added") {
        const Tensor y = x * 1;
        add_gradient_hook(y, [](const Tensor& gradient) { return gradient + 1; });
        add_gradient_hook(y, [](const Tensor& gradient) { return gradient * 2; });
        sum(y).backward();
        CHECK(near(x.grad(), {4, 4}));
    }
    SUBCASE("a leaf's hook runs when its gradient is complete, before the walk ends") {
        std::string order;
        const Tensor early = leaf({1, 1}, {2});
        add_gradient_hook(x, [&](const Tensor&) {
            order += "x";
            return Tensor();
        });
        add_gradient_hook(early, [&](const Tensor&) {
            order += "e";
            return Tensor();
        });
        sum(tanh(tanh(x)) * early).backward();
        CHECK(order == "ex");
    }
    SUBCASE("a replacement must fit") {
        const Tensor y = x * 2;
        add_gradient_hook(y, [](const Tensor&) { return zeros({3}); });
        CHECK(contains(error_of([&] { sum(y).backward(); }), "(3)"));
    }
    SUBCASE("without a gradient there is nothing to hook") {
        CHECK_THROWS_AS(add_gradient_hook(tensor({1, 2}), [](const Tensor& g) { return g; }), Error);
        CHECK_THROWS_AS(add_gradient_hook(x, nullptr), Error);
    }
}

TEST_CASE("a hook that changes in place what it is shown is refused: other branches may share it") {
    const Tensor a = leaf({1, 2}, {2}), b = leaf({3, 4}, {2});
    const auto spoil = [](const Tensor& gradient) {
        gradient.mul_(10);
        return Tensor();
    };
    const auto refused = [](const Tensor& root) {
        const Tensor given = ones(root.shape());
        CHECK(contains(error_of([&] { backward(root, {.gradient = given}); }),
                       "changed the gradient in place"));
    };
    const Tensor one = a * 1, two = b * 1;
    SUBCASE("of a sum") {
        add_gradient_hook(one, spoil);
        refused(one + two);
    }
    SUBCASE("of a leaf") {
        add_gradient_hook(a, spoil);
        refused(a + b);
    }
    SUBCASE("through reshape, expand and sum") {
        add_gradient_hook(one, spoil);
        SUBCASE("reshape") { refused(one.reshape({2, 1}) + two.reshape({2, 1})); }
        SUBCASE("expand") { refused(one.expand({3, 2}) * two); }
        SUBCASE("sum, whose gradient repeats one element") {
            CHECK_THROWS_AS(sum(one + two).backward(), Error);
            CHECK(!b.grad().defined());
        }
    }
    SUBCASE("that is retained") {
        retain_gradient(one);
        add_gradient_hook(one, spoil);
        refused(one + two);
    }
    SUBCASE("that the options give, which stays as it was when a hook returns another") {
        const Tensor given = ones({2});
        const Tensor root = one + two;
        add_gradient_hook(root, [](const Tensor& gradient) { return gradient * 10; });
        backward(root, {.gradient = given});
        CHECK(near(given, {1, 1}));
        CHECK(near(a.grad(), {10, 10}));
        const Tensor again = one.detach() + b;
        add_gradient_hook(again, spoil);
        refused(again);
    }
    SUBCASE("of a leaf with a buffer") {
        set_gradient_buffer(a, zeros({2}));
        add_gradient_hook(a, spoil);
        refused(a + b);
        CHECK(!a.grad().defined());
    }
    SUBCASE("by the backward of an op") {
        const Tensor y = record("spoil", a.detach() * 2, {a}, {},
                                [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy.mul_(2)); });
        CHECK(contains(error_of([&] { backward(y + two, {.gradient = ones({2})}); }), "[spoil]"));
    }
}

TEST_CASE("a hook cannot change what an op saved, nor what it was shown by what comes later") {
    const Tensor a = leaf({1, 2}, {2}), b = leaf({3, 4}, {2});
    const Tensor product = a * b;
    const Tensor late = product * 1;
    add_gradient_hook(late, [values = b.detach()](const Tensor&) {
        values.mul_(2);
        return Tensor();
    });
    CHECK(contains(error_of([&] { sum(late).backward(); }), "changed in place"));

    std::vector<Tensor> seen;
    Tensor x = leaf({1, 2}, {2});
    add_gradient_hook(x, [&](const Tensor& gradient) {
        seen.push_back(gradient);
        return Tensor();
    });
    for (int i = 0; i < 3; ++i) sum(x * 2 + x).backward();
    for (const Tensor& gradient : seen) CHECK(near(gradient, {3, 3}));
    const Tensor inner = x * 1;
    retain_gradient(inner);
    sum(inner + inner.reshape({2})).backward();
    inner.grad().mul_(10);
    CHECK(near(x.grad(), {11, 11}));
}

TEST_CASE("retain_gradient keeps the gradient of an inner tensor") {
    const Tensor x = leaf({1, 2}, {2});
    const Tensor y = x * 2;
    retain_gradient(y);
    sum(y * y).backward();
    CHECK(near(y.grad(), {4, 8}));
    CHECK(near(x.grad(), {8, 16}));
    const NoGrad guard;
    y.grad().fill_(0);
    CHECK(near(x.grad(), {8, 16}));
    CHECK_THROWS_AS(retain_gradient(tensor({1, 2})), Error);
}

TEST_CASE("a backward within a backward that frees what the outer one still needs is never silent") {
    const Tensor a = leaf({1, 2}, {2}), b = leaf({5}, {});
    const auto walk = [&](bool retain,
                          const std::function<void(const Tensor&, const std::function<void()>&)>& place) {
        a.node()->gradient = Tensor();
        const Tensor y = a * 3;
        const Tensor l = sum(y * y) + b, l2 = sum(y);
        bool done = false;
        place(y, [l2, retain, &done] {
            if (!std::exchange(done, true)) backward(l2, {.retain_graph = retain});
        });
        l.backward();
        CHECK(done);
    };
    const auto in_hook = [](const Tensor& y, const std::function<void()>& run) {
        add_gradient_hook(y, [run](const Tensor&) {
            run();
            return Tensor();
        });
    };
    SUBCASE("in a gradient hook") {
        const std::string text = error_of([&] { walk(false, in_hook); });
        CHECK(contains(text, "[backward]"));
        CHECK(contains(text, "'multiply'"));
        CHECK(contains(text, "retain_graph"));
        walk(true, in_hook);
        CHECK(near(a.grad(), {21, 39}));
    }
    SUBCASE("in an accumulated hook of a leaf that is complete before") {
        const auto in_accumulated = [&](const Tensor&, const std::function<void()>& run) {
            b.node()->accumulated_hooks.clear();
            add_accumulated_hook(b, [run](const Tensor&) { run(); });
        };
        CHECK(contains(error_of([&] { walk(false, in_accumulated); }), "'multiply'"));
        walk(true, in_accumulated);
        CHECK(near(a.grad(), {21, 39}));
    }
    SUBCASE("in an accumulated hook, of the op whose inputs are being dealt with") {
        const Tensor c = leaf({7, 8}, {2}), d = leaf({3, 4}, {2});
        const Tensor y = c * d;
        const Tensor l = sum(y), l2 = sum(y * 2);
        bool done = false;
        add_accumulated_hook(c, [&](const Tensor&) {
            if (!std::exchange(done, true)) l2.backward();
        });
        l.backward();
        CHECK(near(c.grad(), {9, 12}));
        CHECK(near(d.grad(), {21, 24}));
    }
    SUBCASE("in an unpack hook, of the op that runs") {
        const Tensor c = leaf({7, 8}, {2}), d = leaf({3, 4}, {2});
        std::function<void()> run = [] {};
        Tensor y;
        {
            const SavedTensorHooks hooks([](const Tensor& x) { return std::any(x); },
                                         [&run](const std::any& packed) {
                                             std::exchange(run, [] {})();
                                             return std::any_cast<Tensor>(packed);
                                         });
            y = c * d;
        }
        const Tensor l = sum(y), l2 = sum(y * 2);
        run = [&] { l2.backward(); };
        CHECK(contains(error_of([&] { backward(l, {.retain_graph = true}); }), "is running"));
        CHECK(!c.grad().defined());
        l.backward();
        CHECK(near(c.grad(), {3, 4}));
    }
}

TEST_CASE("add_accumulated_hook names the result of an op as what it is") {
    const Tensor a = leaf({1, 2}, {2});
    CHECK(contains(error_of([&] { add_accumulated_hook(a * 2, [](const Tensor&) {}); }),
                   "the tensor is the result of 'multiply', but a leaf"));
}
