// Two threads train two models at the same time. Each must end with the same bits as when it trains alone.

#include <doctest/doctest.h>

#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "autograd/ops.h"
#include "core/factories.h"
#include "core/memory.h"
#include "nn/models/gpt2.h"
#include "nn/models/llama.h"
#include "nn/optim/adamw.h"
#include "nn/optim/sgd.h"
#include "nn/train/clip.h"
#include "tests/on_device.h"

using namespace potluck;

namespace {

using Numbers = std::vector<double>;

/// A model on a device, ready to be trained. It is created before any thread starts, since its weights use the default
/// generator.
struct Training {
    std::unique_ptr<nn::LanguageModel> model;
    std::unique_ptr<optim::Optimizer> optimizer;
    Device device;
    bool random;  // uses random numbers of its device in training

    /// The losses of several updates, and every parameter after them.
    Numbers run() const {
        if (random) default_generator(device) = Generator(11);
        Generator generator(12);
        const Tensor tokens = randint(0, 40, {6, 17}, {DType::i64}, &generator);
        const Tensor inputs = narrow(tokens, 1, 0, 16).to(device);
        const Tensor labels = narrow(tokens, 1, 1, 16).to(device);
        Numbers result;
        for (int step = 0; step < 4; ++step) {
            const Tensor loss = model->loss(inputs, labels);
            loss.backward();
            clip_grad_norm(*model, 1.0);
            optimizer->step();
            optimizer->zero_grad();
            result.push_back(loss.item());
        }
        for (const Tensor& parameter : model->parameters())
            for (const double value : parameter.to_vector()) result.push_back(value);
        return result;
    }
};

Training gpt2(Device device, double dropout) {
    manual_seed(21);
    auto model = std::make_unique<nn::GPT2>(nn::GPT2Config{
        .vocabulary = 40, .context = 16, .width = 64, .heads = 2, .layers = 2, .dropout = dropout});
    model->to(device);
    auto optimizer = std::make_unique<optim::AdamW>(
        *model, optim::AdamWOptions{.learning_rate = 1e-2, .weight_decay = 0.1});
    return {std::move(model), std::move(optimizer), device, dropout > 0};
}

Training llama(Device device) {
    manual_seed(22);
    auto model = std::make_unique<nn::Llama>(nn::LlamaConfig{
        .vocabulary = 40, .context = 16, .width = 32, .hidden = 48, .heads = 4, .kv_heads = 2, .layers = 3});
    model->to(device);
    model->to(DType::bf16);
    auto optimizer =
        std::make_unique<optim::SGD>(*model, optim::SGDOptions{.learning_rate = 1e-2, .momentum = 0.9});
    return {std::move(model), std::move(optimizer), device, false};
}

/// Runs both at the same time; an exception of either reaches the caller.
void at_once(const std::function<void()>& first, const std::function<void()>& second) {
    std::exception_ptr failures[2];
    const auto caught = [&](int i, const std::function<void()>& body) {
        return std::thread([&failures, &body, i] {
            try {
                body();
            } catch (...) {
                failures[i] = std::current_exception();
            }
        });
    };
    std::thread a = caught(0, first);
    std::thread b = caught(1, second);
    a.join();
    b.join();
    for (const std::exception_ptr& failure : failures)
        if (failure) std::rethrow_exception(failure);
}

}  // namespace

namespace {

/// Trains a GPT-2 and a Llama alone, then both at once, and compares.
void check_two_trainings(Device first, Device second, double dropout) {
    const Numbers gpt2_alone = gpt2(first, dropout).run();
    const Numbers llama_alone = llama(second).run();
    for (int round = 0; round < 3; ++round) {
        const Training a = gpt2(first, dropout);
        const Training b = llama(second);
        Numbers gpt2_beside, llama_beside;
        at_once([&] { gpt2_beside = a.run(); }, [&] { llama_beside = b.run(); });
        CHECK(gpt2_beside == gpt2_alone);
        CHECK(llama_beside == llama_alone);
    }
}

}  // namespace

TEST_CASE("two threads train two models at once on two CPU devices, as each would alone") {
    const Device first = add_cpu_device();
    const Device second = add_cpu_device({.threads = 1});
    check_two_trainings(first, second, 0.1);
    CHECK(memory_statistics(first).peak > 0);
    CHECK(memory_statistics(second).peak > 0);
    CHECK(gpt2(first, 0.1).run() == gpt2(Device::cpu(), 0.1).run());  // the same bits on each of them
}

TEST_CASE("two threads train two models at once on one device, as each would alone") {
    // Without dropout: both would draw from the device's only generator.
    for (const Device device : test::devices()) check_two_trainings(device, device, 0.0);
}
