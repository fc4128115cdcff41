// All micro-batches through one block before the next: the training of OneDevice, in constant memory.

#include "nn/train/layered_accumulation.h"

#include <doctest/doctest.h>

#include "core/memory.h"
#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

nn::GPT2 small_gpt(std::int64_t layers = 3, std::int64_t width = 16) {
    manual_seed(11);
    return nn::GPT2(
        {.vocabulary = 19, .context = 8, .width = width, .heads = 2, .layers = layers, .dropout = 0.2});
}

/// Micro-batches of 2, 1 and 3 texts, the second with one label that does not count.
std::vector<data::Batch> batches() {
    Generator generator(3);
    std::vector<data::Batch> made;
    for (const std::int64_t rows : {2, 1, 3}) {
        Tensor labels = randint(0, 19, {rows, 8}, {DType::i64}, &generator);
        if (rows == 1) labels.narrow(1, 0, 3).fill_(-100);
        made.push_back({.inputs = randint(0, 19, {rows, 8}, {DType::i64}, &generator), .targets = labels});
    }
    return made;
}

/// A device that is not the host: the one under test, or a second CPU device.
Device far_device() {
    static const Device second = add_cpu_device();
    return test_device() == Device::cpu() ? second : test_device();
}

/// The losses of some updates and the parameters after them.
struct Outcome {
    std::vector<double> losses, norms;
    std::vector<Tensor> parameters;
};
template <class MakeExecution>
Outcome train(nn::LanguageModel& model, const MakeExecution& make) {
    optim::AdamW optimizer(model, {.learning_rate = 1e-2});
    const std::unique_ptr<Execution> execution = make(optimizer);
    Outcome outcome;
    for (std::int64_t update = 0; update < 3; ++update) {
        const UpdateResult result = execution->update(batches(), {update, 1e-2, 1.0});
        CHECK(result.outcome == UpdateResult::Outcome::applied);
        outcome.losses.push_back(result.loss);
        outcome.norms.push_back(result.gradient_norm);
    }
    data::Loader loader(data::TokenWindows(potluck::zeros({40}, {DType::u8}), 8), {.batch = 3});
    outcome.losses.push_back(*execution->evaluate(loader).mean());
    for (const Tensor& parameter : model.parameters()) {
        CHECK_FALSE(parameter.grad().defined());
        outcome.parameters.push_back(parameter.detach().clone());
    }
    return outcome;
}

void check_same(const Outcome& found, const Outcome& expected, double tolerance) {
    for (std::size_t i = 0; i < expected.losses.size(); ++i)
        CHECK(found.losses[i] == doctest::Approx(expected.losses[i]).epsilon(tolerance));
    for (std::size_t i = 0; i < expected.norms.size(); ++i)
        CHECK(found.norms[i] == doctest::Approx(expected.norms[i]).epsilon(tolerance));
    for (std::size_t i = 0; i < expected.parameters.size(); ++i)
        CHECK(relative_error(found.parameters[i].to(Device::cpu()),
                             expected.parameters[i].to(Device::cpu())) < 100 * tolerance);
}

}  // namespace

TEST_CASE("layered accumulation: losses, norms and parameters of OneDevice, dropout included") {
    on_each_device([] {
        for (const Precision precision : {Precision::f32, Precision::bf16, Precision::f16}) {
            CAPTURE(static_cast<int>(precision));
            const double tolerance = precision == Precision::f32 ? 1e-5 : 1e-3;
            nn::GPT2 plain = small_gpt();
            plain.to(far_device());
            const Outcome expected = train(plain, [&](optim::Optimizer& optimizer) {
                return std::make_unique<OneDevice>(
                    plain, optimizer, LossFunction(),
                    OneDeviceOptions{.precision = precision, .loss_scaler = {.initial = 256}});
            });
            for (const bool inputs : {false, true}) {
                for (const bool parameters : {false, true}) {
                    CAPTURE(inputs);
                    CAPTURE(parameters);
                    nn::GPT2 model = small_gpt();
                    if (!parameters) model.to(far_device());
                    const Outcome found = train(model, [&](optim::Optimizer& optimizer) {
                        return std::make_unique<LayeredAccumulation>(
                            model, optimizer, LossFunction(),
                            LayeredOptions{.precision = precision,
                                           .loss_scaler = {.initial = 256},
                                           .device = far_device(),
                                           .offload_inputs = inputs,
                                           .offload_parameters = parameters});
                    });
                    check_same(found, expected, tolerance);
                    CHECK(model.parameters().front().device() == (parameters ? Device::cpu() : far_device()));
                }
            }
        }
    });
}

TEST_CASE("layered accumulation: a Llama, whose blocks share tables, and a loss with a count of its own") {
    on_each_device([] {
        const LossFunction first_half([](const Tensor& logits, const Tensor& targets) {
            const std::int64_t time = targets.size(1) / 2;
            return LossSum{cross_entropy(logits.narrow(1, 0, time), targets.narrow(1, 0, time),
                                         {.reduction = Reduction::sum}),
                           sum(targets.narrow(1, 0, time) != -100).item<std::int64_t>()};
        });
        const auto make = [] {
            manual_seed(4);
            return nn::Llama(
                {.vocabulary = 19, .context = 8, .width = 16, .hidden = 24, .heads = 2, .layers = 2});
        };
        nn::Llama plain = make();
        plain.to(far_device());
        const Outcome expected = train(plain, [&](optim::Optimizer& optimizer) {
            return std::make_unique<OneDevice>(plain, optimizer,
                                               LossFunction([&](const Tensor& ids, const Tensor& targets) {
                                                   return first_half(plain(ids), targets, 0);
                                               }));
        });
        for (const bool parameters : {false, true}) {
            nn::Llama model = make();
            if (!parameters) model.to(far_device());
            check_same(
                train(model,
                      [&](optim::Optimizer& optimizer) {
                          return std::make_unique<LayeredAccumulation>(
                              model, optimizer, first_half,
                              LayeredOptions{.device = far_device(), .offload_parameters = parameters});
                      }),
                expected, 1e-5);
            CHECK(model.named_buffers().front().tensor.device() ==
                  (parameters ? Device::cpu() : far_device()));
        }
    });
}

TEST_CASE("layered accumulation: the device's memory is the same for 1 and 32 micro-batches") {
    on_each_device([] {
        const auto peak = [](int count) {
            nn::GPT2 model = small_gpt(2, 32);
            model.to(far_device());
            optim::SGD optimizer(model, {.learning_rate = 1e-3});
            LayeredAccumulation execution(model, optimizer, {}, {.offload_inputs = true});
            Generator generator(3);
            std::vector<data::Batch> batches;
            for (int i = 0; i < count; ++i)
                batches.push_back({.inputs = randint(0, 19, {4, 8}, {DType::i64}, &generator),
                                   .targets = randint(0, 19, {4, 8}, {DType::i64}, &generator)});
            reset_peak_memory(far_device());
            (void)execution.update(batches, {0, 1e-3, 0.0});
            return memory_statistics(far_device()).peak;
        };
        const std::int64_t one = peak(1), three = peak(3);
        // A GPU keeps ids and labels until the host has asked whether a kernel met a bad one.
        const std::int64_t kept = far_device().is_cpu() ? 0 : 2 * 4 * 8 * 8;
        CHECK(peak(32) == three + 29 * kept);
        // Beside a GPU the input and the gradient of the next micro-batch are read ahead.
        const std::int64_t ahead = far_device().is_cpu() ? 0 : 2 * 4 * 8 * 32 * 4;
        CHECK(three <= one + ahead + 2 * kept);
    });
}

TEST_CASE("layered accumulation: a model larger than the device's memory trains") {
    const Device small = add_cpu_device({.memory_cap = 400'000});
    nn::GPT2 model = small_gpt(12, 32);  // 12 blocks of 50 kB, with moments 600 kB and more
    std::int64_t bytes = 0;
    for (const Tensor& parameter : model.parameters()) bytes += parameter.bytes();
    REQUIRE(bytes > 500'000);
    optim::AdamW optimizer(model, {.learning_rate = 1e-2});
    LayeredAccumulation execution(model, optimizer, {},
                                  {.device = small, .offload_inputs = true, .offload_parameters = true});
    const std::vector<data::Batch> data = batches();
    double first = 0.0, last = 0.0;
    for (std::int64_t update = 0; update < 10; ++update) {
        last = execution.update(data, {update, 1e-2, 1.0}).loss;
        if (update == 0) first = last;
    }
    CHECK(last < first);
    CHECK(memory_statistics(small).peak <= 400'000);
    check_error([&] { model.to(small); }, {"memory"});
}

TEST_CASE("layered accumulation: what cannot be is refused, and after an exception all is as before") {
    nn::GPT2 model = small_gpt();
    optim::AdamW optimizer(model, {.learning_rate = 1e-2});
    const Device other = far_device();
    check_error([&] { LayeredAccumulation(model, optimizer, {}, {.device = other}); },
                {"[layered_accumulation]", "cpu", "offload_parameters"});
    check_error(
        [&] { LayeredAccumulation(model, optimizer, {}, {.offload_parameters = true, .host = other}); },
        {"[layered_accumulation]", "model.to("});
    for (const LayeredOptions& there_too :
         {LayeredOptions{.offload_parameters = true},
          LayeredOptions{.device = Device::cpu(), .offload_parameters = true}})
        check_error(
            [&] { LayeredAccumulation(model, optimizer, {}, there_too); },
            {"[layered_accumulation]", "offload_parameters keeps the parameters on cpu", ".device = "});

    nn::GPT2 shared = small_gpt();
    shared.transformer.h[1].ln_1 = shared.transformer.h[0].ln_1;
    optim::AdamW of_shared(shared, {.learning_rate = 1e-2});
    check_error(
        [&] { LayeredAccumulation(shared, of_shared, {}, {.device = other, .offload_parameters = true}); },
        {"[layered_accumulation]", "share"});

    LayeredAccumulation execution(model, optimizer, {}, {.device = other, .offload_parameters = true});
    const Tensor before = model.parameters().front().detach().clone();
    std::vector<data::Batch> bad = batches();
    bad[2].targets.fill_(77);
    check_error([&] { (void)execution.update(bad, {0, 1e-2, 1.0}); }, {"77"});
    CHECK(model.parameters().front().device() == Device::cpu());
    CHECK(same(model.parameters().front(), before));
    for (const Tensor& parameter : model.parameters()) CHECK_FALSE(parameter.grad().defined());
    std::vector<data::Batch> none = batches();
    for (data::Batch& batch : none) batch.targets.fill_(-100);
    CHECK(execution.update(none, {0, 1e-2, 1.0}).outcome == UpdateResult::Outcome::no_targets);
    CHECK(execution.update(batches(), {0, 1e-2, 1.0}).outcome == UpdateResult::Outcome::applied);
}

}  // namespace potluck::test
