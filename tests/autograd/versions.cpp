// In-place changes: refused on the tape, allowed outside it, and detected by tensors that were saved before.

#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

TEST_CASE("a change in place of something on the tape is refused, also through views of views") {
    const Tensor root = arange(0, 9, 1, {DType::f32}).reshape({3, 3}).set_requires_grad();
    const Tensor x = root.clone();
    const Tensor entry = split(x, 1, 0)[0].reshape({3}).narrow(0, 0, 2);
    const std::string text = error_of([&] { entry.mul_(2); });
    CHECK(contains(text, "[mul_]"));
    CHECK(contains(text, "on the tape"));
    CHECK_THROWS_AS(root.fill_(1), Error);
    CHECK_THROWS_AS(x.add_(ones({3, 3})), Error);
    CHECK_THROWS_AS(x.copy_(ones({3, 3})), Error);
    sum(entry).backward();
    CHECK(near(root.grad(), {1, 1, 0, 0, 0, 0, 0, 0, 0}));
}

TEST_CASE("a source on the tape is refused: no gradient would reach it") {
    const Tensor source = leaf({1, 2}, {2});
    const Tensor target = zeros({2});
    CHECK(contains(error_of([&] { target.add_(source); }), "detach()"));
    CHECK_THROWS_AS(target.mul_(source), Error);
    CHECK_THROWS_AS(target.copy_(source), Error);
    CHECK_THROWS_AS(zeros({2}, {DType::f64}).add_(source), Error);
    target.add_(source.detach());
    CHECK(near(target, {1, 2}));
    const NoGrad guard;
    target.add_(source);
    CHECK(near(target, {2, 4}));
}

TEST_CASE("a saved value that changes before backward is an Error that names the op") {
    const Tensor x = leaf({1, 2, 3, 4}, {2, 2});
    const Tensor t = transpose(x * 1);  // a view of x * 1
    const Tensor base = t.transpose(0, 1);
    const Tensor loss = sum(t * t);
    SUBCASE("changed through another view") {
        const NoGrad guard;
        base.add_(ones({2, 2}));
    }
    SUBCASE("changed through a view of one element, outside of the tape") { t.detach()[0][0].fill_(9); }
    const std::string text = error_of([&] { loss.backward(); });
    CHECK(contains(text, "[multiply]"));
    CHECK(contains(text, "changed in place"));
}

TEST_CASE("a saved result that changes before backward is an Error too") {
    const Tensor x = leaf({1, 2}, {2});
    const Tensor y = tanh(x);
    const Tensor loss = sum(y);
    y.detach().zero_();
    CHECK(contains(error_of([&] { loss.backward(); }), "the result"));
}

TEST_CASE("a change of what nobody saved is fine, and so is one after backward") {
    const Tensor x = leaf({1, 2}, {2});
    const Tensor y = x + 1;  // addition saves nothing
    const Tensor loss = sum(y);
    y.detach().zero_();
    loss.backward();
    CHECK(near(x.grad(), {1, 1}));
    {
        const NoGrad guard;
        x.add_(x.grad(), -0.5);  // a gradient descent step
    }
    CHECK(near(x, {0.5, 1.5}));
    CHECK(x.requires_grad());
    sum(x * x).backward();
    CHECK(near(x.grad(), {2, 4}));
}

TEST_CASE("every change through any view makes one new version") {
    const Tensor x = zeros({4, 4});
    const auto version = [&] { return x.storage()->version(); };
    CHECK(version() == 0);
    x.fill_(1);
    CHECK(version() == 1);
    x.narrow(0, 0, 2).transpose(0, 1).mul_(2);
    CHECK(version() == 2);
    x[3].copy_(tensor({1, 2, 3, 4}));
    CHECK(version() == 3);
    x.add_(ones({4}), 0.5);
    CHECK(version() == 4);
    (x * 2).add_(x);
    CHECK(version() == 4);
}

TEST_CASE("changes in place broadcast and convert the other operand") {
    const Tensor x = tensor({{1, 2}, {3, 4}});
    x.add_(tensor({10, 20}), 2);
    CHECK(near(x, {21, 42, 23, 44}));
    x.mul_(tensor({2}));
    CHECK(near(x, {42, 84, 46, 88}));
    x.copy_(arange(0, 2));
    CHECK(near(x, {0, 1, 0, 1}));
    CHECK(x.dtype() == DType::f32);

    const Tensor i = tensor(std::vector<std::int64_t>{1, 2, 3}, {3});
    i.add_(tensor(std::vector<std::int64_t>{1, 1, 1}, {3}), 3).mul_(2);
    CHECK(near(i, {8, 10, 12}));
    CHECK(contains(error_of([&] { i.add_(i, 0.5); }), "0.5"));
    CHECK(contains(error_of([&] { x.add_(tensor({1, 2, 3})); }), "(3)"));

    const Tensor h = zeros({2}, {DType::bf16});
    h.add_(tensor({1.5, 2.5}));
    CHECK(near(h, {1.5, 2.5}));
    zeros({0, 3}).add_(ones({3}));
    CHECK_THROWS_AS(x.add_(Tensor()), Error);
    CHECK_THROWS_AS(Tensor().fill_(1), Error);
}

TEST_CASE("a source that overlaps the target is read as it was before") {
    const Tensor x = arange(0, 6, 1, {DType::f32});
    x.narrow(0, 1, 5).copy_(x.narrow(0, 0, 5));
    CHECK(near(x, {0, 0, 1, 2, 3, 4}));
    x.narrow(0, 0, 5).add_(x.narrow(0, 1, 5));
    CHECK(near(x, {0, 1, 3, 5, 7, 4}));
    const Tensor square = arange(0, 9, 1, {DType::f32}).reshape({3, 3});
    square.copy_(square.transpose(0, 1));
    CHECK(near(square, {0, 3, 6, 1, 4, 7, 2, 5, 8}));
    square.add_(square[0]);
    CHECK(near(square, {0, 6, 12, 1, 7, 13, 2, 8, 14}));
    square.mul_(square);
    CHECK(near(square, {0, 36, 144, 1, 49, 169, 4, 64, 196}));
    CHECK(contains(error_of([&] { tensor({1}).expand({3}).fill_(2); }), "broadcast view"));
    const Tensor line = arange(0, 8, 1, {DType::f32});
    line.narrow(0, 0, 5).copy_(line.alias({5}, {-1}, 7));  // in reverse order
    CHECK(near(line, {7, 6, 5, 4, 3, 5, 6, 7}));
}

TEST_CASE("a number that an integer tensor cannot hold does not change it") {
    const Tensor x = arange(1, 4), bytes = zeros({2}, {DType::u8});
    CHECK(contains(error_of([&] { x.mul_(0.5); }), "[mul_] 0.5 does not fit dtype"));
    CHECK(contains(error_of([&] { x.fill_(NAN); }), "NaN does not fit dtype i64"));
    CHECK(contains(error_of([&] { bytes.fill_(300); }), "300 does not fit dtype u8"));
    x.mul_(2.0);
    CHECK(near(x, {2, 4, 6}));
}
