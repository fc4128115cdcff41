// Attention layers, grouped-query attention and the key-value cache.

#include <doctest/doctest.h>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;
using test::relative_error;

namespace {

nn::Attention make_attention(std::int64_t kv_heads, bool rotary) {
    nn::AttentionConfig config{.width = 32, .heads = 4, .kv_heads = kv_heads, .causal = true};
    if (rotary) {
        auto [cosine, sine] = rotary_tables(16, 8);
        config.rotary = {cosine, sine};
    }
    return nn::Attention(config);
}

}  // namespace

TEST_CASE("attention: heads are split and merged without mixing") {
    const Tensor x = randn({2, 5, 12});
    const Tensor heads = nn::split_heads(x, 3);
    CHECK(heads.shape() == Shape{2, 3, 5, 4});
    CHECK(heads[1][2][4][3].item() == x[1][4][11].item());
    CHECK(test::same(nn::merge_heads(heads), x));
}

TEST_CASE("attention: grouped heads equal full heads with repeated keys and values") {
    nn::Attention grouped = make_attention(2, false), full = make_attention(4, false);
    nn::StateDict state = grouped.state_dict();
    for (const char* name : {"k_proj.weight", "v_proj.weight"}) {
        const Tensor heads = state[name].detach().reshape({2, 8, 32});
        state[name] = stack({heads[0], heads[0], heads[1], heads[1]}).reshape({32, 32});
    }
    full.load_state_dict(state);
    const Tensor x = randn({2, 7, 32});
    CHECK(relative_error(grouped(x), full(x)) < 1e-6);
}

TEST_CASE("attention: a token sees the whole text, as in the op, unless it is told to be causal") {
    nn::Attention causal = make_attention(4, true);
    Tensor x = randn({1, 6, 32});
    const Tensor before = causal(x);
    Tensor changed = x.clone();
    changed.narrow(1, 4, 1).fill_(3.0);
    const Tensor after = causal(changed);
    CHECK(test::same(after.narrow(1, 0, 4).contiguous(), before.narrow(1, 0, 4).contiguous()));
    CHECK(relative_error(after.narrow(1, 4, 2), before.narrow(1, 4, 2)) > 1e-3);
    nn::Attention open(nn::AttentionConfig{.width = 32, .heads = 4});
    CHECK(relative_error(open(changed).narrow(1, 0, 4), open(x).narrow(1, 0, 4)) > 1e-3);
}

TEST_CASE("attention: chunks through a cache equal one pass") {
    const NoGrad guard;
    for (const bool rotary : {false, true}) {
        nn::Attention attention = make_attention(2, rotary);
        const Tensor x = randn({3, 8, 32});
        const Tensor whole = attention(x);
        for (const std::vector<std::int64_t>& chunks :
             {std::vector<std::int64_t>{4, 4}, {3, 5}, {1, 1, 1, 1, 1, 1, 1, 1}, {8}}) {
            nn::KeyValueCache cache(1, 3, 2, 8, 8);
            std::vector<Tensor> outputs;
            for (const std::int64_t time : chunks) {
                outputs.push_back(attention.forward(x.narrow(1, cache.length(), time), &cache, 0));
                cache.advance(time);
            }
            CHECK(relative_error(cat(outputs, 1), whole) < 1e-5);
        }
    }
}

TEST_CASE("attention: the cache refuses what does not belong in it") {
    nn::KeyValueCache cache(2, 1, 2, 4, 8);
    const Tensor fits = zeros({1, 2, 3, 8});
    check_error([&] { cache.append(0, fits, fits); }, {"[key_value_cache]", "NoGrad"});
    check_error([] { nn::KeyValueCache(-1, 1, 2, 4, 8); }, {"[key_value_cache] -1 layers"});
    check_error([] { nn::KeyValueCache(1, 1, 2, 4, 8, {DType::i64}); }, {"[key_value_cache]", "i64"});
    check_error([&] { nn::split_heads(fits[0], 0); }, {"[split_heads] 0 heads"});
    check_error([&] { nn::split_heads(fits[0], 3); }, {"[split_heads]", "8", "3"});
    const NoGrad guard;
    check_error([&] { cache.append(2, fits, fits); }, {"layer 2"});
    check_error([&] { cache.append(0, zeros({2, 2, 3, 8}), fits); }, {"(2, 2, 3, 8)", "(1, 2, 4, 8)"});
    cache.append(0, fits, fits);
    cache.advance(3);
    check_error([&] { cache.append(0, fits, fits); }, {"3 tokens after 3", "4"});
    cache.clear();
    cache.append(0, fits, fits);
}

TEST_CASE("attention: heads that do not divide are refused when the layer is built, with both numbers") {
    const auto build = [](std::int64_t heads, std::int64_t kv_heads) {
        return
            [=] { nn::Attention(nn::AttentionConfig{.width = 132, .heads = heads, .kv_heads = kv_heads}); };
    };
    check_error(build(3, 2), {"[attention]", "3 heads", "2 key"});
    check_error(build(33, 2), {"33 heads", "2 key"});
    check_error(build(2, 4), {"2 heads", "4 key"});
    check_error(build(4, 0), {"4 heads", "0 key"});
    check_error(build(5, 5), {"132", "5 heads"});
    check_error([] { nn::Attention(nn::AttentionConfig{.width = 8, .heads = 2, .dropout = 2.0}); },
                {"dropout", "2"});
    const auto [cosine, sine] = rotary_tables(16, 8);
    const nn::RotaryTable table{cosine, sine};
    check_error([&] { nn::Attention(nn::AttentionConfig{.width = 8, .heads = 2, .rotary = table}); },
                {"heads of 8", "have 4"});
    nn::Attention attention = make_attention(4, true);
    check_error([&] { attention(ones({1, 2, 31})); }, {"(1, 2, 31)", "32"});
    check_error([&] { attention(ones({1, 17, 32})); }, {"17"});
}

TEST_CASE("attention: rotary tables are shared, no parameters, and keep f32") {
    nn::Llama model({.vocabulary = 7, .context = 8, .width = 8, .hidden = 8, .heads = 2, .layers = 2});
    model.to(DType::bf16);
    CHECK_FALSE(model.state_dict().contains("model.layers.0.self_attn.rotary.cosine"));
    const NoGrad guard;
    const Tensor logits = model(zeros({1, 4}, {DType::i64}));
    CHECK(logits.dtype() == DType::bf16);
}
