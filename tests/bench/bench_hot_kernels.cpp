// The kernels in which a training step spends its time, at the sizes of GPT-2 124M (and one convolution), on any
// device: milliseconds, and how close they come to the limits of the device, which are measured in the same run: the
// bandwidth by a large copy, the arithmetic by a large product in the same dtype. The floor of a kernel (see
// docs/kernels.md) is the larger of bytes / bandwidth and operations / arithmetic; the last column is floor / time.
//
//     bench_hot_kernels [--device cuda] [--dtype bf16] [--tokens 16384] [NAME]     only rows whose name contains NAME

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>

#include "core/backend.h"
#include "core/factories.h"
#include "core/measure.h"

namespace {

using namespace potluck;
using Clock = std::chrono::steady_clock;

struct Bench {
    Device device = Device::cpu();
    DType dtype = DType::f32;
    std::int64_t tokens = 1024;
    std::string wanted;
    double bytes_per_second = 1, operations_per_second = 1;

    Backend& kernels() const { return backend(device); }
    Tensor random(const Shape& shape) const { return randn(shape, {DType::f32, device}).to(dtype); }
    Tensor empty(const Shape& shape) const { return Tensor::empty(shape, {dtype, device}); }
    Tensor empty(const Shape& shape, DType other) const { return Tensor::empty(shape, {other, device}); }
    double element() const { return static_cast<double>(size_of(dtype)); }

    /// Seconds of one run: the best of several rounds, each with enough runs to take 20 ms, so that the wait for the
    /// device at the end of a round is negligible.
    double seconds_of(const std::function<void()>& run) const {
        run();
        synchronize(device);
        const auto timed = [&](int runs) {
            const auto begin = Clock::now();
            for (int i = 0; i < runs; ++i) run();
            synchronize(device);
            return std::chrono::duration<double>(Clock::now() - begin).count() / runs;
        };
        const int runs = static_cast<int>(std::clamp(0.02 / std::max(timed(1), 1e-6), 1.0, 1000.0));
        double best = timed(runs);
        const auto start = Clock::now();
        while (std::chrono::duration<double>(Clock::now() - start).count() < 0.2)
            best = std::min(best, timed(runs));
        return best;
    }

    /// `bytes` and `operations` (multiplications and additions count separately) are the minimum.
    void measure(const std::string& name, double bytes, double operations,
                 const std::function<void()>& run) const {
        if (name.find(wanted) == std::string::npos) return;
        const double seconds = seconds_of(run);
        const double floor = std::max(bytes / bytes_per_second, operations / operations_per_second);
        fmt::print("| {} | {:.3f} | {:.0f} | {:.1f} | {:.0f} % |\n", name, seconds * 1e3,
                   bytes / seconds * 1e-9, operations / seconds * 1e-12, 100 * floor / seconds);
        std::fflush(stdout);
    }
};

constexpr std::int64_t width = 768, heads = 12, head_size = 64, vocabulary = 50257;

void measure_device(Bench& bench) {
    const std::int64_t bytes = bench.device == Device::cpu() ? std::int64_t{1} << 28 : std::int64_t{1} << 30;
    const std::int64_t size = bench.device == Device::cpu() ? 1024 : 8192;
    Tensor from = bench.empty({bytes}, DType::u8);
    Tensor to = bench.empty({bytes}, DType::u8);
    bench.kernels().fill(from, 1);
    bench.bytes_per_second =
        2 * static_cast<double>(bytes) / bench.seconds_of([&] { bench.kernels().copy(from, to); });
    const Tensor a = bench.random({size, size});
    const Tensor b = bench.random({size, size});
    Tensor y = bench.empty({size, size});
    const double n = static_cast<double>(size);
    bench.operations_per_second =
        2 * n * n * n / bench.seconds_of([&] { bench.kernels().matmul(a, b, y, false); });
    fmt::print("{}: a copy moves {:.0f} GB/s, a product of {} x {} in {} does {:.1f} TFLOP/s.\n\n",
               describe(bench.device), bench.bytes_per_second * 1e-9, size, size, name_of(bench.dtype),
               bench.operations_per_second * 1e-12);
}

void rows(const Bench& bench) {
    Backend& kernels = bench.kernels();
    const std::int64_t tokens = bench.tokens;
    const double plane = static_cast<double>(tokens * width) * bench.element();
    const Tensor x = bench.random({tokens, width});
    const Tensor dy = bench.random({tokens, width});
    const Tensor weight = bench.random({width});
    const Tensor bias = bench.random({width});
    Tensor y = bench.empty({tokens, width});
    Tensor sum = bench.empty({tokens, width});
    Tensor mean = bench.empty({tokens}, DType::f32);
    Tensor reciprocal = bench.empty({tokens}, DType::f32);
    Tensor dweight = bench.empty({width});
    Tensor dbias = bench.empty({width});
    Tensor none;

    bench.measure("add", 3 * plane, 0, [&] { kernels.binary(BinaryOp::add, x, dy, y); });
    bench.measure("dropout", 2 * plane, 0, [&] { kernels.dropout({1, 2}, {}, 0.1, x, y); });
    bench.measure("layer_norm", 2 * plane, 0,
                  [&] { kernels.layer_norm(x, none, weight, bias, 1e-5, none, y, mean, reciprocal); });
    bench.measure("layer_norm with a residual", 4 * plane, 0,
                  [&] { kernels.layer_norm(x, dy, weight, bias, 1e-5, sum, y, mean, reciprocal); });
    bench.measure("layer_norm backward", 3 * plane, 0, [&] {
        kernels.layer_norm_backward(x, weight, mean, reciprocal, dy, false, y, dweight, dbias);
    });
    bench.measure("rms_norm", 2 * plane, 0,
                  [&] { kernels.rms_norm(x, none, weight, 1e-5, none, y, reciprocal); });
    bench.measure("rms_norm backward", 3 * plane, 0,
                  [&] { kernels.rms_norm_backward(x, weight, reciprocal, dy, false, y, dweight); });
    const Tensor turned = dy.transpose(0, 1);
    bench.measure("sum of columns (a bias's gradient)", plane, 0,
                  [&] { kernels.reduce(ReduceOp::sum, turned, 1, dbias); });

    const Tensor hidden = bench.random({tokens, 4 * width});
    Tensor activated = bench.empty({tokens, 4 * width});
    bench.measure("gelu_tanh", 8 * plane, 0, [&] { kernels.unary(UnaryOp::gelu_tanh, hidden, activated); });
    bench.measure("gelu_tanh backward", 12 * plane, 0,
                  [&] { kernels.unary_backward(UnaryOp::gelu_tanh, hidden, hidden, activated); });

    const Tensor table = bench.random({vocabulary, width});
    Tensor dtable = bench.empty({vocabulary, width});
    kernels.fill(dtable, 0);
    const Tensor ids = randint(0, vocabulary, {tokens}).to(bench.device);
    bench.measure("embedding", 2 * plane, 0, [&] { kernels.embedding(table, ids, y); });
    bench.measure("embedding backward", 3 * plane, 0, [&] { kernels.embedding_backward(ids, dy, dtable); });
}

void logits(const Bench& bench) {
    Backend& kernels = bench.kernels();
    const double plane = static_cast<double>(bench.tokens * vocabulary) * bench.element();
    const Tensor x = bench.random({bench.tokens, vocabulary});
    Tensor y = bench.empty({bench.tokens, vocabulary});
    const Tensor labels = randint(0, vocabulary, {bench.tokens}).to(bench.device);
    Tensor losses = bench.empty({bench.tokens}, DType::f32);
    Tensor logsumexp = bench.empty({bench.tokens}, DType::f32);
    bench.measure("softmax of logits", 2 * plane, 0, [&] { kernels.softmax(x, false, y); });
    bench.measure("cross_entropy", plane, 0,
                  [&] { kernels.cross_entropy(x, labels, {}, losses, logsumexp); });
    bench.measure("cross_entropy backward", 2 * plane, 0,
                  [&] { kernels.cross_entropy_backward(x, labels, logsumexp, losses, {}, y); });
}

void attention(const Bench& bench) {
    Backend& kernels = bench.kernels();
    const std::int64_t time = std::min<std::int64_t>(1024, bench.tokens);
    const Shape shape = {bench.tokens / time, heads, time, head_size};
    const Tensor q = bench.random(shape);
    const Tensor k = bench.random(shape);
    const Tensor v = bench.random(shape);
    Tensor y = bench.empty(shape);
    Tensor dq = bench.empty(shape);
    Tensor dk = bench.empty(shape);
    Tensor dv = bench.empty(shape);
    Tensor logsumexp = bench.empty({shape[0], heads, time}, DType::f32);
    Tensor none;
    const AttentionSpec options{.causal = true, .scale = 0.125};
    const double bytes = static_cast<double>(q.bytes());
    // Two products of queries x keys x head size, half of them masked away.
    const double product = static_cast<double>(shape[0] * heads * time * time * head_size);
    bench.measure("attention, causal", 4 * bytes, 2 * product,
                  [&] { kernels.attention(q, k, v, none, options, y, logsumexp); });
    bench.measure("attention backward, causal", 8 * bytes, 5 * product, [&] {
        kernels.attention_backward(q, k, v, none, y, logsumexp, q, options, dq, dk, dv, none);
    });
    const Tensor cosine = randn({time, head_size / 2}, {DType::f32, bench.device});
    bench.measure("rotary", 2 * bytes, 0, [&] { kernels.rotary(q, cosine, cosine, false, y); });
}

void products(const Bench& bench) {
    Backend& kernels = bench.kernels();
    const auto product = [&](const std::string& name, std::int64_t m, std::int64_t n, std::int64_t k) {
        const Tensor a = bench.random({m, k});
        const Tensor b = bench.random({n, k});
        Tensor y = bench.empty({m, n});
        const double moved = static_cast<double>(a.bytes() + b.bytes() + y.bytes());
        bench.measure(name, moved,
                      2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
                      [&] { kernels.matmul(a, b.transpose(0, 1), y, false); });
    };
    product("matmul, queries keys values", bench.tokens, 3 * width, width);
    product("matmul, up", bench.tokens, 4 * width, width);
    product("matmul, down", bench.tokens, width, 4 * width);
    product("matmul, logits", bench.tokens, vocabulary, width);
    const Tensor x = bench.random({bench.tokens, width});
    const Tensor weight = bench.random({4 * width, width});
    const Tensor bias = bench.random({4 * width});
    Tensor y = bench.empty({bench.tokens, 4 * width});
    const double operations = 8 * static_cast<double>(bench.tokens * width * width);
    bench.measure("linear with bias in one call, up",
                  static_cast<double>(x.bytes() + weight.bytes() + y.bytes()), operations,
                  [&] { kernels.linear(x, weight, bias, y); });
}

void images(const Bench& bench) {
    Backend& kernels = bench.kernels();
    const std::int64_t batch = std::max<std::int64_t>(1, bench.tokens / 256);
    const Tensor x = bench.random({batch, 64, 56, 56});
    const Tensor weight = bench.random({64, 64, 3, 3});
    Tensor y = bench.empty({batch, 64, 56, 56});
    Tensor dweight = bench.empty({64, 64, 3, 3});
    Tensor none;
    ConvolutionSpec options;
    options.padding = {1, 1};
    const double operations = 2.0 * static_cast<double>(batch) * 64 * 64 * 9 * 56 * 56;
    const double bytes = static_cast<double>(x.bytes());
    bench.measure("convolution 3 x 3, 64 channels, 56 x 56", 2 * bytes, operations,
                  [&] { kernels.convolution(x, weight, none, options, y); });
    bench.measure("convolution backward", 4 * bytes, 2 * operations, [&] {
        Tensor dx = y;
        kernels.convolution_backward(x, weight, x, options, dx, dweight, none);
    });
    Tensor mean = bench.empty({64}, DType::f32);
    Tensor variance = bench.empty({64}, DType::f32);
    Tensor reciprocal = bench.empty({64}, DType::f32);
    const Tensor planes = x.alias({batch, 64, 56 * 56}, {64 * 56 * 56, 56 * 56, 1}, 0);
    bench.measure("batch_norm statistics", bytes, 0,
                  [&] { kernels.batch_norm_statistics(planes, 1e-5, mean, variance, reciprocal); });
    Tensor pooled = bench.empty({batch, 64, 28, 28});
    Tensor places = bench.empty({batch, 64, 28, 28}, DType::i64);
    PoolSpec pool;
    pool.kernel = {2, 2};
    pool.stride = {2, 2};
    bench.measure("max_pool 2 x 2", bytes * 1.25 + static_cast<double>(places.bytes()), 0,
                  [&] { kernels.max_pool(x, pool, pooled, places); });
}

void updates(const Bench& bench) {
    const std::int64_t count = bench.device == Device::cpu() ? 10'000'000 : 124'439'808;
    Tensor parameter = ones({count}, {DType::f32, bench.device});
    const Tensor gradient = full({count}, 0.01, {DType::f32, bench.device});
    const Tensor first = zeros({count}, {DType::f32, bench.device});
    const Tensor second = zeros({count}, {DType::f32, bench.device});
    const double bytes = static_cast<double>(parameter.bytes());
    const AdamWSpec step{3e-4, 0.9, 0.95, 1e-8, 0.1, 10};
    bench.measure(fmt::format("adamw of {} M parameters, f32", count / 1'000'000), 7 * bytes, 0, [&] {
        UpdateTensors tensors{parameter, gradient, first, second, {}};
        bench.kernels().adamw(step, std::span(&tensors, 1), {});
    });
    bench.measure("sum_of_squares of as many", bytes, 0, [&] { sum_of_squares(std::span(&gradient, 1)); });
}

}  // namespace

int main(int argc, char** argv) try {
    Bench bench;
    std::int64_t tokens = 0;
    std::string dtype;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        const bool has_value = i + 1 < argc;
        if (word == "--device" && has_value)
            bench.device = parse_device(argv[++i]);
        else if (word == "--dtype" && has_value)
            dtype = argv[++i];
        else if (word == "--tokens" && has_value)
            tokens = std::atoll(argv[++i]);
        else
            bench.wanted = word;
    }
    const bool on_cpu = bench.device == Device::cpu();
    if (dtype.empty()) dtype = on_cpu ? "f32" : "bf16";
    if (dtype != "f32" && dtype != "f16" && dtype != "bf16")
        throw Error("bench", "--dtype is f32, f16 or bf16.");
    bench.dtype = dtype == "f32" ? DType::f32 : dtype == "f16" ? DType::f16 : DType::bf16;
    bench.tokens = tokens > 0 ? tokens : on_cpu ? 1024 : 16384;

    measure_device(bench);
    fmt::print("| kernel ({}, {} tokens) | ms | GB/s | TFLOP/s | of what is possible |\n", dtype,
               bench.tokens);
    fmt::print("|---|---|---|---|---|\n");
    rows(bench);
    logits(bench);
    attention(bench);
    products(bench);
    images(bench);
    updates(bench);
    return 0;
} catch (const std::exception& error) {
    fmt::print(stderr, "bench_hot_kernels: {}\n", error.what());
    return 1;
}
