// Layers and initial values.

#include <doctest/doctest.h>

#include <cmath>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;
using test::relative_error;

namespace {

double mean_of(const Tensor& x) { return mean(x).item(); }
double deviation_of(const Tensor& x) { return stddev(x).item(); }
double largest(const Tensor& x) { return max(abs(x)).item(); }

}  // namespace

TEST_CASE("linear: x weight^T + bias") {
    nn::Linear layer(2, 3);
    layer.load_state_dict(
        {{"weight", tensor({{1., 2.}, {3., 4.}, {5., 6.}})}, {"bias", tensor({10., 20., 30.})}});
    CHECK(layer(tensor({{1., 1.}})).to_vector<double>() == std::vector<double>{13, 27, 41});
    CHECK(layer(ones({4, 5, 2})).shape() == Shape{4, 5, 3});
    CHECK_FALSE(nn::Linear(2, 3, {.bias = false}).bias.defined());
    CHECK(largest(nn::Linear(100, 50).weight) <= 0.1);
    CHECK(largest(nn::Linear(100, 50).weight) > 0.09);
    CHECK(largest(nn::Linear(4, 4, {.initialize = false}).weight) == 0.0);
    check_error([] { nn::Linear(0, 3); }, {"[linear]", "in is 0", "out is 3"});
    check_error([] { nn::Linear(ones({2})); }, {"[linear]", "(2)"});
    check_error([] { nn::Linear(ones({2, 3}), ones({3})); }, {"[linear]", "(2, 3) and (3)"});
    check_error([&] { layer(ones({1, 5})); }, {"[linear]", "(1, 5)"});
}

TEST_CASE("embedding: rows of a table") {
    nn::Embedding table(4, 2);
    CHECK(table(tensor(std::vector<std::int64_t>{3, 0}, {1, 2})).shape() == Shape{1, 2, 2});
    CHECK(largest(nn::Embedding(4, 2, 0.0).weight) == 0.0);
    CHECK(deviation_of(nn::Embedding(1000, 50, 0.02).weight) == doctest::Approx(0.02).epsilon(0.02));
    check_error([] { nn::Embedding(4, 0); }, {"[embedding]", "width is 0"});
    check_error([&] { table(tensor(std::vector<std::int64_t>{1, 4}, {2})); }, {"[embedding]", "4"});
}

TEST_CASE("norms: start as a plain normalisation") {
    const Tensor x = tensor({{1., 2., 3., 6.}});
    nn::LayerNorm layer(4);
    CHECK(mean_of(layer(x)) == doctest::Approx(0.0).epsilon(1e-6));
    CHECK(var(layer(x), {}, 0.0).item() == doctest::Approx(1.0).epsilon(1e-4));
    nn::RMSNorm rms(4);
    CHECK(mean_of(square(rms(x))) == doctest::Approx(1.0).epsilon(1e-4));
    check_error([] { nn::LayerNorm(0); }, {"[layer_norm]", "0"});
    check_error([] { nn::RMSNorm(4, -1.0); }, {"[rms_norm]", "-1"});
}

TEST_CASE("dropout: works while training only") {
    nn::Dropout layer(0.5);
    const Tensor x = ones({10000});
    CHECK(mean_of(layer(x)) == doctest::Approx(1.0).epsilon(0.05));
    CHECK(largest(layer(x)) == 2.0);
    layer.eval();
    CHECK(layer(x).is_same(x));
    check_error([] { nn::Dropout(1.5); }, {"[dropout]", "1.5"});
    check_error([] { nn::Dropout(-0.1); }, {"[dropout]", "-0.1"});
}

TEST_CASE("mlp and swiglu: computed from their parts") {
    const Tensor x = randn({2, 3});
    nn::MLP mlp(3, 8, 4);
    CHECK(relative_error(mlp(x), mlp.down(relu(mlp.up(x)))) == 0.0);
    nn::MLP smooth(3, 8, 4, [](const Tensor& h) { return gelu(h); });
    CHECK(relative_error(smooth(x), smooth.down(gelu(smooth.up(x)))) == 0.0);
    nn::MLP bounded(3, 8, 4, tanh);  // a function name that the C library also has
    CHECK(relative_error(bounded(x), bounded.down(tanh(bounded.up(x)))) == 0.0);
    nn::MLP gaussian(3, 8, 4, gelu);  // an op with a second argument
    CHECK(relative_error(gaussian(x), gaussian.down(gelu(gaussian.up(x)))) == 0.0);
    check_error([] { nn::MLP(3, 8, 4, nullptr); }, {"[mlp]", "empty function"});
    nn::SwiGLU gated(3, 8);
    CHECK(relative_error(gated(x), gated.down_proj(silu(gated.gate_proj(x)) * gated.up_proj(x))) == 0.0);
    CHECK(gated.parameter_count() == 3 * 3 * 8);
}

TEST_CASE("init: the published deviations") {
    const Tensor weight = zeros({300, 200});
    nn::init::normal(weight, 1.0, 0.5);
    CHECK(mean_of(weight) == doctest::Approx(1.0).epsilon(0.01));
    CHECK(deviation_of(weight) == doctest::Approx(0.5).epsilon(0.02));
    nn::init::uniform(weight, 2.0, 3.0);
    CHECK(min(weight).item() >= 2.0);
    CHECK(max(weight).item() < 3.0);
    nn::init::kaiming_normal(weight);
    CHECK(deviation_of(weight) == doctest::Approx(std::sqrt(2.0 / 200)).epsilon(0.02));
    nn::init::kaiming_uniform(weight);
    CHECK(deviation_of(weight) == doctest::Approx(std::sqrt(2.0 / 200)).epsilon(0.02));
    nn::init::xavier_normal(weight);
    CHECK(deviation_of(weight) == doctest::Approx(std::sqrt(2.0 / 500)).epsilon(0.02));
    nn::init::xavier_uniform(weight);
    CHECK(deviation_of(weight) == doctest::Approx(std::sqrt(2.0 / 500)).epsilon(0.02));
    CHECK(largest(weight) <= std::sqrt(6.0 / 500));
}

TEST_CASE("init: numbers that are not finite are refused") {
    const Tensor x = zeros({2, 2});
    check_error([&] { nn::init::normal(x, NAN); }, {"[init.normal] the mean nan"});
    check_error([&] { nn::init::normal(x, 0.0, INFINITY); }, {"[init.normal]", "inf"});
    check_error([&] { nn::init::uniform(x, -1e308, 1e308); }, {"[init.uniform]", "no finite range"});
}

TEST_CASE("init: parameters, views, half types; the same seed gives the same numbers") {
    Generator a(7), b(7);
    const Tensor x = nn::parameter(zeros({4, 4})), y = zeros({4, 4});
    nn::init::normal(x, 0.0, 1.0, &a);
    nn::init::normal(y, 0.0, 1.0, &b);
    CHECK(x.requires_grad());
    CHECK(test::same(x.detach(), y));
    const Tensor wide = zeros({4, 8});
    nn::init::normal(wide.narrow(1, 0, 4), 0.0, 1.0);
    CHECK(largest(wide.narrow(1, 0, 4)) > 0.0);
    CHECK(largest(wide.narrow(1, 4, 4)) == 0.0);
    const Tensor half = zeros({1000}, {DType::bf16});
    nn::init::normal(half);
    CHECK(deviation_of(half.to(DType::f32)) == doctest::Approx(1.0).epsilon(0.1));
    check_error([] { nn::init::normal(zeros({2}, {DType::i64})); }, {"[init.normal]", "i64"});
    check_error([] { nn::init::normal(zeros({2}), 0.0, -1.0); }, {"[init.normal]", "-1"});
    check_error([] { nn::init::uniform(zeros({2}), 2.0, 1.0); }, {"[init.uniform]", "2", "1"});
    check_error([] { nn::init::kaiming_normal(zeros({2})); }, {"[init.kaiming_normal]", "(2)"});
}
