// Gradients that follow a convention, or that other frameworks once got wrong.

#include <cmath>
#include <limits>

#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

TEST_CASE("norms at 0 and deviations of constants have gradient 0") {
    const auto slope = [](const Tensor& x, auto&& function) { return gradients(sum(function(x)), {x})[0]; };
    CHECK(near(slope(leaf({0, 0, 0}, {3}), [](const Tensor& x) { return norm(x); }), {0, 0, 0}));
    CHECK(near(slope(leaf({0, 0, 3, 4}, {2, 2}), [](const Tensor& x) { return norm(x, 2, {1}); }),
               {0, 0, 0.6, 0.8}));
    CHECK(near(slope(leaf({7, 7, 7, 7}, {4}), [](const Tensor& x) { return stddev(x); }), {0, 0, 0, 0}));
    CHECK(near(slope(leaf({0, -2, 3}, {3}), [](const Tensor& x) { return norm(x, 1); }), {0, -1, 1}));
    CHECK(near(slope(leaf({0, 0}, {2}),
                     [](const Tensor& x) { return norm(x, std::numeric_limits<double>::infinity()); }),
               {0, 0}));
    CHECK(std::isnan(stddev(leaf({5}, {1})).item()));  // unbiased, of one element: NaN, as documented
    CHECK(near(slope(leaf({5}, {1}), [](const Tensor& x) { return stddev(x, {}, 0.0); }), {0}));
    CHECK(contains(error_of([] { norm(tensor({1}), 3); }), "p is 3"));
}

TEST_CASE("gradients of broadcasting are summed over the axes that were stretched") {
    const Tensor h = ones({2, 1, 4, 64}).set_requires_grad();
    const Tensor m = full({2, 1, 4, 1}, 2.0).set_requires_grad();
    sum(h * m).backward();
    CHECK(m.grad().shape() == Shape{2, 1, 4, 1});
    CHECK(near(m.grad(), Values(8, 64)));
    CHECK(near(h.grad(), Values(512, 2)));

    const Tensor scalar = tensor(3.0).set_requires_grad();
    const Tensor vector = ones({64}).set_requires_grad();
    sum(scalar * h.detach()).backward();
    sum(vector * h.detach()).backward();
    CHECK(scalar.grad().shape() == Shape{});
    CHECK(near(scalar.grad(), {512}));
    CHECK(near(vector.grad(), Values(64, 8)));

    const Tensor u = leaf({1, 2, 3}, {3, 1}), v = leaf({1, 2, 3, 4, 5}, {1, 5});
    sum(u * v).backward();
    CHECK(u.grad().shape() == Shape{3, 1});
    CHECK(near(u.grad(), {15, 15, 15}));
    CHECK(near(v.grad(), {6, 6, 6, 6, 6}));
}

TEST_CASE("the gradient of topk goes to the places taken") {
    const Tensor x = leaf({1, 2, 6, 4, 5, 9, 5, 6, 7, 8}, {2, 5});
    const Tensor total = sum(topk(x, 2).first);
    CHECK(total.item() == 28);
    total.backward();
    CHECK(near(x.grad(), {0, 0, 1, 0, 1, 1, 0, 0, 0, 1}));
}

TEST_CASE("the gradient of max among 70,000 equal half numbers does not vanish") {
    const Tensor x = ones({70000}, {DType::f16}).set_requires_grad();
    max(x).backward();
    CHECK(near(sum(x.grad().to(DType::f64)), {1}));
    CHECK(x.grad()[0].item() == 1);
}

TEST_CASE("max and min send the gradient to the first place, over any axes") {
    const Tensor x = leaf({1, 3, 3, 0, 0, 2}, {2, 3});
    sum(max(x, {1}) + min(x, {1}) * 10).backward();
    CHECK(near(x.grad(), {10, 1, 0, 10, 0, 1}));
    const Tensor y = leaf({1, 3, 3, 0, 0, 2, 5, 1, 1, 1, 1, 5}, {2, 3, 2});
    sum(max(y, {0, 2}) * tensor({1, 2, 3})).backward();
    CHECK(near(y.grad(), {0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 3}));
    CHECK(contains(error_of([] { max(zeros({3, 0}), {1}); }), "(3, 0)"));
    CHECK(max(zeros({0, 3}), {1}).shape() == Shape{0});
}

TEST_CASE("mse_loss refuses shapes that would broadcast") {
    const Tensor prediction = leaf({1, 2, 3}, {3, 1}), target = tensor({1, 2, 3});
    const std::string text = error_of([&] { mse_loss(prediction, target); });
    CHECK(contains(text, "(3, 1)"));
    CHECK(contains(text, "(3)"));
    CHECK(mse_loss(prediction, target.reshape({3, 1})).item() == 0);
}

TEST_CASE("where gives an exact zero to the branch not taken") {
    const Tensor x = leaf({-1, 4}, {2});
    const Tensor y = where(x > 0, x * 2, x * INFINITY);
    const auto slopes = gradients(sum(where(x > 0, x * 2, tensor({0, INFINITY}) + x * 0)), {x});
    CHECK(y.shape() == Shape{2});
    CHECK(near(slopes[0], {0, 2}));
    const Tensor a = leaf({1, 2}, {2}), b = leaf({3, 4}, {2});
    backward(where(tensor({1, 0}) > 0, a, b), {.gradient = tensor({5, INFINITY})});
    CHECK(near(a.grad(), {5, 0}));
    CHECK(b.grad()[0].item() == 0);
}

TEST_CASE("ties and limits: maximum prefers the first, clamp passes on its limits") {
    const Tensor a = leaf({1, 2, NAN}, {3}), b = leaf({1, 3, 0}, {3});
    sum(maximum(a, b)).backward();
    CHECK(near(a.grad(), {1, 0, 1}));
    CHECK(near(b.grad(), {0, 1, 0}));
    const Tensor x = leaf({-2, -1, 0, 1, 2}, {5});
    sum(clamp(x, -1, 1)).backward();
    CHECK(near(x.grad(), {0, 1, 1, 1, 0}));
    CHECK_THROWS_AS(clamp(x, 1, -1), Error);
    CHECK(near(clamp(arange(-3, 4), -1.5, 1.5), {-1, -1, -1, 0, 1, 1, 1}));
    CHECK(near(clamp(arange(0, 4, 1, {DType::u8}), -INFINITY, 2), {0, 1, 2, 2}));
}

TEST_CASE("powers at 0 have finite gradients where they exist") {
    const Tensor x = leaf({0, 0, 2}, {3}), n = leaf({0, 2, 3}, {3});
    sum(power(x, n)).backward();
    CHECK(near(x.grad(), {0, 0, 12}));
    CHECK(near(n.grad(), {0, 0, 8 * std::log(2.0)}));
    CHECK(contains(error_of([] { power(arange(1, 3), -1); }), "-1"));
    CHECK(near(power(arange(1, 4), 3), {1, 8, 27}));
}

TEST_CASE("logsumexp and softmax of a slice that is masked out have gradient 0") {
    const Tensor x = leaf({1, 2, -INFINITY, -INFINITY}, {2, 2});
    const Tensor y = logsumexp(x, {1});
    CHECK(y[0].item() == doctest::Approx(2.3132617));
    CHECK(y[1].item() == -INFINITY);
    backward(y, {.gradient = ones({2})});
    CHECK(near(x.grad(), {0.2689414, 0.7310586, 0, 0}));
    const Tensor z = leaf({1, 2, -INFINITY, -INFINITY}, {2, 2});
    sum(softmax(z) * tensor({1, 2})).backward();
    CHECK(near(z.grad(), {-0.1966119, 0.1966119, 0, 0}));
}

TEST_CASE("sums of gradients of half numbers keep the range of f32 inside an op") {
    const Tensor weight = zeros({3, 4}, {DType::bf16}).set_requires_grad();
    sum(embedding(weight, zeros({1024}, {DType::i64}))).backward();
    CHECK(near(weight.grad()[0], {1024, 1024, 1024, 1024}));
    const Tensor x = zeros({2}, {DType::f16}).set_requires_grad();
    sum(gather(x, 0, zeros({4096}, {DType::i64}))).backward();
    CHECK(near(x.grad(), {4096, 0}));
    const Tensor bias = zeros({8}, {DType::bf16}).set_requires_grad();
    for (int step = 0; step < 4; ++step)
        sum(linear(zeros({8192, 2}, {DType::bf16}), zeros({8, 2}, {DType::bf16}), bias)).backward();
    CHECK(near(bias.grad(), Values(8, 32768)));
}

TEST_CASE("matmul: batches broadcast, vectors, and the way out of a wrong shape") {
    CHECK(contains(error_of([] {
                       matmul(zeros({4, 3}), zeros({5, 3}));
                   }),
                   "[matmul] inner sizes differ: (4, 3) x (5, 3). Did you mean to transpose the second?"));
    CHECK(contains(error_of([] { matmul(zeros({4, 3}), zeros({4, 5})); }), "transpose the first"));
    CHECK_THROWS_AS(matmul(zeros({4, 3}), zeros({5, 2})), Error);
    CHECK_THROWS_AS(matmul(zeros({2, 4, 3}), zeros({3, 3, 2})), Error);
    CHECK_THROWS_AS(matmul(zeros({}), zeros({3})), Error);
    CHECK(matmul(zeros({3}), zeros({5, 3, 2})).shape() == Shape{5, 2});
    CHECK(matmul(zeros({5, 2, 3}), zeros({3})).shape() == Shape{5, 2});
    CHECK(matmul(zeros({0, 3}), zeros({3, 2})).shape() == Shape{0, 2});
    CHECK(near(matmul(zeros({2, 0}), zeros({0, 2})), {0, 0, 0, 0}));
    CHECK(near(matmul(tensor({1, 2}), tensor({3, 4})), {11}));

    const Tensor a = randn({2, 1, 3, 4}).set_requires_grad(), b = randn({5, 4, 2}).set_requires_grad();
    sum(matmul(a, b)).backward();
    CHECK(a.grad().shape() == a.shape());
    CHECK(b.grad().shape() == b.shape());
}

TEST_CASE("linear says how x, weight and bias must fit") {
    CHECK(contains(error_of([] { linear(zeros({2, 3}), zeros({3, 4})); }), "Did you mean to transpose it?"));
    CHECK(contains(error_of([] { linear(zeros({2, 3}), zeros({4, 3}), zeros({3})); }), "(4)"));
    CHECK(linear(zeros({3}), zeros({4, 3})).shape() == Shape{4});
    CHECK(linear(zeros({0, 3}), zeros({4, 3}), zeros({4})).shape() == Shape{0, 4});
}

TEST_CASE("the gradient of a transposed weight is laid out like the weight and needs no copy") {
    const Tensor stored = randn({3, 4}).set_requires_grad(), x = randn({5, 3}), dy = randn({5, 4});
    backward(linear(x, transpose(stored)), {.gradient = dy});
    const Tensor expected = matmul(transpose(x), dy);
    CHECK(near(stored.grad(), expected.to_vector()));
    CHECK(stored.grad().is_contiguous());
    backward(matmul(x, transpose(transpose(stored))), {.gradient = dy});
    CHECK(near(stored.grad(), (expected * 2).to_vector()));
    const Tensor tied = randn({4, 3}).set_requires_grad();
    backward(matmul(x, transpose(tied)), {.gradient = dy});
    CHECK(near(tied.grad(), transpose(expected).to_vector()));
}

TEST_CASE("cat, split and views send each part of the gradient home") {
    const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3});
    const auto parts = split(x, {1, 2}, 1);
    sum(parts[0] * 10).backward();
    CHECK(near(x.grad(), {10, 0, 0, 10, 0, 0}));
    sum(cat({parts[1], x}, 1) * arange(1, 6)).backward();
    CHECK(near(x.grad(), {13, 5, 7, 13, 5, 7}));
    x.node()->gradient = Tensor();
    sum(slice(x, 1, 0, 3, 2) * 2 + x[1][0]).backward();
    CHECK(near(x.grad(), {2, 0, 2, 6, 0, 2}));
    CHECK(contains(error_of([&] { view(transpose(x), {6}); }), "reshape()"));
    CHECK(contains(error_of([&] { reshape(x, {4, -1}); }), "(4, -1)"));
    CHECK(contains(error_of([&] { narrow(x, 1, 2, 2); }), "outside"));
    CHECK(contains(error_of([&] { select(x, 0, 2); }), "index 2"));
    CHECK(contains(error_of([&] { squeeze(x, 0); }), "size 2"));
    CHECK(contains(error_of([&] { permute(x, {0, 0}); }), "not a permutation"));
    CHECK(contains(error_of([&] { split(x, {1, 1}, 1); }), "do not sum to 3"));
    CHECK(contains(error_of([&] { cat({x, zeros({2, 2, 2})}); }), "tensor 1"));
    CHECK_THROWS_AS(cat({}), Error);
    CHECK_THROWS_AS(expand(x, {3, 3}), Error);
    CHECK_THROWS_AS(transpose(zeros({3})), Error);
}
