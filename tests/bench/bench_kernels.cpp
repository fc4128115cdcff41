// The speed of the CPU kernels, one line each: milliseconds, GB/s for the minimum memory traffic, and GFLOP/s where
// arithmetic is the limit. `bench_kernels gelu` measures the rows whose name contains "gelu"; `--threads N` sets the
// number of threads.
//
// A row is warmed up once, then timed until 0.3 s have passed; the best run counts, since all disturbances make a run
// slower.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "core/backend.h"
#include "core/factories.h"
#include "core/measure.h"

namespace {

using namespace potluck;

std::string wanted;

Backend& cpu() { return backend(Device::cpu()); }

/// Seconds of the best run.
double best_seconds(const std::function<void()>& run) {
    using Clock = std::chrono::steady_clock;
    run();
    double best = 1e9;
    const auto start = Clock::now();
    do {
        const auto begin = Clock::now();
        run();
        best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    } while (std::chrono::duration<double>(Clock::now() - start).count() < 0.3);
    return best;
}

/// `bytes` is the minimum that must be read and written; `operations` (0: not reported) the floating-point operations.
void measure(const std::string& name, std::int64_t bytes, std::int64_t operations,
             const std::function<void()>& run) {
    if (name.find(wanted) == std::string::npos) return;
    const double seconds = best_seconds(run);
    fmt::print("{:<44} {:>10.3f} ms {:>8.1f} GB/s", name, seconds * 1e3,
               static_cast<double>(bytes) / seconds * 1e-9);
    if (operations > 0) fmt::print(" {:>8.1f} GFLOP/s", static_cast<double>(operations) / seconds * 1e-9);
    fmt::print("\n");
    std::fflush(stdout);
}

// ---- element-wise: large exceeds every cache, small is an activation of GPT-2 at 256 tokens ----

void elementwise(const std::string& size, const Shape& shape) {
    Tensor a = randn(shape);
    Tensor b = randn(shape);
    Tensor y = zeros(shape);
    const std::int64_t one = a.bytes();
    const std::string of = " f32 " + size;
    measure("memcpy" + of, 2 * one, 0,
            [&] { std::memcpy(y.raw_data(), a.raw_data(), static_cast<std::size_t>(one)); });
    measure("copy" + of, 2 * one, 0, [&] { cpu().copy(a, y); });
    measure("fill" + of, one, 0, [&] { cpu().fill(y, 1.0); });
    measure("add" + of, 3 * one, 0, [&] { cpu().binary(BinaryOp::add, a, b, y); });
    measure("multiply" + of, 3 * one, 0, [&] { cpu().binary(BinaryOp::multiply, a, b, y); });
    const Tensor row = randn({shape.back()}).broadcast_alias("add", shape);
    measure("add a row" + of, 2 * one, 0, [&] { cpu().binary(BinaryOp::add, a, row, y); });
    measure("add_scaled" + of, 3 * one, 0, [&] { cpu().add_scaled(a, 0.5, y); });
    measure("less" + of, 2 * one + one / 4, 0,
            [&, c = zeros(shape, {DType::boolean})]() mutable { cpu().compare(CompareOp::less, a, b, c); });
    for (const auto& [name, op] : {std::pair{"negate", UnaryOp::negate},
                                   {"exp", UnaryOp::exponential},
                                   {"log", UnaryOp::logarithm},
                                   {"tanh", UnaryOp::tanh},
                                   {"erf", UnaryOp::error_function},
                                   {"sqrt", UnaryOp::square_root},
                                   {"sin", UnaryOp::sine},
                                   {"relu", UnaryOp::relu},
                                   {"gelu", UnaryOp::gelu},
                                   {"gelu_tanh", UnaryOp::gelu_tanh},
                                   {"silu", UnaryOp::silu},
                                   {"sigmoid", UnaryOp::sigmoid}})
        measure(name + of, 2 * one, 0, [&, op = op] { cpu().unary(op, a, y); });
    for (const auto& [name, op] : {std::pair{"relu", UnaryOp::relu},
                                   {"gelu", UnaryOp::gelu},
                                   {"gelu_tanh", UnaryOp::gelu_tanh},
                                   {"silu", UnaryOp::silu}})
        measure(std::string(name) + " backward" + of, 3 * one, 0,
                [&, op = op] { cpu().unary_backward(op, a, b, y); });
    Tensor half_a = empty(shape, {DType::bf16});
    Tensor half_y = empty(shape, {DType::bf16});
    cpu().copy(a, half_a);
    measure("add bf16 " + size, 3 * half_a.bytes(), 0,
            [&] { cpu().binary(BinaryOp::add, half_a, half_a, half_y); });
}

// ---- reduce ----

void reduce() {
    const Tensor large = ones({32 * 1024 * 1024});
    Tensor scalar = empty({});
    for (const auto& [name, op] :
         {std::pair{"sum", ReduceOp::sum}, {"max", ReduceOp::max}, {"logsumexp", ReduceOp::logsumexp}})
        measure(std::string(name) + " of 32M f32", large.bytes(), 0,
                [&, op = op] { cpu().reduce(op, large, 1, scalar); });
    Tensor place = empty({}, {DType::i64});
    measure("argmax of 32M f32", large.bytes(), 0, [&] { cpu().reduce(ReduceOp::argmax, large, 1, place); });

    const Tensor matrix = randn({8192, 3072});
    Tensor of_rows = empty({8192});
    Tensor of_columns = empty({3072});
    const Tensor turned = matrix.alias({3072, 8192}, {1, 3072}, 0);
    measure("sum of rows (8192, 3072)", matrix.bytes(), 0,
            [&] { cpu().reduce(ReduceOp::sum, matrix, 1, of_rows); });
    const Tensor narrow = matrix.alias({8192 * 768, 4}, {4, 1}, 0);
    Tensor of_narrow = empty({8192 * 768});
    measure("sum of rows (6291456, 4)", matrix.bytes() + of_narrow.bytes(), 0,
            [&] { cpu().reduce(ReduceOp::sum, narrow, 1, of_narrow); });
    measure("sum of columns (8192, 3072)", matrix.bytes(), 0,
            [&] { cpu().reduce(ReduceOp::sum, turned, 1, of_columns); });
    const Tensor small = randn({256, 768});
    Tensor bias = empty({768});
    const Tensor small_turned = small.alias({768, 256}, {1, 768}, 0);
    measure("sum of columns (256, 768)", small.bytes(), 0,
            [&] { cpu().reduce(ReduceOp::sum, small_turned, 1, bias); });
    Tensor mean = empty({8192});
    Tensor variance = empty({8192});
    measure("variance of rows (8192, 3072)", matrix.bytes(), 0,
            [&] { cpu().variance(matrix, 1, 1.0, false, variance); });
}

// ---- optimizer: a GPT-2 of 124M parameters ----

void optimizer() {
    const std::int64_t count = 124439808;
    Tensor parameter = ones({count});
    Tensor gradient = full({count}, 0.01);
    Tensor first = zeros({count});
    Tensor second = zeros({count});
    measure("adamw of 124M f32", 7 * parameter.bytes(), 0, [&] {
        UpdateTensors tensors{parameter, gradient, first, second, {}};
        cpu().adamw({3e-4, 0.9, 0.999, 1e-8, 0.1, 10, true, 1.0}, std::span(&tensors, 1), {});
    });
    measure("sgd with momentum of 124M f32", 5 * parameter.bytes(), 0, [&] {
        UpdateTensors tensors{parameter, gradient, first, {}, {}};
        cpu().sgd({3e-4, 0.9, 0.0, 0.1, false, 2, 1.0}, std::span(&tensors, 1), {});
    });
    measure("sum_of_squares of 124M f32", gradient.bytes(), 0,
            [&] { sum_of_squares(std::span(&gradient, 1)); });
    measure("largest_magnitude of 124M f32", gradient.bytes(), 0,
            [&] { largest_magnitude(std::span(&gradient, 1)); });
}

// ---- embedding, index, sort: GPT-2's vocabulary ----

void lookup() {
    const std::int64_t vocabulary = 50257;
    const Tensor weight = randn({vocabulary, 768});
    const Tensor ids = randint(0, vocabulary, {4096});
    Tensor y = zeros({4096, 768});
    Tensor dweight = zeros({vocabulary, 768});
    measure("embedding of 4096 ids", 2 * y.bytes(), 0, [&] { cpu().embedding(weight, ids, y); });
    measure("embedding backward of 4096 ids", 3 * y.bytes(), 0,
            [&] { cpu().embedding_backward(ids, y, dweight); });
    const Tensor logits = randn({256, vocabulary});
    Tensor values = empty({256, 40});
    Tensor indices = empty({256, 40}, {DType::i64});
    measure("topk 40 of (256, 50257)", logits.bytes(), 0,
            [&] { cpu().topk(logits, 40, true, values, indices); });
    const Tensor weights = rand({256, vocabulary});
    Tensor drawn = empty({256, 1}, {DType::i64});
    measure("multinomial of (256, 50257)", weights.bytes(), 0, [&] {
        cpu().multinomial({1, 0}, weights, false, drawn);
    });
    Tensor picked = empty({256, 40});
    measure("gather 40 of (256, 50257)", 4 * picked.bytes(), 0,
            [&] { cpu().gather(logits, 1, indices, picked); });
    Tensor sums = zeros({256, vocabulary});
    measure("scatter_add 40 into (256, 50257)", 4 * picked.bytes(), 0,
            [&] { cpu().scatter_add(1, indices, picked, sums); });
}

// ---- softmax, cross_entropy, norm, rotary: GPT-2 at 256 and 8192 tokens ----

void rows_of_logits() {
    const Shape shape{256, 50257};
    const Tensor x = randn(shape);
    const Tensor labels = randint(0, 50257, {256});
    const Tensor dlosses = ones({256});
    Tensor y = zeros(shape);
    Tensor losses = empty({256});
    Tensor logsumexp = empty({256});
    const std::string of = " (256, 50257)";
    measure("softmax" + of, 2 * x.bytes(), 0, [&] { cpu().softmax(x, false, y); });
    measure("log_softmax" + of, 2 * x.bytes(), 0, [&] { cpu().softmax(x, true, y); });
    measure("softmax backward" + of, 3 * x.bytes(), 0,
            [&, dx = zeros(shape)]() mutable { cpu().softmax_backward(y, x, false, dx); });
    measure("cross_entropy" + of, x.bytes(), 0,
            [&] { cpu().cross_entropy(x, labels, {}, losses, logsumexp); });
    cpu().cross_entropy(x, labels, {}, losses, logsumexp);
    measure("cross_entropy backward" + of, 2 * x.bytes(), 0,
            [&] { cpu().cross_entropy_backward(x, labels, logsumexp, dlosses, {}, y); });
}

void norms(std::int64_t rows) {
    const Shape shape{rows, 768};
    const Tensor x = randn(shape);
    const Tensor dy = randn(shape);
    const Tensor weight = randn({768});
    Tensor y = zeros(shape);
    Tensor sum = zeros(shape);
    Tensor none;
    Tensor mean = empty({rows});
    Tensor reciprocal = empty({rows});
    Tensor dweight = empty({768});
    Tensor dbias = empty({768});
    const std::string of = fmt::format(" ({}, 768)", rows);
    measure("layer_norm" + of, 2 * x.bytes(), 0,
            [&] { cpu().layer_norm(x, {}, weight, weight, 1e-5, none, y, mean, reciprocal); });
    measure("layer_norm backward" + of, 3 * x.bytes(), 0,
            [&] { cpu().layer_norm_backward(x, weight, mean, reciprocal, dy, false, y, dweight, dbias); });
    measure("layer_norm with a residual" + of, 4 * x.bytes(), 0,
            [&] { cpu().layer_norm(x, dy, weight, weight, 1e-5, sum, y, mean, reciprocal); });
    measure("rms_norm" + of, 2 * x.bytes(), 0,
            [&] { cpu().rms_norm(x, {}, weight, 1e-5, none, y, reciprocal); });
    measure("rms_norm backward" + of, 3 * x.bytes(), 0,
            [&] { cpu().rms_norm_backward(x, weight, reciprocal, dy, false, y, dweight); });
}

void rotary() {
    const Tensor x = randn({4, 12, 1024, 64});
    const Tensor table = randn({1024, 32});
    Tensor y = zeros(x.shape());
    measure("rotary (4, 12, 1024, 64)", 2 * x.bytes(), 0, [&] { cpu().rotary(x, table, table, false, y); });
}

// ---- attention: 12 heads of size 64, q, k and v as views of one projection; operations of the products only ----

void attention(std::int64_t time, bool causal, double dropout) {
    const std::int64_t batch = 4, heads = 12, size = 64;
    const Tensor qkv = randn({batch, time, 3, heads, size});
    const auto part = [&](std::int64_t which) {
        return qkv.alias({batch, heads, time, size}, {3 * time * heads * size, size, 3 * heads * size, 1},
                         which * heads * size);
    };
    const auto by_time = [&] {
        return zeros({batch, time, heads, size})
            .alias({batch, heads, time, size}, {time * heads * size, size, heads * size, 1}, 0);
    };
    const Tensor q = part(0), k = part(1), v = part(2), dy = part(0);
    Tensor y = by_time(), dq = by_time(), dk = by_time(), dv = by_time();
    Tensor logsumexp = empty({batch, heads, time});
    Tensor none;
    const AttentionSpec options{causal, 0.125, dropout, {1, 0}};
    const std::int64_t seen = causal ? time * (time + 1) / 2 : time * time;
    const std::int64_t product = 2 * batch * heads * seen * size;
    const std::string of =
        fmt::format(" of {}{}{}", time, causal ? ", causal" : "", dropout > 0 ? ", dropout" : "");
    measure("attention" + of, 4 * y.bytes(), 2 * product,
            [&] { cpu().attention(q, k, v, none, options, y, logsumexp); });
    cpu().attention(q, k, v, none, options, y, logsumexp);
    measure("attention backward" + of, 8 * y.bytes(), 5 * product,
            [&] { cpu().attention_backward(q, k, v, none, y, logsumexp, dy, options, dq, dk, dv, none); });
}

void decoding() {
    const Tensor k = randn({1, 12, 1024, 64});
    const Tensor q = randn({1, 12, 1, 64});
    Tensor y = empty(q.shape());
    Tensor logsumexp = empty({1, 12, 1});
    measure("attention of 1 query to 1024 keys", 2 * k.bytes(), 0,
            [&] { cpu().attention(q, k, k, Tensor(), {.causal = true, .scale = 0.125}, y, logsumexp); });
}

}  // namespace

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--threads" && i + 1 < argc) {
            set_threads(std::atoi(argv[++i]));
        } else if (argument.starts_with("-")) {
            fmt::print(stderr, "usage: bench_kernels [--threads N] [part of a row's name]\n");
            return 2;
        } else {
            wanted = argument;
        }
    }
    fmt::print("{} threads\n", threads());
    elementwise("64M", {8192, 8192});
    elementwise("(256, 3072)", {256, 3072});
    reduce();
    optimizer();
    lookup();
    rows_of_logits();
    norms(256);
    norms(8192);
    rotary();
    for (const std::int64_t time : {64, 256, 1024})
        for (const bool causal : {false, true}) attention(time, causal, 0.0);
    attention(1024, true, 0.1);
    decoding();
    return 0;
}
