// Generating text with a model, token by token.

#include <doctest/doctest.h>

#include <cmath>
#include <map>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;

namespace {

nn::GPT2 tiny_gpt2(double dropout = 0.0) {
    manual_seed(2);
    return nn::GPT2(
        {.vocabulary = 30, .context = 12, .width = 16, .heads = 2, .layers = 2, .dropout = dropout});
}

Tensor prompt(std::vector<std::int64_t> ids) {
    const auto count = static_cast<std::int64_t>(ids.size());
    return tensor(ids, {count});
}

using Ids = std::vector<std::int64_t>;
Ids ids_of(const Tensor& tensor) { return tensor.to_vector<std::int64_t>(); }

/// Greedy generation without a cache: the whole text is processed for each token.
Ids greedy_without_cache(nn::LanguageModel& model, Ids text, int count) {
    const NoGrad guard;
    for (int i = 0; i < count; ++i) {
        const Tensor logits = model(prompt(text).unsqueeze(0));
        text.push_back(argmax(logits[0][-1]).item<std::int64_t>());
    }
    return text;
}

}  // namespace

TEST_CASE("generate: temperature 0 takes the likeliest token, as without a cache") {
    nn::GPT2 gpt2 = tiny_gpt2();
    nn::Llama llama(
        {.vocabulary = 30, .context = 12, .width = 16, .hidden = 24, .heads = 4, .kv_heads = 2, .layers = 2});
    // Larger weights than the initial ones, so that the most likely token changes along the text.
    for (nn::Module* model : {static_cast<nn::Module*>(&gpt2), static_cast<nn::Module*>(&llama)}) {
        for (const Tensor& p : model->parameters()) {
            if (p.ndim() == 2) nn::init::normal(p, 0.0, 0.4);
        }
    }
    for (nn::LanguageModel* model :
         {static_cast<nn::LanguageModel*>(&gpt2), static_cast<nn::LanguageModel*>(&llama)}) {
        const Ids expected = greedy_without_cache(*model, {3, 1, 4}, 9);
        CHECK(ids_of(generate(*model, prompt({3, 1, 4}), {.max_tokens = 9, .temperature = 0.0})) == expected);
    }
}

TEST_CASE("generate: the same seed gives the same text, another one another") {
    nn::GPT2 model = tiny_gpt2(0.5);  // dropout is off in generation
    const auto text = [&](std::uint64_t seed, std::int64_t top_k) {
        return ids_of(generate(model, prompt({1, 2}), {.max_tokens = 30, .top_k = top_k, .seed = seed}));
    };
    CHECK(text(1, 0) == text(1, 0));
    CHECK(text(1, 5) == text(1, 5));
    CHECK(text(1, 0) != text(2, 0));
    CHECK(text(1, 0).size() == 32);
    CHECK(model.is_training());
    CHECK(text(1, 1) == ids_of(generate(model, prompt({1, 2}), {.max_tokens = 30, .temperature = 0.0})));
    // The default generator, which training uses, is not changed.
    const RandomKey before = default_generator().state();
    text(3, 0);
    CHECK(default_generator().state().offset == before.offset);
}

TEST_CASE("generate: texts longer than the context, at the prompt and on the way") {
    nn::GPT2 model = tiny_gpt2();
    Ids longer(40, 7);
    const Ids text = ids_of(generate(model, prompt(longer), {.max_tokens = 30, .temperature = 0.0}));
    CHECK(text.size() == 70);
    // The first new token sees the last 12 tokens of the prompt.
    CHECK(text[40] == greedy_without_cache(model, Ids(12, 7), 1).back());
    // When the context is full, generation continues from its last half.
    const Ids kept(text.begin() + 35, text.begin() + 41);
    CHECK(text[41] == greedy_without_cache(model, kept, 1).back());
}

TEST_CASE("generate: tells each token at once and stops when asked") {
    nn::GPT2 model = tiny_gpt2();
    Ids told;
    const Ids text =
        ids_of(generate(model, prompt({5}), {.max_tokens = 20, .on_token = [&](std::int64_t token) {
                                                 told.push_back(token);
                                                 return told.size() < 4;
                                             }}));
    CHECK(told.size() == 4);
    CHECK(text == Ids{5, told[0], told[1], told[2], told[3]});
    CHECK(ids_of(generate(model, prompt({5}), {.max_tokens = 0})) == Ids{5});
}

TEST_CASE("generate: temperature and top-k shape the distribution") {
    Generator generator(1);
    const Tensor logits = tensor({0., std::log(2.0), std::log(5.0), -1e30});
    const auto shares = [&](const GenerateOptions& options) {
        std::map<std::int64_t, double> counts;
        for (int i = 0; i < 4000; ++i) counts[sample_token(logits, options, generator)] += 1.0 / 4000;
        return counts;
    };
    auto plain = shares({});
    CHECK(plain[0] == doctest::Approx(1.0 / 8).epsilon(0.15));
    CHECK(plain[1] == doctest::Approx(2.0 / 8).epsilon(0.15));
    CHECK(plain[2] == doctest::Approx(5.0 / 8).epsilon(0.15));
    CHECK(plain[3] == 0.0);
    auto sharp = shares({.temperature = 0.5});  // squares the ratios
    CHECK(sharp[2] == doctest::Approx(25.0 / 30).epsilon(0.1));
    auto top = shares({.top_k = 2});
    CHECK(top[0] == 0.0);
    CHECK(top[1] == doctest::Approx(2.0 / 7).epsilon(0.15));
    CHECK(shares({.temperature = 1e-30})[2] == doctest::Approx(1.0));
    CHECK(shares({.top_k = 1000})[2] == doctest::Approx(5.0 / 8).epsilon(0.15));
}

TEST_CASE("generate: bad options and prompts are refused") {
    nn::GPT2 model = tiny_gpt2();
    check_error([&] { generate(model, zeros({0}, {DType::i64})); }, {"[generate]", "(0)"});
    check_error([&] { generate(model, zeros({1, 3}, {DType::i64})); }, {"(1, 3)"});
    check_error([&] { generate(model, zeros({3})); }, {"f32"});
    check_error([&] { generate(model, prompt({30})); }, {"30"});
    check_error([&] { generate(model, prompt({1}), {.max_tokens = -1}); }, {"max_tokens is -1"});
    check_error([&] { generate(model, prompt({1}), {.temperature = -1.0}); }, {"temperature is -1"});
    check_error([&] { generate(model, prompt({1}), {.top_k = -1}); }, {"top_k is -1"});
}

TEST_CASE("sampling: logits without a largest number are refused; a tiny temperature takes the likeliest") {
    Generator generator(1);
    for (const double temperature : {0.0, 1.0})
        for (const double bad : {NAN, INFINITY, -INFINITY})
            check_error([&] { sample_token(full({3}, bad), {.temperature = temperature}, generator); },
                        {"[generate] the largest logit is"});
    CHECK(sample_token(tensor({1.0, 3.0, 2.0}), {.temperature = 1e-300}, generator) == 1);
}
