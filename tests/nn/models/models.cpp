// GPT-2 and Llama: names, shapes, initial values, caches.

#include <doctest/doctest.h>

#include <cmath>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;
using test::relative_error;

namespace {

const nn::GPT2Config tiny_gpt2{.vocabulary = 50, .context = 16, .width = 12, .heads = 3, .layers = 2};
const nn::LlamaConfig tiny_llama{
    .vocabulary = 50, .context = 16, .width = 16, .hidden = 20, .heads = 4, .kv_heads = 2, .layers = 2};

std::map<std::string, Shape> shapes_of(const nn::Module& module) {
    std::map<std::string, Shape> shapes;
    for (const auto& [name, tensor] : module.state_dict()) shapes[name] = tensor.shape();
    return shapes;
}

Tensor random_ids(std::int64_t batch, std::int64_t time) { return randint(0, 50, {batch, time}); }

void check_cache(nn::LanguageModel& model) {
    const NoGrad guard;
    const Tensor ids = random_ids(2, 8);
    const Tensor whole = model(ids);
    CHECK(whole.shape() == Shape{2, 8, 50});
    for (const std::vector<std::int64_t>& chunks :
         {std::vector<std::int64_t>{4, 4}, {3, 5}, {1, 1, 1, 1, 1, 1, 1, 1}, {8}}) {
        nn::KeyValueCache cache = model.make_cache(2);
        std::vector<Tensor> logits;
        for (const std::int64_t time : chunks) {
            logits.push_back(model.forward(ids.narrow(1, cache.length(), time), cache));
        }
        CHECK(cache.length() == 8);
        CHECK(relative_error(cat(logits, 1), whole) < 1e-5);
    }
}

/// The parts of the model give the same result as the whole, also when they are run one by one.
void check_stack(nn::LanguageModel& model, std::int64_t layers) {
    const NoGrad guard;
    const Tensor ids = random_ids(2, 6);
    const Tensor whole = model(ids);
    CHECK(model.layers() == layers);
    Tensor x = model.embed(ids, 0);
    for (std::int64_t i = 0; i < layers; ++i) x = model.layer(i)(x);
    CHECK(test::same(model.head(model.finish(x)), whole));
    CHECK(test::same(model.features(ids, nullptr), model.finish(x)));
    nn::KeyValueCache cache = model.make_cache(2);
    CHECK(test::same(model.forward(ids, cache), whole));
    for (const std::int64_t bad : {std::int64_t{-1}, layers}) {
        check_error([&] { model.layer(bad); }, {"no layer " + std::to_string(bad), std::to_string(layers)});
    }
    // Embedding with a start position equals the embedding of the later tokens.
    const Tensor later = ids.narrow(1, 2, 4);
    nn::KeyValueCache half = model.make_cache(2);
    model.forward(ids.narrow(1, 0, 2), half);
    CHECK(relative_error(model.forward(later, half), whole.narrow(1, 2, 4)) < 1e-5);
}

void check_learns(nn::LanguageModel& model) {
    const Tensor ids = random_ids(4, 9);
    const Tensor inputs = ids.narrow(1, 0, 8), targets = ids.narrow(1, 1, 8);
    optim::AdamW optimizer(model, {.learning_rate = 1e-2});
    const double first = model.loss(inputs, targets).item();
    CHECK(first == doctest::Approx(std::log(50.0)).epsilon(0.05));  // an untrained model
    for (int i = 0; i < 60; ++i) {
        optimizer.zero_grad();
        model.loss(inputs, targets).backward();
        optimizer.step();
    }
    CHECK(model.loss(inputs, targets).item() < 0.3 * first);
}

}  // namespace

TEST_CASE("gpt2: names and shapes are Hugging Face's") {
    const nn::GPT2 model(tiny_gpt2);
    std::map<std::string, Shape> expected = {
        {"transformer.wte.weight", {50, 12}}, {"transformer.wpe.weight", {16, 12}},
        {"transformer.ln_f.weight", {12}},    {"transformer.ln_f.bias", {12}},
        {"lm_head.weight", {50, 12}},
    };
    for (const std::string block : {"transformer.h.0.", "transformer.h.1."}) {
        expected[block + "ln_1.weight"] = expected[block + "ln_1.bias"] = {12};
        expected[block + "ln_2.weight"] = expected[block + "ln_2.bias"] = {12};
        expected[block + "attn.c_attn.weight"] = {12, 36};
        expected[block + "attn.c_attn.bias"] = {36};
        expected[block + "attn.c_proj.weight"] = {12, 12};
        expected[block + "attn.c_proj.bias"] = {12};
        expected[block + "mlp.c_fc.weight"] = {12, 48};
        expected[block + "mlp.c_fc.bias"] = {48};
        expected[block + "mlp.c_proj.weight"] = {48, 12};
        expected[block + "mlp.c_proj.bias"] = {12};
    }
    CHECK(shapes_of(model) == expected);
    CHECK(model.tied_names() ==
          std::map<std::string, std::string>{{"lm_head.weight", "transformer.wte.weight"}});
    CHECK(
        nn::GPT2(
            {.vocabulary = 50, .context = 16, .width = 12, .heads = 3, .layers = 2, .tie_embeddings = false})
            .tied_names()
            .empty());
}

TEST_CASE("gpt2: the published model has 124 million parameters" * doctest::test_suite("long")) {
    const nn::GPT2 model(nn::GPT2Config{});
    CHECK(model.parameter_count() == 124439808);
    // 6 * (all but positions) + 12 * layers * width * time
    CHECK(model.flops_per_token(64) == 6.0 * (124439808 - 1024 * 768) + 12.0 * 12 * 768 * 64);
}

TEST_CASE("gpt2: start values as published") {
    manual_seed(3);
    const nn::GPT2 model({.vocabulary = 500, .context = 64, .width = 64, .heads = 4, .layers = 8});
    for (const auto& [name, tensor] : model.named_parameters()) {
        INFO(name);
        const Tensor values = tensor.detach();
        if (tensor.ndim() >= 2) {
            const double expected = name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(16.0) : 0.02;
            CHECK(stddev(values).item() == doctest::Approx(expected).epsilon(0.05));
            CHECK(std::abs(mean(values).item()) < 0.1 * expected);
        } else {
            const double expected = name.ends_with("weight") ? 1.0 : 0.0;  // weights of norms, and biases
            CHECK(test::same(values, full(values.shape(), expected)));
        }
    }
}

TEST_CASE("gpt2: chunks through a cache equal one pass") {
    nn::GPT2 model(tiny_gpt2);
    check_cache(model);
}

TEST_CASE("gpt2: learns a short text by heart") {
    manual_seed(1);
    nn::GPT2 model(tiny_gpt2);
    check_learns(model);
}

TEST_CASE("gpt2: dropout works while training only") {
    nn::GPT2 model({.vocabulary = 50, .context = 16, .width = 12, .heads = 3, .layers = 2, .dropout = 0.5});
    const NoGrad guard;
    const Tensor ids = random_ids(1, 8);
    CHECK_FALSE(test::same(model(ids), model(ids)));
    model.eval();
    CHECK(test::same(model(ids), model(ids)));
}

TEST_CASE("gpt2: bad sizes and ids are refused") {
    const auto build = [](nn::GPT2Config config) { return [=] { nn::GPT2 model(config); }; };
    check_error(build({.width = 10, .heads = 3}), {"[gpt2]", "10", "3 heads"});
    check_error(build({.width = 12, .heads = 0}), {"[gpt2]", "0 heads"});
    check_error(build({.vocabulary = 0, .width = 12, .heads = 3}), {"vocabulary 0"});
    check_error(build({.width = 12, .heads = 3, .layers = -1}), {"layers -1"});
    check_error(build({.width = 12, .heads = 3, .dropout = 1.5}), {"dropout is 1.5"});
    nn::GPT2 model(tiny_gpt2);
    check_error([&] { model(random_ids(1, 17)); }, {"[gpt2]", "17 tokens", "16"});
    check_error([&] { model(tensor(std::vector<std::int64_t>{1, 2}, {2})); }, {"(2)", "(batch, time)"});
    check_error([&] { model(ones({1, 2})); }, {"f32", "integers"});
    check_error([&] { model(full({1, 2}, 50, {DType::i64})); }, {"50"});
    const NoGrad guard;
    nn::KeyValueCache cache = model.make_cache(1);
    model.forward(random_ids(1, 10), cache);
    check_error([&] { model.forward(random_ids(1, 7), cache); }, {"17 tokens", "16"});
    CHECK(cache.length() == 10);
    check_error([&] { model.forward(random_ids(2, 1), cache); }, {"[key_value_cache]"});
    CHECK(cache.length() == 10);
}

TEST_CASE("llama: names and shapes are Hugging Face's") {
    const nn::Llama model(tiny_llama);
    std::map<std::string, Shape> expected = {
        {"model.embed_tokens.weight", {50, 16}}, {"model.norm.weight", {16}}, {"lm_head.weight", {50, 16}}};
    for (const std::string block : {"model.layers.0.", "model.layers.1."}) {
        expected[block + "self_attn.q_proj.weight"] = {16, 16};
        expected[block + "self_attn.k_proj.weight"] = {8, 16};
        expected[block + "self_attn.v_proj.weight"] = {8, 16};
        expected[block + "self_attn.o_proj.weight"] = {16, 16};
        expected[block + "mlp.gate_proj.weight"] = expected[block + "mlp.up_proj.weight"] = {20, 16};
        expected[block + "mlp.down_proj.weight"] = {16, 20};
        expected[block + "input_layernorm.weight"] =
            expected[block + "post_attention_layernorm.weight"] = {16};
    }
    CHECK(shapes_of(model) == expected);
    CHECK(model.tied_names().empty());
    nn::LlamaConfig tied = tiny_llama;
    tied.tie_embeddings = true;
    CHECK(nn::Llama(tied).parameter_count() == model.parameter_count() - 50 * 16);
    CHECK(model.flops_per_token(8) ==
          6.0 * static_cast<double>(model.parameter_count() - 800) + 12.0 * 2 * 16 * 8);
}

TEST_CASE("llama: chunks through a cache equal one pass") {
    nn::Llama model(tiny_llama);
    check_cache(model);
}

TEST_CASE("llama: learns a short text by heart") {
    manual_seed(1);
    nn::Llama model(tiny_llama);
    check_learns(model);
}

TEST_CASE("llama: bad sizes are refused") {
    const auto build = [](nn::LlamaConfig config) { return [=] { nn::Llama model(config); }; };
    check_error(build({.width = 12, .heads = 3, .kv_heads = 2}), {"[llama]", "3 heads", "2 key"});
    check_error(build({.width = 66, .heads = 33, .kv_heads = 2}), {"33 heads", "2 key"});
    check_error(build({.width = 12, .heads = 4}), {"12", "4 heads of 3", "even"});
    check_error(build({.width = 8, .hidden = 0, .heads = 2}), {"hidden 0"});
}

TEST_CASE("models: copies share, clones do not") {
    nn::GPT2 model(tiny_gpt2);
    nn::GPT2 copy = model;
    nn::GPT2 twin = nn::clone(model);
    CHECK(copy.lm_head.weight.is_same(model.transformer.wte.weight));
    CHECK(twin.lm_head.weight.is_same(twin.transformer.wte.weight));
    CHECK_FALSE(twin.lm_head.weight.is_same(model.lm_head.weight));
    const NoGrad guard;
    const Tensor ids = random_ids(1, 5);
    CHECK(test::same(twin(ids), model(ids)));
}

TEST_CASE("language models: a stack says so") {
    nn::GPT2 gpt2(tiny_gpt2);
    check_stack(gpt2, 2);
    nn::Llama llama(tiny_llama);
    check_stack(llama, 2);
    CHECK(llama.layer(0).kv_heads() == 2);
    CHECK(llama.layer(0).head_size() == 4);
    CHECK(gpt2.layer(1).kv_heads() == 3);
}

TEST_CASE("language models: a layer with a share of the heads is the same code") {
    const NoGrad guard;
    const auto rows = [](const Tensor& x, std::int64_t first, std::int64_t count) {
        return x.narrow(0, first, count).contiguous();
    };
    const auto columns = [](const Tensor& x, std::int64_t first, std::int64_t count) {
        return x.narrow(1, first, count).contiguous();
    };
    // Heads 0 and 1 of Llama's four with the first of two key-value heads, and the rest: the results of the shares,
    // added, equal the result of the whole.
    nn::Llama llama(tiny_llama);
    nn::LlamaBlock& block = llama.model.layers[0];
    const Tensor x = randn({2, 5, 16});
    Tensor sum_of_attention = zeros({2, 5, 16}), sum_of_mlp = zeros({2, 5, 16});
    for (const std::int64_t share : {0, 1}) {
        nn::LlamaBlock part = nn::clone(block);
        nn::Attention& a = part.self_attn;
        a.q_proj.weight = rows(a.q_proj.weight, share * 8, 8);
        a.k_proj.weight = rows(a.k_proj.weight, share * 4, 4);
        a.v_proj.weight = rows(a.v_proj.weight, share * 4, 4);
        a.o_proj.weight = columns(a.o_proj.weight, share * 8, 8);
        CHECK(a.heads() == 2);
        CHECK(part.kv_heads() == 1);
        sum_of_attention = sum_of_attention + a(x);
        nn::KeyValueCache cache(1, 2, part.kv_heads(), 8, part.head_size());
        CHECK(test::same(a.forward(x, &cache, 0), a(x)));
        part.mlp.gate_proj.weight = rows(part.mlp.gate_proj.weight, share * 10, 10);
        part.mlp.up_proj.weight = rows(part.mlp.up_proj.weight, share * 10, 10);
        part.mlp.down_proj.weight = columns(part.mlp.down_proj.weight, share * 10, 10);
        sum_of_mlp = sum_of_mlp + part.mlp(x);
    }
    CHECK(relative_error(sum_of_attention, block.self_attn(x)) < 1e-5);
    CHECK(relative_error(sum_of_mlp, block.mlp(x)) < 1e-5);

    // One and two of GPT-2's three heads.
    nn::GPT2 gpt2(tiny_gpt2);
    nn::GPT2Block& layer = gpt2.transformer.h[0];
    const Tensor y = randn({2, 5, 12});
    Tensor sum_of_parts = zeros({2, 5, 12});
    for (const auto& [first, heads] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 2}}) {
        nn::GPT2Attention part = nn::clone(layer.attn);
        const Tensor weight = part.c_attn.weight, bias = part.c_attn.bias;
        std::vector<Tensor> weights, biases;
        for (const std::int64_t third : {0, 1, 2}) {
            weights.push_back(columns(weight, 12 * third + 4 * first, 4 * heads));
            biases.push_back(rows(bias, 12 * third + 4 * first, 4 * heads));
        }
        part.c_attn.weight = cat(weights, 1);
        part.c_attn.bias = cat(biases, 0);
        part.c_proj.weight = rows(part.c_proj.weight, 4 * first, 4 * heads);
        CHECK(part.heads() == heads);
        sum_of_parts = sum_of_parts + part(y) - part.c_proj.bias;
    }
    CHECK(relative_error(sum_of_parts + layer.attn.c_proj.bias, layer.attn(y)) < 1e-5);
}
