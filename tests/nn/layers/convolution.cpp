// Convolutional layers, pooling and batch norm as modules.

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::check_error;
using test::same;

namespace {

double largest(const Tensor& x) { return max(abs(x)).item(); }

/// A module as a user would write it.
struct ConvNet : nn::Module {
    nn::Conv2d first{1, 4, 3, {.padding = 1}}, second{4, 8, {3, 3}, {.padding = 1, .bias = false}};
    nn::BatchNorm norm{8};
    nn::MaxPool2d pool{2};
    nn::Linear head{8 * 4 * 4, 3};
    void members(nn::Members& m) override {
        m("first", first)("second", second)("norm", norm)("pool", pool)("head", head);
    }
    Tensor forward(const Tensor& x) override {
        return head(flatten(pool(relu(norm(second(relu(first(x)))))), 1));
    }
};

}  // namespace

TEST_CASE("conv layers: shapes, names and start values") {
    nn::Conv2d layer(3, 16, {5, 3}, {.stride = {2, 1}, .padding = {2, 1}});
    CHECK(layer.weight.shape() == Shape{16, 3, 5, 3});
    CHECK(layer.bias.shape() == Shape{16});
    CHECK(layer(zeros({2, 3, 8, 8})).shape() == Shape{2, 16, 4, 8});
    const double bound = 1.0 / std::sqrt(3 * 5 * 3);
    CHECK(largest(layer.weight) <= bound);
    CHECK(largest(layer.weight) > 0.95 * bound);
    CHECK(largest(layer.bias) <= bound);
    CHECK(largest(layer.bias) > 0.5 * bound);
    CHECK(layer.state_dict().size() == 2);

    nn::Conv2d grouped(4, 8, 3, {.groups = 4, .bias = false});
    CHECK(grouped.weight.shape() == Shape{8, 1, 3, 3});
    CHECK(largest(grouped.weight) > 0.9 / 3);
    CHECK_FALSE(grouped.bias.defined());

    nn::Conv1d line(2, 6, 4, {.stride = 2, .initialize = false});
    CHECK(line(ones({1, 2, 10})).shape() == Shape{1, 6, 4});
    CHECK(largest(line.weight) == 0.0);
    CHECK(layer.describe() == "Conv2d(3, 16, kernel 5 x 3)");
    CHECK(grouped.describe() == "Conv2d(4, 8, kernel 3 x 3, groups 4, no bias)");
    CHECK(line.describe() == "Conv1d(2, 6, kernel 4)");

    check_error([] { nn::Conv2d(0, 3, 3); }, {"[conv2d]", "channels 0"});
    check_error([] { nn::Conv2d(4, 6, 3, {.groups = 3}); }, {"[conv2d]", "groups is 3", "channels 4"});
    check_error([] { nn::Conv1d(4, 6, 0); }, {"[conv1d]", "a kernel", "0"});
    check_error([&] { layer(zeros({2, 3, 8})); }, {"[conv2d]", "(2, 3, 8)"});
}

TEST_CASE("pooling layers: the ops as modules") {
    const Tensor x = arange(0, 16, 1, {DType::f32}).reshape({1, 1, 4, 4});
    CHECK(nn::MaxPool2d(2)(x).to_vector() == std::vector<double>{5, 7, 13, 15});
    CHECK(nn::AvgPool2d({2, 4})(x).to_vector() == std::vector<double>{3.5, 11.5});
    const Tensor line = x.reshape({1, 1, 16});
    CHECK(nn::MaxPool1d(4, {.stride = 6})(line).to_vector() == std::vector<double>{3, 9, 15});
    CHECK(nn::AvgPool1d(8)(line).to_vector() == std::vector<double>{3.5, 11.5});
    CHECK(nn::MaxPool2d(2).parameters().empty());
}

TEST_CASE("batch norm: its state is that of PyTorch's layers") {
    nn::BatchNorm layer(3);
    const nn::StateDict state = layer.state_dict();
    std::vector<std::string> names;
    for (const auto& [name, tensor] : state) names.push_back(name);
    CHECK(names ==
          std::vector<std::string>{"bias", "num_batches_tracked", "running_mean", "running_var", "weight"});
    CHECK(state.at("num_batches_tracked").dtype() == DType::i64);
    CHECK(state.at("num_batches_tracked").shape() == Shape{});
    CHECK(layer.parameter_count() == 6);
    CHECK(nn::BatchNorm(3, {.affine = false}).parameter_count() == 0);
    CHECK(layer.describe() == "BatchNorm(3)");
    check_error([] { nn::BatchNorm(0); }, {"[batch_norm]", "channels", "0"});
    check_error([] { nn::BatchNorm(3, {.momentum = 2.0}); }, {"[batch_norm]", "momentum", "2"});
}

TEST_CASE("batch norm: training collects statistics, evaluation uses them") {
    nn::BatchNorm layer(2, {.momentum = 0.5});
    const Tensor x = tensor({{1., 10.}, {3., 30.}});
    const Tensor y = layer(x);  // mean 2 and 20, biased variance 1 and 100, unbiased 2 and 200
    CHECK(largest(y.detach() - tensor({{-1., -1.}, {1., 1.}})) < 1e-5);
    CHECK(layer.running_mean.to_vector() == std::vector<double>{1, 10});
    CHECK(layer.running_var.to_vector() == std::vector<double>{1.5, 100.5});
    CHECK(layer.num_batches_tracked.item<std::int64_t>() == 1);
    layer.eval();
    const Tensor z = layer(tensor({{1., 10.}}));  // a single row is enough
    CHECK(largest(z) == 0.0);
    CHECK(layer.running_mean.to_vector() == std::vector<double>{1, 10});
    CHECK(layer.num_batches_tracked.item<std::int64_t>() == 1);
}

TEST_CASE("batch norm: in a region that is computed again a batch counts once") {
    test::on_each_device([] {
        const Tensor x = tensor({{3.}, {5.}}).to(test::test_device());
        std::vector<std::map<std::string, std::vector<double>>> states;
        for (const bool recomputed : {false, true}) {
            nn::BatchNorm layer(1);
            layer.to(test::test_device());
            const auto region = [&](const Tensor& in) { return square(layer(in)); };
            (recomputed ? recompute(region, x) : region(x)).sum().backward();
            CHECK(layer.running_mean.item() == doctest::Approx(0.4));
            CHECK(layer.num_batches_tracked.item<std::int64_t>() == 1);
            states.emplace_back();
            for (const auto& [name, tensor] : layer.state_dict()) states.back()[name] = tensor.to_vector();
            states.back()["gradient"] = layer.weight.grad().to_vector();
        }
        CHECK(states[0] == states[1]);
    });
}

TEST_CASE("batch norm: a last batch of one row is an error that changes nothing") {
    nn::BatchNorm layer(3);
    data::Loader loader(data::TensorDataset(randn({33, 3})), {.batch = 16});
    std::int64_t batches = 0;
    Tensor mean, variance;
    try {
        for (const auto& [x, y] : loader) {
            mean = layer.running_mean.clone();
            variance = layer.running_var.clone();
            layer(x);
            ++batches;
        }
        FAIL_CHECK("was accepted");
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("[batch_norm] x (1, 3) has 1 value a channel") == 0);
    }
    CHECK(batches == 2);
    CHECK(layer.num_batches_tracked.item<std::int64_t>() == 2);
    CHECK(same(layer.running_mean, mean));
    CHECK(same(layer.running_var, variance));
    CHECK(layer(randn({1, 3, 4})).shape() == Shape{1, 3, 4});
}

TEST_CASE("batch norm: buffers follow to(dtype), copies, clones and files as buffers do") {
    test::TemporaryFolder folder;
    manual_seed(1);
    ConvNet net;
    net(randn({4, 1, 8, 8}));
    CHECK(net.norm.num_batches_tracked.item<std::int64_t>() == 1);

    save(net, folder / "net.safetensors");
    ConvNet other;
    load(other, folder / "net.safetensors");
    for (const auto& [name, tensor] : net.state_dict()) {
        CAPTURE(name);
        CHECK(same(tensor, other.state_dict().at(name)));
    }

    ConvNet cloned = clone(net);
    net(randn({4, 1, 8, 8}));
    CHECK(cloned.norm.num_batches_tracked.item<std::int64_t>() == 1);
    CHECK(net.norm.num_batches_tracked.item<std::int64_t>() == 2);
    CHECK_FALSE(same(cloned.norm.running_mean, net.norm.running_mean));
    ConvNet copy = net;
    CHECK(copy.norm.running_mean.is_same(net.norm.running_mean));

    net.to(DType::bf16);
    CHECK(net.norm.weight.dtype() == DType::bf16);
    CHECK(net.norm.running_mean.dtype() == DType::f32);
    CHECK(net.norm.num_batches_tracked.dtype() == DType::i64);
    CHECK(net(randn({4, 1, 8, 8}).to(DType::bf16)).dtype() == DType::bf16);
}

TEST_CASE("a convolutional net learns, and gives the same after a round trip through evaluation") {
    manual_seed(3);
    ConvNet net;
    optim::AdamW optimizer(net, {.learning_rate = 1e-2});
    // Which third of the image is bright?
    const Tensor labels = remainder(arange(0, 24, 1), arange(3, 4, 1));
    Tensor images = randn({24, 1, 8, 8}) * 0.1;
    for (std::int64_t i = 0; i < 24; ++i) {
        const NoGrad guard;
        images[i].narrow(1, i % 3 * 3, 2).fill_(1.0);
    }
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
        const Tensor loss = cross_entropy(net(images), labels);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        (step == 0 ? first : last) = loss.item();
    }
    CHECK(first > 0.8);
    CHECK(last < 0.05);
    net.eval();
    const NoGrad guard;
    CHECK(sum(argmax(net(images), 1) == labels).item() >= 23);
}
