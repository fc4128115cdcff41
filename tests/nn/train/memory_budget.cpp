// The memory of an update, predicted from two small micro-batches and measured.

#include "nn/train/memory_budget.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "core/memory.h"
#include "potluck.h"
#include "tests/nn/support.h"

namespace potluck::test {
namespace {

using What = nn::RecomputePolicy::What;

/// A CPU device of its own: nobody else's tensors move its peak.
Device device_of_test() {
    static const Device device = add_cpu_device();
    return device;
}

nn::GPT2 gpt(std::int64_t layers = 4, double dropout = 0.0) {
    manual_seed(5);
    nn::GPT2 model(
        {.vocabulary = 256, .context = 64, .width = 64, .heads = 4, .layers = layers, .dropout = dropout});
    model.to(device_of_test());
    return model;
}

nn::Llama llama() {
    manual_seed(5);
    nn::Llama model({.vocabulary = 256,
                     .context = 64,
                     .width = 64,
                     .hidden = 160,
                     .heads = 4,
                     .kv_heads = 2,
                     .layers = 4});
    model.to(device_of_test());
    return model;
}

/// The convolutional net of examples/5_convolution.cpp.
struct ConvolutionalNet : nn::Module {
    nn::Conv2d first{1, 12, 3, {.padding = 1}}, second{12, 24, 3, {.padding = 1}};
    nn::BatchNorm first_norm{12}, second_norm{24};
    nn::Linear head{96, 10};

    void members(nn::Members& m) override {
        m("first", first)("first_norm", first_norm)("second", second)("second_norm", second_norm)("head",
                                                                                                  head);
    }
    Tensor forward(const Tensor& pixels) override {
        Tensor x = pixels.reshape({-1, 1, 8, 8});
        x = max_pool2d(relu(first_norm(first(x))), 2);
        x = max_pool2d(relu(second_norm(second(x))), 2);
        return head(flatten(x, 1));
    }
    Tensor loss(const Tensor& inputs, const Tensor& targets) override {
        return cross_entropy((*this)(inputs), targets);
    }
};

data::Batch texts(std::int64_t items, std::int64_t time = 64) {
    const TensorOptions options{DType::i64, device_of_test()};
    return {.inputs = randint(0, 256, {items, time}, options),
            .targets = randint(0, 256, {items, time}, options)};
}
data::Batch images(std::int64_t items) {
    return {.inputs = randn({items, 64}, {DType::f32, device_of_test()}),
            .targets = randint(0, 10, {items}, {DType::i64, device_of_test()})};
}

/// The peak of two real updates, the second with the optimizer's state from the start.
template <class MakeBatch>
std::int64_t measured_peak(nn::Module& module, optim::Optimizer& optimizer, const MakeBatch& make_batch,
                           std::int64_t items, const BudgetOptions& options) {
    OneDevice execution(module, optimizer, {},
                        {.precision = options.precision, .loss_scaler = {.initial = 16.0}});
    std::vector<data::Batch> batches;
    for (std::int64_t i = 0; i < options.accumulate; ++i) batches.push_back(make_batch(items));
    reset_peak_memory(device_of_test());
    for (std::int64_t number = 0; number < 2; ++number)
        CHECK(execution.update(batches, {number, 1e-3, 1.0}).outcome == UpdateResult::Outcome::applied);
    return memory_statistics(device_of_test()).peak;
}

template <class MakeBatch>
void check_prediction(nn::Module& module, const MakeBatch& make_batch, const BudgetOptions& options,
                      const std::vector<std::int64_t>& sizes = {1, 2, 5, 16}) {
    optim::AdamW optimizer(module);
    const MemoryBudget budget(module, optimizer, make_batch(2), options);
    for (const std::int64_t items : sizes) {
        CAPTURE(items);
        const std::int64_t predicted = budget.at(items).peak();
        const std::int64_t measured = measured_peak(module, optimizer, make_batch, items, options);
        INFO(to_table(budget.at(items), measured));
        CHECK(std::abs(static_cast<double>(predicted - measured)) < 0.05 * static_cast<double>(measured));
    }
}

}  // namespace

TEST_CASE(
    "memory budget: the peak of GPT-2 is predicted within 5 %, in each precision, whatever is recomputed") {
    nn::GPT2 model = gpt();
    for (const Precision precision : {Precision::f32, Precision::bf16}) {
        for (const nn::RecomputePolicy& policy :
             {nn::RecomputePolicy{}, {What::attention_and_activation}, {What::blocks}, {What::blocks, 2}}) {
            CAPTURE(name_of(dtype_of(precision)));
            CAPTURE(name_of(policy));
            model.set_recompute(policy);
            check_prediction(model, [](std::int64_t items) { return texts(items); },
                             {.precision = precision});
        }
    }
    model.set_recompute({});
    check_prediction(model, [](std::int64_t items) { return texts(items); }, {.accumulate = 3}, {1, 4});
    check_prediction(model, [](std::int64_t items) { return texts(items); },
                     {.precision = Precision::f16, .accumulate = 2}, {4});
}

TEST_CASE("memory budget: the peak of GPT-2 with half parameters, dropout, and few activations") {
    nn::GPT2 half = gpt(2, 0.1);
    half.to(DType::bf16);
    check_prediction(half, [](std::int64_t items) { return texts(items); }, {});
    nn::GPT2 wide = gpt(6);
    check_prediction(wide, [](std::int64_t items) { return texts(items, 4); }, {}, {1, 3, 40});
}

TEST_CASE("memory budget: the peak of Llama and of a convolutional net is predicted within 5 %") {
    nn::Llama model = llama();
    for (const Precision precision : {Precision::f32, Precision::bf16})
        for (const nn::RecomputePolicy& policy :
             {nn::RecomputePolicy{}, {What::attention_and_activation}, {What::blocks}}) {
            model.set_recompute(policy);
            check_prediction(model, [](std::int64_t items) { return texts(items); }, {.precision = precision},
                             {1, 3, 16});
        }
    manual_seed(5);
    ConvolutionalNet net;
    net.to(device_of_test());
    for (const Precision precision : {Precision::f32, Precision::bf16})
        check_prediction(net, images, {.precision = precision}, {1, 3, 16, 64});
}

TEST_CASE(
    "memory budget: measuring leaves parameters, buffers, generators, modes and peak as they were, and no "
    "gradients") {
    manual_seed(5);
    ConvolutionalNet net;
    nn::GPT2 model = gpt(2, 0.1);
    net.to(device_of_test());
    net.second_norm.eval();
    optim::AdamW net_optimizer(net), optimizer(model);
    const data::Batch image = images(3), text = texts(1);
    const Tensor mean_before = net.first_norm.running_mean.clone();
    const Tensor weight_before = model.parameters().front().detach().clone();
    manual_seed(77);
    const Tensor drawn = randn({4}, {DType::f32, device_of_test()});
    manual_seed(77);
    reset_peak_memory(device_of_test());
    const std::int64_t current = memory_statistics(device_of_test()).current;
    {
        const MemoryBudget of_net(net, net_optimizer, image),
            of_model(model, optimizer, text, {.accumulate = 2});
        CHECK(of_model.largest_batch(50'000'000, 8) == 8);
    }
    CHECK(memory_statistics(device_of_test()).peak == current);
    CHECK(memory_statistics(device_of_test()).current == current);
    CHECK(randn({4}, {DType::f32, device_of_test()}).to_vector<double>() == drawn.to_vector<double>());
    CHECK(net.first_norm.running_mean.to_vector<double>() == mean_before.to_vector<double>());
    CHECK(net.first_norm.num_batches_tracked.item<std::int64_t>() == 0);
    CHECK(net.is_training());
    CHECK_FALSE(net.second_norm.is_training());
    CHECK(model.parameters().front().to_vector<double>() == weight_before.to_vector<double>());
    for (const Tensor& parameter : model.parameters()) CHECK_FALSE(parameter.grad().defined());
    CHECK(optimizer.steps() == 0);
}

TEST_CASE("memory budget: the largest batch fits under a cap of the budget, and one more does not") {
    nn::GPT2 model = gpt();
    optim::AdamW optimizer(model);
    for (const std::int64_t spare : {3'000'000, 11'000'000, 29'000'000}) {
        std::int64_t fits = 0, budget_bytes = 0;
        {
            const MemoryBudget budget(model, optimizer, texts(1));
            budget_bytes = budget.at(1).peak() + spare;
            fits = budget.largest_batch(budget_bytes);
        }
        CAPTURE(fits);
        REQUIRE(fits >= 1);
        const auto update_fits = [&](std::int64_t items) {
            OneDevice execution(model, optimizer);
            const std::vector<data::Batch> batches = {texts(items)};
            const UpdateRequest request{0, 1e-3, 1.0};
            execution.update(batches, request);  // makes the optimizer's state
            set_memory_cap(budget_bytes, device_of_test());
            bool done = true;
            try {
                execution.update(batches, request);
            } catch (const OutOfMemory&) {
                done = false;
            }
            set_memory_cap(0, device_of_test());
            return done;
        };
        CHECK(update_fits(fits));
        CHECK_FALSE(update_fits(fits + 1));
    }
}

TEST_CASE("memory budget: the optimizer's state is known before the first update") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        nn::GPT2 model = gpt(2);
        model.to(dtype);
        optim::AdamW adamw(model);
        optim::SGD sgd(model, {.momentum = 0.9});
        optim::SGD plain(model);
        const std::int64_t count = model.parameter_count(), master = dtype == DType::f32 ? 0 : 4 * count;
        CHECK(adamw.state_bytes() == 8 * count + master);
        CHECK(sgd.state_bytes() == 4 * count + master);
        CHECK(plain.state_bytes() == master);
        model.loss(texts(1).inputs, texts(1).targets).backward();
        adamw.step();
        std::int64_t held = 0;
        for (const auto& [name, tensor] : adamw.state_dict())
            if (tensor.ndim() > 0 && !name.starts_with("steps")) held += tensor.bytes();
        CHECK(adamw.state_bytes() == held);
    }
}

TEST_CASE("memory budget: a shortfall says by how much and what fits") {
    nn::GPT2 model = gpt();
    optim::AdamW optimizer(model);
    const MemoryBudget budget(model, optimizer, texts(1));
    const std::int64_t four = budget.at(4).peak();
    CHECK(budget.shortfall(4, four).empty());
    const std::string some = budget.shortfall(8, four + 1000);
    CAPTURE(some);
    CHECK(contains(some, "Micro-batches of 4 fit"));
    CHECK(contains(some, "more than the budget"));
    CHECK(contains(budget.shortfall(8, 1000), "Not even 1 item fits"));
    CHECK(contains(to_table(budget.at(4), four * 2), "+100.0 %"));
    CHECK(contains(to_table(budget.at(4)), "predicted peak"));
}

TEST_CASE("memory budget: numbers that no machine has give no nonsense") {
    constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
    nn::GPT2 model = gpt(1);
    optim::AdamW optimizer(model);
    const data::Batch sample = texts(2);
    const MemoryBudget budget(model, optimizer, sample);
    const std::int64_t four = budget.at(4).peak();
    for (const std::int64_t most : {std::int64_t{1} << 40, largest - 1, largest})
        CHECK(budget.largest_batch(four, most) == 4);
    std::int64_t peak = four;
    for (std::int64_t items = 8; items < largest / 2; items *= 2) {
        CHECK(budget.at(items).peak() >= peak);
        peak = budget.at(items).peak();
    }
    CHECK(budget.at(largest).peak() >= peak);
    CHECK(contains(budget.shortfall(largest, four), "Micro-batches of 4 fit"));
    CHECK(budget.largest_batch(largest, 2) == 2);
    for (const bool accumulate : {false, true}) {
        const MemoryBudget many(
            model, optimizer, sample,
            {.accumulate = accumulate ? largest : 1, .read_ahead = accumulate ? 0 : largest});
        CHECK(many.at(4).batches > std::int64_t{1} << 50);
        CHECK(contains(many.shortfall(1, largest / 1000), "Not even 1 item fits"));
        CHECK(contains(
            error_of([&] { choose_recompute(model, optimizer, sample, 0, {.read_ahead = largest}); }),
            "more than the budget"));
    }
}

TEST_CASE("memory budget: recomputation is chosen by the budget, as little as suffices") {
    nn::GPT2 model = gpt(48);  // so deep that what is kept between the blocks counts
    optim::AdamW optimizer(model);
    const data::Batch sample = texts(32);
    std::vector<std::int64_t> peaks;
    for (const nn::RecomputePolicy& policy :
         {nn::RecomputePolicy{}, {What::attention_and_activation}, {What::blocks}, {What::blocks, 2}}) {
        model.set_recompute(policy);
        peaks.push_back(MemoryBudget(model, optimizer, sample).at(32).peak());
        if (peaks.size() > 1) CHECK(peaks.back() < peaks[peaks.size() - 2]);
        // Just enough for this one, and too little for those before.
        CHECK(name_of(choose_recompute(model, optimizer, sample, peaks.back() + 10'000)) == name_of(policy));
        CHECK(name_of(model.recompute_policy()) == name_of(policy));
    }
    model.set_recompute({What::attention_and_activation});
    const std::string refused = error_of([&] { choose_recompute(model, optimizer, sample, 2'000'000); });
    CAPTURE(refused);
    CHECK(contains(refused, "more than the budget of 2.00 MB"));
    CHECK(contains(refused, "LayeredAccumulation"));
    CHECK(name_of(model.recompute_policy()) == "parts");
    CHECK(contains(what_needs_less(model, optimizer, sample, peaks[2] + 10'000), "(blocks)"));
    CHECK(contains(what_needs_less(model, optimizer, sample, 1000), "does not suffice"));
    CHECK(name_of(parse_recompute("blocks:3")) == "blocks:3");
    for (const char* text : {"", "block", "blocks:", "blocks:0", "blocks:-1", "blocks:2x", "auto"})
        CHECK_THROWS_AS(parse_recompute(text), Error);
}

TEST_CASE("memory budget: what cannot be is refused") {
    nn::GPT2 model = gpt(1);
    optim::AdamW optimizer(model);
    const data::Batch sample = texts(2);
    const MemoryBudget budget(model, optimizer, sample);
    CHECK(contains(error_of([&] { budget.largest_batch(-1); }), "-1 bytes"));
    CHECK(contains(error_of([&] { budget.shortfall(1, -1); }), "-1 bytes"));
    CHECK(contains(error_of([&] { choose_recompute(model, optimizer, sample, -1); }), "-1 bytes"));
    CHECK(contains(error_of([&] { budget.at(0); }), "at least 1"));
    CHECK(contains(error_of([&] { budget.largest_batch(1000, 0); }), "at least 1"));
    CHECK(budget.largest_batch(0) == 0);
    const auto refusal = [&](const data::Batch& batch, const BudgetOptions& options = {}) {
        return error_of([&] { const MemoryBudget made(model, optimizer, batch, options); });
    };
    CHECK(contains(refusal({}), "is empty"));
    CHECK(contains(refusal({.inputs = zeros({0, 8}, {DType::i64})}), "is empty"));
    CHECK(contains(refusal({.inputs = sample.inputs, .targets = full({2, 64}, -100, {DType::i64})}),
                   "no target"));
    CHECK(contains(refusal({.inputs = sample.inputs, .targets = zeros({3, 64}, {DType::i64})}),
                   "row for each"));
    CHECK_FALSE(refusal({.inputs = sample.inputs}).empty());  // the loss needs targets
    CHECK(contains(refusal(sample, {.accumulate = 0}), "accumulate is 0"));
    CHECK(contains(refusal(sample, {.read_ahead = -1}), "read_ahead is -1"));
}

TEST_CASE("memory budget: a training that runs out of memory names the largest micro-batch that fits") {
    nn::GPT2 model = gpt();
    optim::AdamW optimizer(model);
    const Tensor text = randint(0, 256, {2000}).to(DType::u8);
    const auto train = [&](std::int64_t batch) {
        data::Loader loader(data::TokenWindows(text, 64), {.batch = batch});
        Trainer(model, optimizer, loader, {.steps = 2, .quiet = true}).fit();
    };
    train(1);  // makes the optimizer's state
    std::int64_t bytes = 0, fits = 0;
    {
        const MemoryBudget budget(model, optimizer, texts(1));
        bytes = budget.at(6).peak() + 100'000;
        fits = budget.largest_batch(bytes);
    }
    set_memory_cap(bytes, device_of_test());
    const std::string failure = error_of([&] { train(20); });
    CAPTURE(failure);
    CHECK(contains(failure, "out of memory"));
    CHECK(contains(failure, "micro-batches of 20 items"));
    CHECK(contains(failure, "the largest that fits is " + std::to_string(fits)));
    CHECK_NOTHROW(train(fits));
    set_memory_cap(memory_statistics(device_of_test()).current + 1000, device_of_test());
    CHECK(contains(error_of([&] { train(2); }), "not even 1 item fits"));
    set_memory_cap(0, device_of_test());
}

TEST_CASE("memory budget: a model and data on different devices are named with the call that mends it") {
    nn::GPT2 model = gpt(1);
    const std::string there = name_of(device_of_test());
    const std::string failure = error_of([&] { linear(ones({1, 64}), model.transformer.wte.weight); });
    CAPTURE(failure);
    CHECK(contains(failure, "the parameter f32 (256, 64) is on " + there));
    CHECK(contains(failure, "f32 (1, 64), which comes to it, on cpu"));
    CHECK(contains(failure, "data.to(parse_device(\"" + there + "\"))"));
    CHECK(contains(failure, "model.to(parse_device(\"cpu\"))"));
    const std::string plain = error_of([&] { zeros({2}) + zeros({2}, {DType::f32, device_of_test()}); });
    CHECK(contains(plain, "f32 (2) is on cpu and f32 (2) on " + there));
}

TEST_CASE("memory limit: what is held and what the system has, never more than the cap") {
    const Device device = device_of_test();
    CHECK(memory_limit(device) > memory_statistics(device).current);
    set_memory_cap(1'000'000'000, device);
    CHECK(memory_limit(device) == 1'000'000'000);
    set_memory_cap(0, device);
}

}  // namespace potluck::test
