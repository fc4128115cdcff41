// The same weights and data give PyTorch's losses: tests/golden/README.md says where the values come from.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "autograd/ops.h"
#include "core/safetensors.h"
#include "nn/models/gpt2.h"
#include "nn/models/llama.h"
#include "nn/optim/adamw.h"
#include "tests/nn/support.h"

using namespace potluck;

namespace {

nn::StateDict with_prefix(const TensorFile& file, const std::string& prefix) {
    nn::StateDict state;
    for (const auto& [name, tensor] : file.tensors) {
        if (name.starts_with(prefix)) state[name.substr(prefix.size())] = tensor;
    }
    return state;
}

nn::GPT2 make_gpt2(const nlohmann::json& config) {
    return nn::GPT2({.vocabulary = config["vocabulary"],
                     .context = config["context"],
                     .width = config["width"],
                     .heads = config["heads"],
                     .layers = config["layers"],
                     .layer_norm_epsilon = config["layer_norm_epsilon"]});
}

nn::Llama make_llama(const nlohmann::json& config) {
    return nn::Llama({.vocabulary = config["vocabulary"],
                      .context = config["context"],
                      .width = config["width"],
                      .hidden = config["hidden"],
                      .heads = config["heads"],
                      .kv_heads = config["kv_heads"].get<std::int64_t>(),
                      .layers = config["layers"],
                      .rope_theta = config["rope_theta"],
                      .rms_norm_epsilon = config["rms_norm_epsilon"]});
}

struct Tolerance {
    double losses;     // relative, of each of the 50
    double logits;     // of the first step, relative to the largest
    double gradients;  // norm of each gradient of the first step, relative
};

/// Trains on the golden tokens and compares with the golden run of the same dtype.
void check_parity(nn::LanguageModel& model, const TensorFile& golden, DType dtype,
                  const Tolerance& tolerance) {
    model.load_state_dict(with_prefix(golden, "weights."));
    model.to(dtype);
    const auto settings = nlohmann::json::parse(golden.metadata.at("adamw"));
    optim::AdamW optimizer(model, {.learning_rate = settings["learning_rate"],
                                   .beta1 = settings["beta1"],
                                   .beta2 = settings["beta2"],
                                   .epsilon = settings["epsilon"],
                                   .weight_decay = settings["weight_decay"]});
    const Tensor tokens = golden.tensors.at("tokens");  // (steps, batch, time + 1)
    const std::vector<double> losses =
        golden.tensors.at(dtype == DType::f64 ? "losses_f64" : "losses_f32").to_vector<double>();
    REQUIRE(losses.size() == 50);
    REQUIRE(tokens.size(0) == 50);

    for (std::int64_t step = 0; step < tokens.size(0); ++step) {
        const Tensor ids = narrow(tokens[step], 1, 0, tokens.size(2) - 1);
        const Tensor labels = narrow(tokens[step], 1, 1, tokens.size(2) - 1);
        const Tensor logits = model.forward(ids);
        const Tensor loss = cross_entropy(logits, labels);
        optimizer.zero_grad();
        loss.backward();

        const double expected = losses[static_cast<std::size_t>(step)];
        INFO("step ", step);
        REQUIRE(std::abs(loss.item() - expected) <= tolerance.losses * expected);
        if (step == 0) {
            CHECK(test::relative_error(logits, golden.tensors.at("logits_f64")) <= tolerance.logits);
            const nn::StateDict norms = with_prefix(golden, "gradient_norm.");
            const std::vector<nn::NamedTensor> parameters = model.named_parameters();
            CHECK(norms.size() == parameters.size());
            for (const auto& [name, parameter] : parameters) {
                INFO(name);
                REQUIRE(norms.contains(name));
                REQUIRE(parameter.grad().defined());
                const double norm_expected = norms.at(name).item();
                CHECK(std::abs(norm(to(parameter.grad(), DType::f64)).item() - norm_expected) <=
                      tolerance.gradients * norm_expected);
            }
        }
        optimizer.step();
    }
}

}  // namespace

TEST_CASE("parity: 50 losses of a tiny GPT-2 are PyTorch's") {
    const TensorFile golden = load_safetensors("tests/golden/gpt2.safetensors");
    const auto config = nlohmann::json::parse(golden.metadata.at("config"));
    SUBCASE("f32") {
        nn::GPT2 model = make_gpt2(config);
        check_parity(model, golden, DType::f32, {.losses = 1e-5, .logits = 1e-5, .gradients = 1e-4});
    }
    SUBCASE("f64, where only a different computation can make a difference") {
        nn::GPT2 model = make_gpt2(config);
        check_parity(model, golden, DType::f64, {.losses = 1e-9, .logits = 1e-12, .gradients = 1e-9});
    }
}

TEST_CASE("parity: 50 losses of a tiny Llama are PyTorch's") {
    const TensorFile golden = load_safetensors("tests/golden/llama.safetensors");
    const auto config = nlohmann::json::parse(golden.metadata.at("config"));
    SUBCASE("f32") {
        nn::Llama model = make_llama(config);
        check_parity(model, golden, DType::f32, {.losses = 1e-5, .logits = 1e-5, .gradients = 1e-4});
    }
    SUBCASE("f64, but for the rotary tables, which are f32") {
        nn::Llama model = make_llama(config);
        check_parity(model, golden, DType::f64, {.losses = 1e-6, .logits = 1e-6, .gradients = 1e-5});
    }
}
