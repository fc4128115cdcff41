// A GPT built from single layers and trained to continue a text byte by byte.
//
//     4_gpt [PATH [STEPS]]     this very file and 300 unless given

#include <potluck.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>

using namespace potluck;

namespace {

constexpr std::int64_t context = 64, width = 64, heads = 4, layers = 2;
constexpr std::int64_t vocabulary = data::ByteTokenizer::vocabulary_size;

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
        Tensor x = tokens(ids) + positions(arange(0, ids.size(1)));  // (batch, time, width)
        for (Block& block : blocks) x = block(x);
        return logits(last(x));  // (batch, time, vocabulary)
    }
};

/// Continues `text` by `count` bytes, each sampled with the probabilities that the model gives.
std::string continue_text(GPT& model, std::string text, int count) {
    const NoGrad not_recorded;
    for (int i = 0; i < count; ++i) {
        const std::string seen = text.substr(text.size() - std::min<std::size_t>(text.size(), context));
        const Tensor outputs =
            model(data::ByteTokenizer::encode(seen).unsqueeze(0));  // (1, time, vocabulary)
        const Tensor next = softmax(outputs[0][-1] / 0.8);  // temperature 0.8: likely bytes get likelier
        text += static_cast<char>(multinomial(next, 1).item<std::int64_t>());
    }
    return text;
}

}  // namespace

int main(int argc, char** argv) try {
    const auto files = data::read_text(argc > 1 ? argv[1] : "examples/4_gpt.cpp");
    const int steps = argc > 2 ? std::atoi(argv[2]) : 300;
    if (steps < 1) throw Error("steps", "must be a whole number of at least 1.");
    const data::TextSplit text = data::split_text(files, 0.0);

    manual_seed(1);
    GPT model;
    std::cout << model << "\n";
    optim::AdamW optimizer(model, {.learning_rate = 3e-3, .weight_decay = 0.1});
    data::Loader loader(data::TokenWindows(data::ByteTokenizer::encode(text.train), context),
                        {.batch = 16, .shuffle = true, .workers = 1});

    for (int step = 1; step <= steps; ++step) {
        const auto [ids, next_ids] = loader.next();  // both (batch, context): next_ids is one byte ahead
        const Tensor loss = cross_entropy(model(ids), next_ids);
        loss.backward();
        clip_grad_norm(model, 1.0);
        optimizer.step();
        optimizer.zero_grad();
        if (step == 1 || step % 50 == 0 || step == steps)
            std::cout << "step " << step << ": loss " << loss.item() << "\n";
    }
    std::cout << "\n" << data::printable(continue_text(model, "struct ", 400)) << "\n";
} catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
}
