// Hooks on gradients, and gradients kept for inner tensors.

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
