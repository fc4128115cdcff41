// Stacks that compute a part of themselves again in backward: the same bits for less memory.

#include <doctest/doctest.h>

#include "core/memory.h"
#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

using What = nn::RecomputePolicy::What;

nn::GPT2 gpt(std::int64_t layers = 5, std::int64_t width = 16, std::int64_t context = 8,
             double dropout = 0.1) {
    manual_seed(5);
    nn::GPT2 model({.vocabulary = 23,
                    .context = context,
                    .width = width,
                    .heads = 2,
                    .layers = layers,
                    .dropout = dropout});
    model.to(test_device());
    return model;
}

nn::Llama llama() {
    manual_seed(5);
    nn::Llama model(
        {.vocabulary = 23, .context = 8, .width = 16, .hidden = 40, .heads = 4, .kv_heads = 2, .layers = 3});
    model.to(test_device());
    return model;
}

/// Loss and gradients of one text, by the name of the parameter.
std::pair<double, std::map<std::string, std::vector<double>>> gradients_of(nn::LanguageModel& model,
                                                                           DType precision) {
    manual_seed(9);  // dropout
    Generator generator(3);
    const Tensor ids = randint(0, 23, {3, 8}, {DType::i64}, &generator).to(test_device());
    Tensor loss;
    {
        const Autocast guard(precision);
        loss = model.loss(ids, ids);
    }
    loss.backward();
    std::map<std::string, std::vector<double>> gradients;
    for (const auto& [name, parameter] : model.named_parameters())
        if (parameter.grad().defined()) gradients[name] = parameter.grad().to_vector();
    model.zero_grad();
    return {loss.item(), gradients};
}

template <class Model>
void check_policies(Model model) {
    for (const DType precision : {DType::f32, DType::bf16}) {
        model.set_recompute({});
        const auto expected = gradients_of(model, precision);
        for (const nn::RecomputePolicy& policy :
             {nn::RecomputePolicy{What::attention_and_activation}, nn::RecomputePolicy{What::blocks},
              nn::RecomputePolicy{What::blocks, 2}, nn::RecomputePolicy{What::blocks, 100}}) {
            CAPTURE(static_cast<int>(policy.what));
            CAPTURE(policy.together);
            model.set_recompute(policy);
            CHECK(gradients_of(model, precision) == expected);
        }
    }
}

}  // namespace

TEST_CASE(
    "recompute policy: loss and gradients of a GPT-2 and a Llama have the same bits under every policy") {
    on_each_device([] {
        check_policies(gpt());
        check_policies(llama());
    });
}

TEST_CASE("recompute policy: with frozen embeddings every block still gets its gradients") {
    on_each_device([] {
        nn::GPT2 model = gpt();
        model.transformer.wte.set_requires_grad(false);
        model.transformer.wpe.set_requires_grad(false);
        const auto expected = gradients_of(model, DType::f32);
        CHECK(expected.second.contains("transformer.h.0.attn.c_attn.weight"));
        CHECK_FALSE(expected.second.contains("transformer.wte.weight"));
        model.set_recompute({.what = What::blocks});
        CHECK(gradients_of(model, DType::f32) == expected);
    });
}

TEST_CASE("recompute policy: recomputing every block leaves at most a quarter of what blocks saved") {
    const auto held = [](const nn::RecomputePolicy& policy) {
        nn::GPT2 model = gpt(12, 64, 32, 0.0);
        model.set_recompute(policy);
        const Tensor ids = zeros({4, 32}, {DType::i64});
        const std::int64_t before = memory_statistics(Device::cpu()).current;
        const Tensor features = model.features(ids, nullptr);
        return memory_statistics(Device::cpu()).current - before;
    };
    const std::int64_t all = held({});
    const std::int64_t parts = held({.what = What::attention_and_activation});
    const std::int64_t blocks = held({.what = What::blocks});
    CHECK(parts < all * 8 / 10);
    CHECK(blocks <= all / 4);
    CHECK(held({.what = What::blocks, .together = 4}) < blocks / 2);
}

TEST_CASE("recompute policy: what cannot be is refused") {
    nn::GPT2 model = gpt();
    model.set_recompute({.what = What::blocks});
    const Tensor text = zeros({1, 4}, {DType::i64});
    const Tensor trained = model.loss(text, text);
    model.eval();
    check_error([&] { trained.backward(); }, {"[recompute]", "eval()"});
    model.train();
    check_error([&] { model.set_recompute({.what = What::blocks, .together = 0}); },
                {"[set_recompute]", "0"});
    Tensor loss;
    {
        nn::GPT2 ended = gpt();
        ended.set_recompute({.what = What::blocks});
        const Tensor ids = zeros({1, 4}, {DType::i64});
        loss = ended.loss(ids, ids);
    }
    check_error([&] { loss.backward(); }, {"[recompute]", "ended"});
}

}  // namespace potluck::test
