// Whether the products that share an input (q, k and v of a Llama's attention, gate and up of its gated layer) are better
// computed as one product with the weights one below the other. Three ways take turns in one run:
//
//   separate     a product each, forward and backward: what nn::Attention and nn::SwiGLU do
//   forward      one product forward, whose result is seen in parts; backward a product each
//   all          one product forward, two backward; the gradients of the parts are put together in between
//
//     bench_fused_products [threads] [seconds for each size]      (default 2 10)
//
// Prints tables with the minimum and the median of the time, and the minimum of the processors' time (which other programs
// disturb less; OMP_WAIT_POLICY=passive keeps waiting threads out of it), in milliseconds, of forward and backward of the
// products alone, and of whole training steps (forward, cross-entropy, backward, AdamW) of a Llama of two layers. The
// differences and the losses show that all three compute the same.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/device.h"
#include "core/factories.h"
#include "core/random.h"
#include "nn/layers/attention.h"
#include "nn/layers/embedding.h"
#include "nn/layers/linear.h"
#include "nn/layers/norm.h"
#include "nn/optim/adamw.h"

using namespace potluck;

namespace {

enum class Way : std::uint8_t { separate, forward, all };
constexpr std::array ways{Way::separate, Way::forward, Way::all};
constexpr std::array names{"separate", "forward", "all"};

Tensor rows_of(const Tensor& x) {
    return x.alias({x.count() / x.size(-1), x.size(-1)}, {x.size(-1), 1}, x.offset());
}

Tensor transposed(const Tensor& x) {
    return x.alias({x.size(1), x.size(0)}, {x.strides()[1], x.strides()[0]}, x.offset());
}

/// x weight^T for weights whose memory follows one behind the other, by one product. On the tape stand a linear each.
std::vector<Tensor> forward_fused(const Tensor& x, const std::vector<Tensor>& weights) {
    std::int64_t out = 0;
    for (const Tensor& weight : weights) out += weight.size(0);
    const std::int64_t in = x.size(-1), rows = x.count() / in;
    const Tensor whole = weights.front().detach().alias({out, in}, {in, 1}, weights.front().offset());
    Tensor y = Tensor::empty({rows, out}, {x.dtype(), x.device()});
    backend(x.device()).matmul(rows_of(x.detach()), transposed(whole), y, false);
    std::vector<Tensor> parts;
    std::int64_t column = 0;
    for (const Tensor& weight : weights) {
        Shape shape = x.shape();
        shape.back() = weight.size(0);
        const Tensor part = y.alias(shape, {shape[1] * out, out, 1}, column);
        column += weight.size(0);
        parts.push_back(record("linear", part, {x, weight}, {x, weight},
                               [](const Saved& saved, const Tensor& given, Gradients& dx) {
                                   const Tensor dy = rows_of(given.contiguous());
                                   Backend& device = backend(dy.device());
                                   const auto [x_memory, more_x] = dx.destination(0);
                                   Tensor x_rows = rows_of(x_memory);
                                   device.matmul(dy, saved[1], x_rows, more_x);
                                   auto [weight_memory, more_weight] = dx.destination(1);
                                   device.matmul(transposed(dy), rows_of(saved[0]), weight_memory,
                                                 more_weight);
                               }));
    }
    return parts;
}

/// Weights (sizes[i], in) that are multiplied by the same input.
struct SharedInput : nn::Module {
    Way way;
    std::vector<std::int64_t> sizes;
    std::vector<Tensor> weights;  // one of all sizes when all is fused

    SharedInput(Way given, std::int64_t in, const std::vector<std::int64_t>& parts)
        : way(given), sizes(parts) {
        std::int64_t out = 0;
        for (const std::int64_t size : sizes) out += size;
        const Tensor whole = randn({out, in}) * 0.02;
        if (way == Way::all) {
            weights.push_back(nn::parameter(whole));
            return;
        }
        std::int64_t row = 0;
        for (const std::int64_t size : sizes) {
            const Tensor part = whole.narrow(0, row, size);
            weights.push_back(nn::parameter(way == Way::separate ? part.clone() : part));
            row += size;
        }
    }
    void members(nn::Members& m) override { m("weights", weights); }
    std::vector<Tensor> products(const Tensor& x) {
        if (way == Way::all) return split(linear(x, weights[0]), sizes, -1);
        if (way == Way::forward) return forward_fused(x, weights);
        std::vector<Tensor> parts;
        for (const Tensor& weight : weights) parts.push_back(linear(x, weight));
        return parts;
    }
};

struct Sizes {
    std::int64_t batch, time, width, hidden, heads;
};
constexpr std::array all_sizes{Sizes{12, 64, 128, 352, 4}, Sizes{12, 64, 512, 1376, 8},
                               Sizes{4, 64, 768, 2048, 12}, Sizes{4, 256, 1024, 2752, 16}};
constexpr std::int64_t vocabulary = 1024, layers = 2;

/// A block of nn::Llama in one of the ways.
struct Block : nn::Module {
    std::int64_t heads;
    SharedInput qkv, gate_up;
    nn::Linear o_proj, down_proj;
    nn::RMSNorm before, after;
    Tensor cosine, sine;

    Block(Way way, const Sizes& s)
        : heads(s.heads),
          qkv(way, s.width, {s.width, s.width, s.width}),
          gate_up(way, s.width, {s.hidden, s.hidden}),
          o_proj(s.width, s.width, {.bias = false}),
          down_proj(s.hidden, s.width, {.bias = false}),
          before(s.width),
          after(s.width) {
        std::tie(cosine, sine) = rotary_tables(s.time, s.width / s.heads, 10000.0);
    }
    void members(nn::Members& m) override {
        m("qkv", qkv)("gate_up", gate_up)("o_proj", o_proj)("down_proj", down_proj);
        m("before", before)("after", after);
    }
    Tensor forward(const Tensor& x) override {
        const std::vector<Tensor> parts = qkv.products(before(x));
        const Tensor q = rotary(nn::split_heads(parts[0], heads), cosine, sine);
        const Tensor k = rotary(nn::split_heads(parts[1], heads), cosine, sine);
        const Tensor v = nn::split_heads(parts[2], heads);
        const Tensor y = scaled_dot_product_attention(q, k, v, {.causal = true});
        const auto [attended, normalised] = after.add_and_norm(x, o_proj(nn::merge_heads(y)));
        const std::vector<Tensor> halves = gate_up.products(normalised);
        return attended + down_proj(swiglu(halves[0], halves[1]));
    }
};

struct Model : nn::Module {
    nn::Embedding embedding;
    std::vector<Block> blocks;
    nn::RMSNorm norm;
    nn::Linear head;

    Model(Way way, const Sizes& s)
        : embedding(vocabulary, s.width), norm(s.width), head(s.width, vocabulary, {.bias = false}) {
        for (std::int64_t i = 0; i < layers; ++i) blocks.emplace_back(way, s);
    }
    void members(nn::Members& m) override {
        m("embedding", embedding)("blocks", blocks)("norm", norm)("head", head);
    }
    Tensor forward(const Tensor& ids) override {
        Tensor x = embedding(ids);
        for (Block& block : blocks) x = block(x);
        return head(norm(x));
    }
};

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
    double largest = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i)
        largest = std::max(largest, max(abs(a[i].detach() - b[i].detach())).item<double>());
    return largest;
}

/// A scalar whose gradient with respect to each part is a given one, at no cost.
Tensor ends_of(const std::vector<Tensor>& parts, const std::vector<Tensor>& gradients) {
    return record("ends", zeros({}), parts, gradients, [](const Saved& saved, const Tensor&, Gradients& dx) {
        for (std::size_t i = 0; i < saved.size(); ++i) dx.add(i, saved[i]);
    });
}

/// Lets the ways take turns for some seconds and prints a row with the times of each.
void measure(const std::string& what, double seconds, const std::function<void(std::size_t way)>& call) {
    using Clock = std::chrono::steady_clock;
    std::array<std::vector<double>, ways.size()> times;
    std::array<double, ways.size()> processor_times{1e30, 1e30, 1e30};
    for (std::size_t way = 0; way < ways.size(); ++way) call(way);
    const auto begin = Clock::now();
    while (times[0].size() < 5 || std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const std::size_t first = times[0].size();
        for (std::size_t i = 0; i < ways.size(); ++i) {
            const std::size_t way = (first + i) % ways.size();
            const std::clock_t processor_start = std::clock();
            const auto start = Clock::now();
            call(way);
            times[way].push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
            processor_times[way] =
                std::min(processor_times[way],
                         1e3 * static_cast<double>(std::clock() - processor_start) / CLOCKS_PER_SEC);
        }
    }
    fmt::print("| {} |", what);
    for (std::size_t way = 0; way < ways.size(); ++way) {
        std::vector<double>& one = times[way];
        std::sort(one.begin(), one.end());
        fmt::print(" {:.3f} / {:.3f}, {:.3f} |", one.front(), one[one.size() / 2], processor_times[way]);
    }
    fmt::print(" {} |\n", times[0].size());
    std::fflush(stdout);
}

void measure_products(const char* name, const Sizes& s, std::int64_t parts, std::int64_t out, double seconds,
                      const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& then) {
    std::vector<SharedInput> layers;
    std::vector<Tensor> inputs;
    for (const Way way : ways) {
        manual_seed(1);
        layers.emplace_back(way, s.width, std::vector<std::int64_t>(static_cast<std::size_t>(parts), out));
        inputs.push_back(nn::parameter(randn({s.batch, s.time, s.width})));
    }
    std::vector<Tensor> gradients(static_cast<std::size_t>(parts), randn({s.batch, s.time, out}));
    measure(fmt::format("{}: {} x {} to {} x {}", name, s.batch * s.time, s.width, parts, out), seconds,
            [&](std::size_t way) {
                std::vector<Tensor> results = then(layers[way].products(inputs[way]));
                ends_of(results,
                        {gradients.begin(), gradients.begin() + static_cast<std::ptrdiff_t>(results.size())})
                    .backward();
                inputs[way].set_grad({});
                layers[way].zero_grad();
            });
    const std::vector<Tensor> separate = then(layers[0].products(inputs[0]));
    fmt::print("| largest difference of an element |");
    for (std::size_t way = 0; way < ways.size(); ++way)
        fmt::print(" {} |", largest_difference(separate, then(layers[way].products(inputs[way]))));
    fmt::print(" |\n");
}

void measure_steps(const Sizes& s, double seconds) {
    std::vector<std::unique_ptr<Model>> models;
    std::vector<std::unique_ptr<optim::AdamW>> optimizers;
    for (const Way way : ways) {
        manual_seed(1);
        models.push_back(std::make_unique<Model>(way, s));
        optimizers.push_back(std::make_unique<optim::AdamW>(*models.back()));
    }
    const Tensor text = randint(0, vocabulary, {s.batch, s.time + 1});
    const Tensor ids = narrow(text, 1, 0, s.time).contiguous(),
                 labels = narrow(text, 1, 1, s.time).contiguous();
    std::array<double, ways.size()> losses{};
    measure(fmt::format("step: {} x {}, hidden {}", s.batch * s.time, s.width, s.hidden), seconds,
            [&](std::size_t way) {
                const Tensor loss = models[way]->loss(ids, labels);
                loss.backward();
                optimizers[way]->step();
                optimizers[way]->zero_grad();
                losses[way] = loss.item();
            });
    fmt::print("| last losses | {:.7f} | {:.7f} | {:.7f} | |\n", losses[0], losses[1], losses[2]);
}

}  // namespace

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::atoi(arguments[1]) : 2;
    const double seconds = count > 2 ? std::atof(arguments[2]) : 10.0;
    try {
        set_threads(threads);
        fmt::print("| minimum / median, processors' minimum (ms) |");
        for (const char* name : names) fmt::print(" {} |", name);
        fmt::print(" repetitions |\n|---|---|---|---|---|\n");
        for (const Sizes& s : all_sizes) {
            measure_products("q, k, v", s, 3, s.width, seconds, [](const auto& parts) { return parts; });
            measure_products("gate, up and their product", s, 2, s.hidden, seconds, [](const auto& parts) {
                return std::vector<Tensor>{swiglu(parts[0], parts[1])};
            });
            measure_steps(s, seconds);
        }
    } catch (const std::exception& error) {
        fmt::print(stderr, "bench_fused_products: {}\n", error.what());
        return 1;
    }
    return 0;
}
