// A GPT built from single layers and trained to continue a text byte by byte. `4_gpt --help` lists the options.

#include <potluck.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "examples/command_line.h"

using namespace potluck;

namespace {

constexpr std::int64_t context = 64, width = 64, heads = 4, layers = 2;
constexpr std::int64_t vocabulary = data::ByteTokenizer::vocabulary_size;

struct Settings : training::Options {
    std::string path = "examples/4_gpt.cpp";
    std::int64_t steps = 300;
    Settings() { batch = 16; }
};

std::optional<int> read_command_line(int argc, char** argv, Settings& settings) {
    CLI::App app("Trains a GPT of single layers to continue a text.");
    app.option_defaults()->always_capture_default();
    app.add_option("PATH", settings.path, "the text, a file or a folder");
    app.add_option("--steps", settings.steps, "updates of the parameters")->check(command_line::at_least(1));
    command_line::add_training_options(app, settings, "pieces of the text");
    return command_line::read_training(app, argc, argv, settings);
}

/// Every token attends to the tokens before it and takes over what is useful.
struct SelfAttention : nn::Module {
    nn::Linear queries_keys_values{width, 3 * width}, out{width, width};

    void members(nn::Members& m) override { m("queries_keys_values", queries_keys_values)("out", out); }
    Tensor forward(const Tensor& x) override {
        const std::int64_t batch = x.size(0), time = x.size(1);
        std::vector<Tensor> qkv = split(queries_keys_values(x), width, 2);  // 3 x (batch, time, width)
        for (Tensor& part : qkv)  // to (batch, heads, time, width / heads)
            part = part.reshape({batch, time, heads, width / heads}).transpose(1, 2);
        const Tensor mixed = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {.causal = true});
        return out(mixed.transpose(1, 2).reshape({batch, time, width}));
    }
};

/// Attention, then an MLP. Both add to their input (residual connections), so that gradients can bypass them.
struct Block : nn::Module {
    nn::LayerNorm before_attention{width}, before_mlp{width};
    SelfAttention attention;
    nn::Linear up{width, 4 * width}, down{4 * width, width};

    void members(nn::Members& m) override {
        m("before_attention", before_attention)("attention", attention);
        m("before_mlp", before_mlp)("up", up)("down", down);
    }
    Tensor forward(const Tensor& x) override {
        const Tensor looked = x + attention(before_attention(x));
        return looked + down(gelu(up(before_mlp(looked))));
    }
};

struct GPT : nn::Module {
    nn::Embedding tokens{vocabulary, width, 0.02}, positions{context, width, 0.02};
    std::vector<Block> blocks = std::vector<Block>(layers);
    nn::LayerNorm last{width};
    nn::Linear logits{width, vocabulary, {.bias = false}};

    void members(nn::Members& m) override {
        m("tokens", tokens)("positions", positions)("blocks", blocks)("last", last)("logits", logits);
    }
    Tensor forward(const Tensor& ids) override {
        Tensor x = tokens(ids) + positions(arange(0, ids.size(1)).to(ids.device()));
        for (Block& block : blocks) x = block(x);
        return logits(last(x));  // (batch, time, vocabulary)
    }
    Tensor loss(const Tensor& ids, const Tensor& next_ids) override {  // next_ids is one byte ahead
        return cross_entropy((*this)(ids), next_ids);
    }
};

optim::AdamWOptions optimizer_options(const Settings& settings) {
    return {.learning_rate = settings.learning_rate, .weight_decay = 0.1};
}

data::Loader make_loader(const std::string& text, const Settings& settings) {
    return data::Loader(data::TokenWindows(data::ByteTokenizer::encode(text), context),
                        {.batch = settings.batch,
                         .shuffle = true,
                         .workers = settings.workers,
                         .device = device_of(settings)});
}

/// A training for a trial of --tune.
TrialTraining make_trial(const std::string& text, Settings settings, const TunerSetting& setting) {
    settings.batch = setting.batch;
    settings.workers = setting.workers;
    auto model = std::make_unique<GPT>();
    model->to(device_of(settings));
    auto optimizer = std::make_unique<optim::AdamW>(*model, optimizer_options(settings));
    return {.module = std::move(model),
            .optimizer = std::move(optimizer),
            .loader = std::make_unique<data::Loader>(make_loader(text, settings)),
            .clip = 1.0};
}

/// Continues `text` by `count` bytes, each sampled with the probabilities that the model gives.
std::string continue_text(GPT& model, std::string text, int count) {
    const NoGrad not_recorded;
    for (int i = 0; i < count; ++i) {
        const std::string seen = text.substr(text.size() - std::min<std::size_t>(text.size(), context));
        const Tensor outputs =
            model(data::ByteTokenizer::encode(seen).unsqueeze(0).to(model.logits.weight.device()));
        const Tensor next = softmax(outputs[0][-1] / 0.8);  // temperature 0.8: likely bytes get likelier
        text += static_cast<char>(multinomial(next, 1).item<std::int64_t>());
    }
    return text;
}

}  // namespace

int main(int argc, char** argv) try {
    Settings settings;
    if (const std::optional<int> status = read_command_line(argc, argv, settings)) return *status;
    set_threads(settings.threads);
    const std::string text = data::split_text(data::read_text(settings.path), 0.0).train;
    if (settings.tune)
        return training::tune(
            settings, [&](const TunerSetting& setting) { return make_trial(text, settings, setting); },
            setting_of(settings), {}, 0, settings.steps);

    manual_seed(1);
    GPT model;
    std::cout << model << "\n";
    model.to(device_of(settings));
    optim::AdamW optimizer(model, optimizer_options(settings));
    data::Loader loader = make_loader(text, settings);
    LossScaler scaler(scaler_options(settings));

    for (std::int64_t step = 1; step <= settings.steps; ++step) {
        const auto [ids, next_ids] = loader.next();  // both (batch, context)
        Tensor loss;
        {
            const Autocast products_in(dtype_of(parse_precision(settings.precision)));
            loss = model.loss(ids, next_ids);
        }
        scaler.backward(loss);
        scaler.step(optimizer, {.max_norm = 1.0});
        optimizer.zero_grad();
        if (step == 1 || step % 50 == 0 || step == settings.steps)
            std::cout << "step " << step << ": loss " << loss.item() << "\n";
    }
    std::cout << "\n" << data::printable(continue_text(model, "struct ", 400)) << "\n";
    return 0;
} catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "error: " << error.what() << "\n";
    return 1;
}
