#include "autograd/ops/batch_norm.h"

#include <doctest/doctest.h>

#include <cmath>

#include "autograd/ops/copy.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

/// The values of one channel, in order.
std::vector<double> channel_of(const Array& x, std::int64_t channel) {
    std::vector<double> values;
    for (std::size_t i = 0; i < x.values.size(); ++i)
        if (indices_at(x.shape, static_cast<std::int64_t>(i))[1] == channel) values.push_back(x.values[i]);
    return values;
}

double mean_of(const std::vector<double>& values) {
    double total = 0;
    for (const double value : values) total += value;
    return total / static_cast<double>(values.size());
}

/// (x - mean) / sqrt(variance + epsilon) * weight + bias; without statistics, those of x.
Array normalised(const Array& x, const Array& weight, const Array& bias,
                 const std::vector<double>& means = {}, const std::vector<double>& variances = {}) {
    std::vector<double> center = means, scale = variances;
    for (std::int64_t c = 0; means.empty() && c < x.shape[1]; ++c) {
        std::vector<double> values = channel_of(x, c);
        center.push_back(mean_of(values));
        for (double& value : values) value = (value - center.back()) * (value - center.back());
        scale.push_back(mean_of(values));
    }
    Array y = x;
    for (std::size_t i = 0; i < y.values.size(); ++i) {
        const auto c = static_cast<std::size_t>(indices_at(x.shape, static_cast<std::int64_t>(i))[1]);
        y.values[i] = (y.values[i] - center[c]) / std::sqrt(scale[c] + 1e-3);
        if (!weight.values.empty()) y.values[i] *= weight.values[c];
        if (!bias.values.empty()) y.values[i] += bias.values[c];
    }
    return y;
}

/// Running statistics for the evaluation cases: 0, 0.5, .. and 1, 1.25, .. .
std::vector<double> running_means(std::int64_t channels) {
    std::vector<double> values;
    for (std::int64_t c = 0; c < channels; ++c) values.push_back(0.5 * static_cast<double>(c));
    return values;
}
std::vector<double> running_variances(std::int64_t channels) {
    std::vector<double> values;
    for (std::int64_t c = 0; c < channels; ++c) values.push_back(1.0 + 0.25 * static_cast<double>(c));
    return values;
}

constexpr BatchNormMode training{.epsilon = 1e-3}, evaluation{.training = false, .epsilon = 1e-3};

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "accepted";
}

}  // namespace

std::vector<Row> batch_norm_rows() {
    Row row{.op = "batch_norm", .tolerance = 2.0, .gradient_tolerance = 4.0};
    for (const Shape& shape : std::vector<Shape>{{3, 2},
                                                 {1, 2, 4},
                                                 {4, 3},
                                                 {2, 3, 5},
                                                 {2, 3, 2, 3},
                                                 {2, 2, 2, 1, 3},
                                                 {5, 0, 3},
                                                 {300, 70},
                                                 {6, 5, 31, 33}}) {
        const Input x{.shape = shape}, parameter{.shape = {shape[1]}};
        row.cases.push_back(
            {.inputs = {x, parameter, parameter},
             .call = call([](const Tensor& x, const Tensor& weight, const Tensor& bias) {
                 return batch_norm(x, weight, bias, {}, {}, training);
             }),
             .reference = reference([](const Array& x, const Array& weight, const Array& bias) {
                 return normalised(x, weight, bias);
             })});
        row.cases.push_back(
            {.inputs = {x},
             .call = call([](const Tensor& x) { return batch_norm(x, {}, {}, {}, {}, training); }),
             .reference = reference([](const Array& x) { return normalised(x, {}, {}); }),
             .note = "plain"});
        row.cases.push_back(
            {.inputs = {x, parameter, parameter},
             .call = call([](const Tensor& x, const Tensor& weight, const Tensor& bias) {
                 const std::int64_t channels = x.size(1);
                 return batch_norm(x, weight, bias, tensor(running_means(channels), {channels}),
                                   tensor(running_variances(channels), {channels}), evaluation);
             }),
             .reference = reference([](const Array& x, const Array& weight, const Array& bias) {
                 const std::int64_t channels = x.shape[1];
                 return normalised(x, weight, bias, running_means(channels), running_variances(channels));
             }),
             .note = "evaluation"});
    }
    row.cases.push_back({.inputs = {{.shape = {0, 3}}},
                         .call = call([](const Tensor& x) {
                             return batch_norm(x, {}, {}, zeros({3}), ones({3}), evaluation);
                         }),
                         .reference = reference([](const Array& x) { return x; }),
                         .note = "evaluation"});
    row.refusals = {
        {[] { batch_norm(Tensor()); }, {"[batch_norm]", "undefined"}},
        {[] { batch_norm(ones({3})); }, {"[batch_norm]", "(3)", "2 axes"}},
        {[] {
             batch_norm(ones({2, 1, 1, 1, 1, 1}));
         },
         {"[batch_norm]", "(2, 1, 1, 1, 1, 1)", "2 to 5 axes"}},
        {[] {
             batch_norm(ones({2, 3}, {DType::i64}));
         },
         {"[batch_norm]", "i64"}},
        {[] {
             batch_norm(ones({2, 3}), ones({2}));
         },
         {"[batch_norm]", "(2, 3)", "weight (3)", "(2)"}},
        {[] {
             batch_norm(ones({2, 3}), {}, ones({1, 3}));
         },
         {"[batch_norm]", "bias (3)", "(1, 3)"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, zeros({4}), ones({3}));
         },
         {"running_mean (3)", "(4)"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, zeros({3}), ones({4}));
         },
         {"running_variance (3)", "(4)"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, zeros({3}));
         },
         {"running_variance is not"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, {}, {}, {.training = false});
         },
         {"[batch_norm]", "out of training"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, {}, {}, {.epsilon = -1.0});
         },
         {"epsilon is -1"}},
        {[] {
             batch_norm(ones({2, 3}), {}, {}, {}, {}, {.momentum = 1.5});
         },
         {"momentum is 1.5"}},
        {[] {
             batch_norm(ones({0, 3}));
         },
         {"[batch_norm] x (0, 3) has no value a channel"}},
    };
    return {row};
}
const RowsOfFamily batch_norm_family(batch_norm_rows);

TEST_CASE(
    "batch_norm: one value a channel is refused in training, and the running statistics stay as they are") {
    on_each_device([] {
        const Tensor running_mean = tensor({0.5, 1, 2}), running_variance = tensor({1, 2, 3});
        const Tensor x = tensor({1, 2, 3}, {1, 3});
        CHECK(refusal([&] { batch_norm(x, {}, {}, running_mean, running_variance); }) ==
              "[batch_norm] x (1, 3) has 1 value a channel, and in training the variance needs 2 or more. "
              "Make the "
              "batch larger (drop an incomplete last one), or call eval() first.");
        CHECK(running_mean.to_vector() == std::vector<double>{0.5, 1, 2});
        CHECK(running_variance.to_vector() == std::vector<double>{1, 2, 3});
        const Tensor y =
            batch_norm(x, {}, {}, running_mean, running_variance, {.training = false, .epsilon = 0.0});
        CHECK(y.to_vector()[0] == 0.5);
        CHECK(y.to_vector()[1] == doctest::Approx(1.0 / std::sqrt(2.0)));
        CHECK(
            batch_norm(randn({1, 3, 4}, {DType::f32, test_device()}), {}, {}, running_mean, running_variance)
                .shape() == Shape{1, 3, 4});
    });
}

TEST_CASE("batch_norm: normalises by the biased variance, and keeps the unbiased one") {
    on_each_device([] {
        for (const DType dtype : floating_dtypes()) {
            const Tensor running_mean = zeros({1}), running_variance = ones({1});
            const Tensor x = tensor({1, 3}, {1, 1, 2}, {dtype});
            const Tensor y = batch_norm(x, {}, {}, running_mean, running_variance, {.epsilon = 0.0});
            CHECK(y.to_vector() == std::vector<double>{-1, 1});  // mean 2, biased variance 1
            CHECK(running_mean.item() == doctest::Approx(0.1 * 2));
            CHECK(running_variance.item() == doctest::Approx(0.9 + 0.1 * 2));  // unbiased: 2
            batch_norm(x, {}, {}, running_mean, running_variance, {.momentum = 1.0});
            CHECK(running_mean.item() == 2.0);
            CHECK(running_variance.item() == 2.0);
            batch_norm(x, {}, {}, running_mean, running_variance, {.momentum = 0.0});
            CHECK(running_mean.item() == 2.0);
        }
    });
}

TEST_CASE("batch_norm: the running mean is updated once a forward, and backward leaves it alone") {
    on_each_device([] {
        Tensor x = full({8, 2}, 4.0);
        x.set_requires_grad();
        const Tensor running_mean = zeros({2}), running_variance = ones({2});
        const Tensor y = batch_norm(x, {}, {}, running_mean, running_variance);
        backward(sum(y), {.retain_graph = true});
        sum(y).backward();
        CHECK(running_mean.to_vector<float>() == std::vector<float>(2, 0.4F));
        CHECK(running_variance.to_vector<float>() == std::vector<float>(2, 0.9F));
        CHECK(x.grad().to_vector() == std::vector<double>(16, 0.0));
    });
}

TEST_CASE("batch_norm: channels far from 0 keep their shape") {
    on_each_device([] {
        for (const double shift : {2000.0, 20000.0}) {
            const Tensor x = tensor({shift, shift + 1, shift - 1, shift + 4}, {4, 1});
            const std::vector<double> y = batch_norm(x).to_vector();
            const std::vector<double> expected{-0.5345217, 0.0, -1.0690434, 1.6035652};
            for (std::size_t i = 0; i < 4; ++i) CHECK(std::fabs(y[i] - expected[i]) < 1e-3);
        }
    });
}

TEST_CASE("batch_norm: a constant channel is the bias, with an epsilon that half types do not hold") {
    on_each_device([] {
        for (const DType dtype : floating_dtypes())
            for (const double value : {0.0, 3.0, 0.1}) {
                Tensor x = full({5, 2, 40}, value, {dtype});
                x.set_requires_grad();
                const Tensor y =
                    batch_norm(x, ones({2}, {dtype}), full({2}, 0.5, {dtype}), {}, {}, {.epsilon = 1e-12});
                CHECK(y.to_vector() == std::vector<double>(400, 0.5));
                backward(y, {.gradient = ones(y.shape(), {dtype})});
                for (const double slope : x.grad().to_vector()) CHECK(slope == 0.0);
            }
    });
}

TEST_CASE("batch_norm: gradients of parameters in half types are summed in f32 or better") {
    on_each_device([] {
        for (const DType dtype : {DType::bf16, DType::f16}) {
            Tensor bias = zeros({3}, {dtype});
            bias.set_requires_grad();
            const Tensor y =
                batch_norm(arange(0, 24576, 1, {DType::f32}).reshape({64, 3, 128}).to(dtype), {}, bias);
            backward(y, {.gradient = ones(y.shape(), {dtype})});
            CHECK(bias.grad().to_vector() == std::vector<double>(3, 8192.0));
        }
    });
}

TEST_CASE("batch_norm: sums and distances that leave the range of the dtype") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f64}) {
            const double large = dtype == DType::f32 ? 3e38 : 1.7e308;
            std::vector<double> values;
            for (int i = 0; i < 64; ++i) values.push_back(i % 4 == 0 ? large : -large);
            Tensor x = tensor(values, {64, 1}, {dtype});
            Tensor weight = ones({1}, {dtype});
            weight.set_requires_grad();
            Tensor mean = zeros({1}, {dtype}), variance = ones({1}, {dtype});
            const Tensor y = batch_norm(x, weight, {}, mean, variance, {.training = true});
            const std::vector<double> got = y.to_vector();
            for (std::size_t i = 0; i < got.size(); ++i)
                CHECK(got[i] == doctest::Approx((i % 4 == 0 ? 1.5 : -0.5) / std::sqrt(0.75)).epsilon(1e-5));
            backward(y, {.gradient = y.detach()});
            CHECK(weight.grad().item() == doctest::Approx(64.0).epsilon(1e-4));
        }
    });
}

TEST_CASE("batch_norm: NaN stays in its channel") {
    on_each_device([] {
        const Tensor y = batch_norm(tensor({1, std::nan(""), 3, 4}, {2, 2}));
        CHECK(std::isfinite(y[0][0].item()));
        CHECK(std::isnan(y[0][1].item()));
        CHECK(std::isnan(y[1][1].item()));
    });
}

}  // namespace potluck::test
