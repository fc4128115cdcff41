// Whole models train on the CUDA device as on the CPU: with the same losses, step by step.

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "autograd/ops.h"
#include "core/capture.h"
#include "core/factories.h"
#include "core/random.h"
#include "nn/train/clip.h"
#include "potluck.h"
#include "tests/cuda/device.h"
#include "tests/expect_error.h"

namespace potluck::test {
namespace {

constexpr int steps = 20;

/// Both devices draw the same numbers from here on, however many the creation of the model took on the CPU.
void seed_device(Device device) { default_generator(device) = Generator(99); }

struct Text {
    Tensor ids, labels;  // (batch, time) i64
};

Text some_text(std::int64_t vocabulary, std::int64_t time) {
    Generator generator(5);
    const Tensor text = randint(0, vocabulary, {4, time + 1}, {DType::i64}, &generator);
    return {narrow(text, 1, 0, time).contiguous(), narrow(text, 1, 1, time).contiguous()};
}

/// Trains on one batch and returns the loss of every step.
template <class Model, class Loss>
std::vector<double> losses_of(Model& model, Device device, DType dtype, Loss&& loss_of) {
    model.to(device);
    model.to(dtype);
    seed_device(device);
    optim::AdamW optimizer(model, {.learning_rate = 3e-3, .weight_decay = 0.1});
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
        const Tensor loss = loss_of(model);
        losses.push_back(loss.item());
        loss.backward();
        clip_grad_norm(model, 1.0);
        optimizer.step();
        optimizer.zero_grad();
    }
    return losses;
}

std::vector<double> gpt2_losses(Device device, DType dtype) {
    manual_seed(7);
    nn::GPT2 model({.vocabulary = 61, .context = 24, .width = 32, .heads = 4, .layers = 2, .dropout = 0.1});
    const Text text = some_text(61, 24);
    const Tensor ids = text.ids.to(device);
    const Tensor labels = text.labels.to(device);
    return losses_of(model, device, dtype, [&](nn::GPT2& gpt) { return gpt.loss(ids, labels); });
}

std::vector<double> llama_losses(Device device, DType dtype) {
    manual_seed(8);
    nn::Llama model(
        {.vocabulary = 61, .context = 24, .width = 32, .hidden = 48, .heads = 4, .kv_heads = 2, .layers = 2});
    const Text text = some_text(61, 24);
    const Tensor ids = text.ids.to(device);
    const Tensor labels = text.labels.to(device);
    return losses_of(model, device, dtype, [&](nn::Llama& llama) { return llama.loss(ids, labels); });
}

struct ConvolutionNet : nn::Module {
    nn::Conv2d first{1, 8, 3, {.padding = 1}}, second{8, 16, 3, {.stride = 2, .groups = 2}};
    nn::BatchNorm norm{8};
    nn::MaxPool2d pool{2, {.ceil_mode = true}};
    nn::Linear head{16 * 2 * 2, 10};
    void members(nn::Members& m) override {
        m("first", first)("second", second)("norm", norm)("pool", pool)("head", head);
    }
    Tensor forward(const Tensor& images) override {                             // (batch, 1, 9, 9)
        const Tensor features = relu(second(pool(relu(norm(first(images))))));  // (batch, 16, 2, 2)
        return head(features.reshape({images.size(0), 16 * 2 * 2}));
    }
};

std::vector<double> convolution_losses(Device device, DType dtype) {
    manual_seed(9);
    ConvolutionNet net;
    Generator generator(6);
    const Tensor images = randn({16, 1, 9, 9}, {}, &generator).to(dtype).to(device);
    const Tensor labels = randint(0, 10, {16}, {DType::i64}, &generator).to(device);
    return losses_of(net, device, dtype, [&](ConvolutionNet& n) { return cross_entropy(n(images), labels); });
}

void check_same(const std::vector<double>& cpu, const std::vector<double>& cuda, double relative) {
    REQUIRE(cpu.size() == cuda.size());
    for (std::size_t step = 0; step < cpu.size(); ++step) {
        INFO("step ", step, ": ", cpu[step], " on the CPU, ", cuda[step], " on the CUDA device");
        CHECK(std::fabs(cuda[step] - cpu[step]) <= relative * std::fabs(cpu[step]));
    }
    CHECK(cpu.back() < cpu.front());
}

/// Rounding differs, and the differences grow over 20 steps: a little in f32, more in bf16, which rounds the weights.
double allowed(DType dtype) { return dtype == DType::f32 ? 2e-5 : 2e-2; }

}  // namespace

TEST_CASE("cuda: training, 20 steps of a GPT-2 with dropout have the losses of the CPU") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::bf16})
        check_same(gpt2_losses(Device::cpu(), dtype), gpt2_losses(Device::cuda(), dtype), allowed(dtype));
}

TEST_CASE("cuda: training, 20 steps of a Llama with grouped heads have the losses of the CPU") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::bf16})
        check_same(llama_losses(Device::cpu(), dtype), llama_losses(Device::cuda(), dtype), allowed(dtype));
}

TEST_CASE("cuda: training, 20 steps of a convolutional net have the losses of the CPU") {
    if (!has_cuda_device()) return;
    check_same(convolution_losses(Device::cpu(), DType::f32), convolution_losses(Device::cuda(), DType::f32),
               allowed(DType::f32));
}

TEST_CASE("cuda: training, the same seed gives the same bits every time") {
    if (!has_cuda_device()) return;
    CHECK(gpt2_losses(Device::cuda(), DType::f32) == gpt2_losses(Device::cuda(), DType::f32));
}

TEST_CASE(
    "cuda: training, a captured step replays with fresh dropout masks: the losses are those of running it") {
    if (!has_cuda_device()) return;
    const Text text = some_text(61, 24);
    for (const Device device : {Device::cpu(), Device::cuda()}) {
        const auto losses = [&](bool captured) {
            manual_seed(7);
            nn::GPT2 model(
                {.vocabulary = 61, .context = 24, .width = 32, .heads = 4, .layers = 2, .dropout = 0.1});
            model.to(device);
            seed_device(device);
            optim::AdamW optimizer(model, {.learning_rate = 3e-3});
            const Tensor ids = text.ids.to(device);
            const Tensor labels = text.labels.to(device);
            Tensor loss;
            const auto work = [&] {
                optimizer.zero_grad();
                loss = model.loss(ids, labels);
                loss.backward();
            };
            std::vector<double> values;
            std::unique_ptr<CapturedWork> graph;
            for (int step = 0; step < 6; ++step) {
                if (!captured || step == 0) {
                    work();
                } else {
                    if (graph == nullptr) graph = capture(device, work);
                    graph->replay();
                }
                values.push_back(loss.item());
                optimizer.step();
            }
            return values;
        };
        CHECK(losses(true) == losses(false));
    }
}

TEST_CASE("cuda: training, reading a value while work is being captured is refused, and nothing is spoiled") {
    if (!has_cuda_device()) return;
    const Tensor x = ones({3}, {DType::f32, Device::cuda()});
    const std::string text = error_of([&] { (void)capture(Device::cuda(), [&] { (void)sum(x).item(); }); });
    CHECK(contains(text, "while work is being recorded"));
    CHECK(sum(x).item() == 3.0);
}

TEST_CASE("cuda: training, an optimizer's step is not recorded, and nothing of it happens") {
    if (!has_cuda_device()) return;
    Tensor p = nn::parameter(ones({3}, {DType::f32, Device::cuda()}));
    p.set_grad(ones({3}, {DType::f32, Device::cuda()}));
    optim::AdamW adamw(std::vector<nn::NamedTensor>{{"p", p}}, {.learning_rate = 0.5});
    optim::SGD sgd(std::vector<nn::NamedTensor>{{"p", p}}, {.learning_rate = 0.5});
    for (optim::Optimizer* optimizer :
         {static_cast<optim::Optimizer*>(&adamw), static_cast<optim::Optimizer*>(&sgd)}) {
        const std::string text = error_of([&] { (void)capture(Device::cuda(), [&] { optimizer->step(); }); });
        CHECK(contains(text, "a step cannot be recorded"));
        CHECK(optimizer->steps() == 0);
        CHECK(p.to_vector() == std::vector<double>(3, 1.0));
    }
    sgd.step();
    CHECK(p.to_vector() == std::vector<double>(3, 0.5));
    adamw.step();
    CHECK(adamw.steps() == 1);
    CHECK(p.to_vector()[0] < 0.1);
}

}  // namespace potluck::test
