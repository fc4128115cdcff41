// Errors that kernels along rows (reductions, softmax, cross-entropy, norms) can only make on a GPU: rows that are not
// aligned to 16 bytes, rows divided between several blocks, sums whose order changes, labels that only the device sees.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/cuda/device.h"
#include "tests/expect_error.h"

namespace potluck::test {
namespace {

/// The largest |got - expected| / (1 + |expected|); infinity when only one of them is a NaN.
double distance(const Tensor& got, const Tensor& expected) {
    REQUIRE(got.shape() == expected.shape());
    const std::vector<double> a = got.to_vector(), b = expected.to_vector();
    double largest = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
        const double one = std::fabs(a[i] - b[i]) / (1.0 + std::fabs(b[i]));
        largest = std::isnan(one) ? std::numeric_limits<double>::infinity() : std::max(largest, one);
    }
    return largest;
}

double tolerance(DType dtype) {
    return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 4e-3 : 3e-2;
}

Tensor some(const Shape& shape, DType dtype, std::uint64_t seed) {
    Generator generator(seed);
    return to(randn(shape, {}, &generator), dtype);
}

/// The same values on the GPU, in rows that begin `offset` elements after a multiple of 16 bytes and are not a multiple
/// of 16 bytes apart.
Tensor misaligned(const Tensor& x, std::int64_t offset) {
    const std::int64_t rows = x.size(0), width = x.size(1);
    const Tensor around = Tensor::empty({rows, width + offset + 3}, {x.dtype(), Device::cuda()});
    around.fill_(0);
    const Tensor inside = around.narrow(1, offset, width);
    inside.copy_(x.to(Device::cuda()));
    return inside;
}

/// Runs `function` on leaves with the values of `inputs`, and backward from the sum of squares of its result.
struct Run {
    Tensor y;
    std::vector<Tensor> gradients;
};
template <class Function>
Run run(const std::vector<Tensor>& inputs, Function function) {
    std::vector<Tensor> leaves;
    for (const Tensor& input : inputs) {
        leaves.push_back(input.detach());
        leaves.back().set_requires_grad();
    }
    Run result{function(leaves), {}};
    backward(result.y, {.gradient = result.y.detach()});
    for (const Tensor& leaf : leaves) result.gradients.push_back(leaf.grad());
    return result;
}

std::vector<Tensor> on_gpu(const std::vector<Tensor>& inputs) {
    std::vector<Tensor> there;
    for (const Tensor& input : inputs) there.push_back(input.to(Device::cuda()));
    return there;
}

}  // namespace

TEST_CASE("cuda rows: softmax, cross-entropy and norms agree with the CPU wherever a row begins") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
        for (const std::int64_t width : {1, 7, 8, 9, 33, 1023, 1025, 1500})
            for (const std::int64_t offset : {0, 1, 5}) {
                INFO(name_of(dtype) << ", width " << width << ", offset " << offset);
                const Tensor x = some({3, width}, dtype, 1);
                const Tensor weight = some({width}, dtype, 2), bias = some({width}, dtype, 3);
                const std::vector<std::int64_t> numbers{0, width / 2, width - 1};
                const Tensor labels = tensor(numbers, {3});
                const Tensor there = misaligned(x, offset);
                const Tensor labels_there = labels.to(Device::cuda());
                const auto compare = [&](const char* name, const std::vector<Tensor>& parameters,
                                         auto function) {
                    INFO(name);
                    std::vector<Tensor> here{x}, gpu{there};
                    for (const Tensor& parameter : parameters) {
                        here.push_back(parameter);
                        gpu.push_back(parameter.to(Device::cuda()));
                    }
                    const Run expected = run(here, function), got = run(gpu, function);
                    CHECK(distance(got.y, expected.y) < tolerance(dtype));
                    for (std::size_t i = 0; i < here.size(); ++i)
                        CHECK(distance(got.gradients[i], expected.gradients[i]) < tolerance(dtype));
                };
                compare("softmax", {}, [](const std::vector<Tensor>& in) { return softmax(in[0]); });
                compare("log_softmax", {}, [](const std::vector<Tensor>& in) { return log_softmax(in[0]); });
                compare("cross_entropy", {}, [&](const std::vector<Tensor>& in) {
                    const Tensor& of = in[0].device() == Device::cpu() ? labels : labels_there;
                    return cross_entropy(in[0], of, {.label_smoothing = 0.1, .reduction = Reduction::none});
                });
                if (width < 2) continue;  // a norm of one element is its sign
                compare("layer_norm", {weight, bias},
                        [](const std::vector<Tensor>& in) { return layer_norm(in[0], in[1], in[2], 1e-2); });
                compare("rms_norm", {weight},
                        [](const std::vector<Tensor>& in) { return rms_norm(in[0], in[1], 1e-2); });
            }
}

TEST_CASE("cuda rows: wide norms, whose gradients of parameters do not fit into shared memory") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::f64}) {
        const std::vector<Tensor> inputs{some({5, 13001}, dtype, 1), some({13001}, dtype, 2),
                                         some({13001}, dtype, 3)};
        const auto norm = [](const std::vector<Tensor>& in) { return layer_norm(in[0], in[1], in[2]); };
        const Run expected = run(inputs, norm), got = run(on_gpu(inputs), norm);
        CHECK(distance(got.y, expected.y) < tolerance(dtype));
        for (std::size_t i = 0; i < inputs.size(); ++i)
            CHECK(distance(got.gradients[i], expected.gradients[i]) < tolerance(dtype));
    }
}

TEST_CASE("cuda rows: reductions agree with the CPU however they are cut into blocks") {
    if (!has_cuda_device()) return;
    struct Sample {
        Shape shape;
        std::vector<std::int64_t> axes;
    };
    const std::vector<Sample> samples{{{1, 70001}, {1}},  // few long rows: several blocks each
                                      {{3, 2000}, {1}},   // one block each
                                      {{300, 3}, {1}},    // one thread each
                                      {{20003, 2}, {0}},  // two long columns
                                      {{5000, 40}, {0}},  // columns, divided along their length
                                      {{100, 300}, {0}},  // more columns than a block processes
                                      {{4, 5, 6, 7}, {0, 2}}};
    for (const Sample& sample : samples) {
        INFO(to_string(sample.shape));
        const Tensor x = some(sample.shape, DType::f32, 4), there = x.to(Device::cuda());
        CHECK(distance(sum(there, sample.axes), sum(x, sample.axes)) < 1e-6);
        CHECK(distance(mean(there, sample.axes), mean(x, sample.axes)) < 1e-6);
        CHECK(distance(var(there, sample.axes), var(x, sample.axes)) < 1e-6);
        CHECK(distance(logsumexp(there, sample.axes), logsumexp(x, sample.axes)) < 1e-6);
        CHECK(max(there, sample.axes).to_vector() == max(x, sample.axes).to_vector());
        const Tensor whole = floor(x * 2.0).to(DType::i32), whole_there = whole.to(Device::cuda());
        CHECK(sum(whole_there, sample.axes).to_vector() == sum(whole, sample.axes).to_vector());
        CHECK(any(whole_there > 5, sample.axes).to_vector() == any(whole > 5, sample.axes).to_vector());
        CHECK(all(whole_there > -5, sample.axes).to_vector() == all(whole > -5, sample.axes).to_vector());
        if (sample.axes.size() > 1) continue;
        // Ties: the first place.
        CHECK(argmax(whole_there, sample.axes[0]).to_vector() == argmax(whole, sample.axes[0]).to_vector());
        CHECK(argmin(whole_there, sample.axes[0]).to_vector() == argmin(whole, sample.axes[0]).to_vector());
    }
}

TEST_CASE("cuda rows: the same input gives the same bits every time") {
    if (!has_cuda_device()) return;
    const std::vector<Tensor> inputs =
        on_gpu({some({70, 200}, DType::bf16, 1), some({200}, DType::bf16, 2), some({200}, DType::bf16, 3)});
    const auto model = [](const std::vector<Tensor>& in) {
        return softmax(layer_norm(in[0], in[1], in[2])) * sum(in[0], {0});
    };
    const Run first = run(inputs, model);
    for (int i = 0; i < 3; ++i) {
        const Run again = run(inputs, model);
        CHECK(again.y.to_vector() == first.y.to_vector());
        for (std::size_t input = 0; input < inputs.size(); ++input)
            CHECK(again.gradients[input].to_vector() == first.gradients[input].to_vector());
    }
}

TEST_CASE("cuda rows: a label that is no class is refused as on the CPU, and the device goes on") {
    if (!has_cuda_device()) return;
    const Tensor logits = some({40, 5}, DType::f32, 1), there = logits.to(Device::cuda());
    std::vector<std::int64_t> numbers(40, 2);
    numbers[17] = -4;
    numbers[30] = std::int64_t{1} << 31;
    const Tensor labels = tensor(numbers, {40});
    const auto loss = [&](const Tensor& of, const Tensor& with) {
        return cross_entropy(of, with, {.ignore_index = -1});
    };
    const std::string expected = error_of([&] { loss(logits, labels); });
    CHECK(contains(expected, "label -4 at position 17"));
    CHECK(error_of([&] { loss(there, labels.to(Device::cuda())); }) == expected);
    numbers[17] = numbers[30] = -1;
    const Tensor good = tensor(numbers, {40});
    CHECK(loss(there, good.to(Device::cuda())).item() == doctest::Approx(loss(logits, good).item()));
}

TEST_CASE("cuda rows: the gradient of cross-entropy may take the place of the logits") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    for (const DType dtype : {DType::f32, DType::bf16}) {
        Tensor logits = some({3, 1037}, dtype, 1).to(device);  // rows of an odd length
        const Tensor labels = tensor(std::vector<std::int64_t>{0, -100, 1036}, {3}).to(device);
        Tensor losses = Tensor::empty({3}, {DType::f32, device});
        Tensor logsumexp = Tensor::empty({3}, {DType::f32, device});
        Tensor elsewhere = Tensor::empty({3, 1037}, {dtype, device});
        const Tensor dlosses = potluck::ones({1}, {DType::f32, device}).expand({3});
        Backend& kernels = backend(device);
        kernels.cross_entropy(logits, labels, {}, losses, logsumexp);
        kernels.cross_entropy_backward(logits, labels, logsumexp, dlosses, {}, elsewhere);
        kernels.cross_entropy_backward(logits, labels, logsumexp, dlosses, {}, logits);
        CHECK(logits.to_vector() == elsewhere.to_vector());
        CHECK(losses[1].item() == 0.0);
        CHECK(sum(abs(logits[1])).item() == 0.0);
        CHECK(std::fabs(sum(logits[0].to(DType::f64)).item()) < 1e-2);
    }
}

TEST_CASE("cuda rows: rows and elements more than 2^31 elements apart" * doctest::test_suite("long")) {
    if (!has_cuda_device()) return;
    const std::int64_t far = (std::int64_t{1} << 31) + 8;
    // Only the few bytes that are read are ever accessed.
    const Tensor around = Tensor::empty({far + 4}, {DType::f16, Device::cuda()});
    const Tensor rows = around.alias({2, 4}, {far, 1}, 0);
    const Tensor given =
        tensor(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 9}, {2, 4}).to(DType::f16).to(Device::cuda());
    rows.copy_(given);
    CHECK(sum(rows, {1}).to_vector() == std::vector<double>{10, 27});
    CHECK(sum(rows, {0}).to_vector() == std::vector<double>{6, 8, 10, 13});
    CHECK(argmax(rows).item<std::int64_t>() == 7);
    CHECK(softmax(rows).to_vector() == softmax(given).to_vector());
    CHECK(layer_norm(rows).to_vector() == layer_norm(given).to_vector());
    const Tensor labels = tensor(std::vector<std::int64_t>{0, 3}, {2}).to(Device::cuda());
    CHECK(cross_entropy(rows, labels).item() == cross_entropy(given, labels).item());
}

}  // namespace potluck::test
