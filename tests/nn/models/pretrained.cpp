// Weights in the layout of Hugging Face's published files.

#include "nn/models/pretrained.h"

#include <doctest/doctest.h>

#include <functional>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::check_error;
using test::same;

namespace {

const nn::GPT2Config gpt2_config{.vocabulary = 40, .context = 8, .width = 12, .heads = 3, .layers = 2};
const nn::LlamaConfig llama_config{
    .vocabulary = 40, .context = 8, .width = 16, .hidden = 20, .heads = 4, .kv_heads = 2, .layers = 2};

/// The weights of a model under the names that `rename` returns; an empty name omits the tensor.
TensorFile renamed(const nn::Module& model, const std::function<std::string(const std::string&)>& rename) {
    TensorFile file{{}, {{"format", "pt"}}};
    for (const auto& [name, tensor] : model.state_dict())
        if (const std::string other = rename(name); !other.empty()) file.tensors[other] = tensor;
    return file;
}

/// As in `gpt2`: without "transformer." and the head, but with a mask for every layer.
TensorFile published_gpt2(const nn::GPT2& model, bool masked_bias) {
    TensorFile file = renamed(model, [](const std::string& name) {
        return name == "lm_head.weight" ? "" : name.substr(std::string("transformer.").size());
    });
    for (const std::string layer : {"h.0.", "h.1."}) {
        file.tensors[layer + "attn.bias"] = ones({1, 1, 8, 8});
        if (masked_bias) file.tensors[layer + "attn.masked_bias"] = tensor(-1e4);
    }
    return file;
}

Tensor logits_of(nn::LanguageModel& model) {
    const NoGrad guard;
    return model(arange(0, 16).reshape({2, 8}));
}

}  // namespace

TEST_CASE("pretrained: GPT-2 as published gives the logits of our own file of the same weights") {
    const test::TemporaryFolder folder;
    test::on_each_device([&] {
        manual_seed(5);
        nn::GPT2 source(gpt2_config);
        save(source, folder / "own.safetensors");
        nn::GPT2Config untied = gpt2_config;
        untied.tie_embeddings = false;
        for (const bool masked_bias : {false, true}) {
            const TensorFile file = published_gpt2(source, masked_bias);
            CHECK_FALSE(file.tensors.contains("lm_head.weight"));
            CHECK(file.tensors.contains("wte.weight"));
            save_safetensors(folder / "published.safetensors", file);
            for (const nn::GPT2Config& config : {gpt2_config, untied}) {
                nn::GPT2 own(config), published(config);
                own.to(test::test_device());
                published.to(test::test_device());
                load(own, folder / "own.safetensors");
                const nn::LoadReport report =
                    nn::load_pretrained(published, folder / "published.safetensors");
                CHECK(report.missing.empty());
                CHECK(report.unexpected ==
                      (masked_bias ? std::vector<std::string>{"h.0.attn.bias", "h.0.attn.masked_bias",
                                                              "h.1.attn.bias", "h.1.attn.masked_bias"}
                                   : std::vector<std::string>{"h.0.attn.bias", "h.1.attn.bias"}));
                CHECK(same(logits_of(published), logits_of(own)));
                CHECK(published.lm_head.weight.is_same(published.transformer.wte.weight) ==
                      config.tie_embeddings);
            }
        }
        // Files that were saved with their output layer have the prefix, the head, and masks too.
        TensorFile whole{source.state_dict(), {}};
        whole.tensors["transformer.h.0.attn.bias"] = ones({1, 1, 8, 8}, {DType::u8});
        save_safetensors(folder / "whole.safetensors", whole);
        nn::GPT2 other(gpt2_config);
        CHECK(nn::load_pretrained(other, folder / "whole.safetensors").unexpected ==
              std::vector<std::string>{"transformer.h.0.attn.bias"});
        CHECK(same(logits_of(other), logits_of(source)));
    });
}

TEST_CASE("pretrained: Llama with and without its prefix, its head and old tables") {
    const test::TemporaryFolder folder;
    manual_seed(6);
    nn::LlamaConfig tied = llama_config;
    tied.tie_embeddings = true;
    for (const nn::LlamaConfig& config : {llama_config, tied}) {
        nn::Llama source(config);
        for (const bool prefix : {true, false}) {
            TensorFile file = renamed(source, [&](const std::string& name) {
                if (name == "lm_head.weight") return config.tie_embeddings ? std::string() : name;
                return prefix ? name : name.substr(std::string("model.").size());
            });
            const std::string table =
                (prefix ? "model." : "") + std::string("layers.0.self_attn.rotary_emb.inv_freq");
            file.tensors[table] = ones({2});
            save_safetensors(folder / "llama.safetensors", file);
            nn::Llama model(config);
            CHECK(nn::load_pretrained(model, folder / "llama.safetensors").unexpected ==
                  std::vector<std::string>{table});
            CHECK(same(logits_of(model), logits_of(source)));
        }
    }
    const TensorFile headless = renamed(
        nn::Llama(tied), [](const std::string& name) { return name == "lm_head.weight" ? "" : name; });
    save_safetensors(folder / "headless.safetensors", headless);
    nn::Llama untied(llama_config);
    check_error([&] { nn::load_pretrained(untied, folder / "headless.safetensors"); },
                {"[load_pretrained]", "headless.safetensors", "Missing: lm_head.weight"});
}

TEST_CASE("pretrained: what is missing, unknown or another model's is an error, and nothing was changed") {
    const test::TemporaryFolder folder;
    nn::GPT2 model(gpt2_config);
    const Tensor before = model.transformer.wte.weight.detach().clone();
    const auto refused = [&](const std::function<void(TensorFile&)>& change,
                             const std::vector<std::string>& parts) {
        nn::GPT2 source(gpt2_config);
        TensorFile file = published_gpt2(source, false);
        change(file);
        save_safetensors(folder / "changed.safetensors", file);
        check_error([&] { nn::load_pretrained(model, folder / "changed.safetensors"); }, parts);
        CHECK(same(model.transformer.wte.weight.detach(), before));
    };
    refused([](TensorFile& file) { file.tensors.erase("h.1.mlp.c_fc.bias"); },
            {"changed.safetensors", "Missing: transformer.h.1.mlp.c_fc.bias"});
    refused([](TensorFile& file) { file.tensors["h.2.ln_1.weight"] = ones({12}); },
            {"Unexpected: transformer.h.2.ln_1.weight"});
    refused([](TensorFile& file) { file.tensors["wpe.weight"] = ones({9, 12}); }, {"wpe.weight", "(9, 12)"});
    refused([](TensorFile& file) { file.tensors.clear(); }, {"Missing"});
    nn::Llama llama(llama_config);
    save(llama, folder / "llama.safetensors");
    check_error([&] { nn::load_pretrained(model, folder / "llama.safetensors"); },
                {"llama.safetensors", "Missing"});
    check_error([&] { nn::load_pretrained(model, folder / "absent.safetensors"); }, {"absent.safetensors"});
}

TEST_CASE("load: a file without any tensor of the model is an error, also when not strict") {
    const test::TemporaryFolder folder;
    nn::GPT2 model(gpt2_config);
    save_safetensors(folder / "published.safetensors", published_gpt2(model, false));
    check_error([&] { load(model, folder / "published.safetensors", false); },
                {"published.safetensors", "no tensor of GPT2", "h.0.attn.bias", "transformer.wte.weight"});
    check_error([&] { model.load_state_dict({}, false); }, {"no tensor of GPT2", "none"});
    nn::Dropout nothing(0.5);
    CHECK(nothing.load_state_dict({{"w", ones({1})}}, false).unexpected.size() == 1);
}
