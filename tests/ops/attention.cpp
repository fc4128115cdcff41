#include "autograd/ops/attention.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/ops/copy.h"
#include "autograd/ops/dropout.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/index.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/memory.h"
#include "core/random.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::uint64_t dropout_seed = 21;

using Op = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const Attention&);
constexpr Op both_ops[] = {scaled_dot_product_attention, attention_composed};

struct Sizes {
    std::int64_t batch, heads, kv_heads, queries, keys, head_size, value_size;
};

enum class Mask : std::uint8_t { none, boolean, padding, floating };

double scale_for(const Attention& options, std::int64_t head_size) {
    if (options.scale != 0.0 || head_size == 0) return options.scale;
    return 1.0 / std::sqrt(static_cast<double>(head_size));
}

/// By the definition; mask and the dropout factors are empty or (batch, heads, queries, keys); the mask is added.
Array attention_by_definition(const Array& q, const Array& k, const Array& v, const Array& mask,
                              const Array& factors, const Attention& options) {
    const std::int64_t group = k.shape[1] == 0 ? 1 : q.shape[1] / k.shape[1];
    const std::int64_t queries = q.shape[2];
    const std::int64_t keys = k.shape[2];
    const std::int64_t head_size = q.shape[3];
    const double scale = scale_for(options, head_size);
    const auto row_of = [](const Array& x, std::int64_t b, std::int64_t h, std::int64_t t) {
        return x.values.data() + ((b * x.shape[1] + h) * x.shape[2] + t) * x.shape[3];
    };
    Array y{{q.shape[0], q.shape[1], queries, v.shape[3]}, {}};
    for (std::int64_t b = 0; b < q.shape[0]; ++b)
        for (std::int64_t h = 0; h < q.shape[1]; ++h)
            for (std::int64_t i = 0; i < queries; ++i) {
                std::vector<double> weights(static_cast<std::size_t>(keys), -infinity);
                double largest = -infinity;
                for (std::int64_t j = 0; j < keys; ++j) {
                    if (options.causal && j > i + keys - queries) continue;
                    double score = 0.0;
                    for (std::int64_t c = 0; c < head_size; ++c)
                        score += row_of(q, b, h, i)[c] * row_of(k, b, h / group, j)[c];
                    score = score * scale + (mask.values.empty() ? 0.0 : row_of(mask, b, h, i)[j]);
                    weights[static_cast<std::size_t>(j)] = score;
                    largest = std::max(largest, score);
                }
                double total = 0.0;
                for (double& weight : weights) {
                    weight = largest == -infinity ? 0.0 : std::exp(weight - largest);
                    total += weight;
                }
                std::vector<double> row(static_cast<std::size_t>(v.shape[3]), 0.0);
                for (std::int64_t j = 0; j < keys && total > 0.0; ++j) {
                    double weight = weights[static_cast<std::size_t>(j)] / total;
                    if (!factors.values.empty()) weight *= row_of(factors, b, h, i)[j];
                    for (std::size_t c = 0; c < row.size(); ++c)
                        row[c] += weight * row_of(v, b, h / group, j)[c];
                }
                y.values.insert(y.values.end(), row.begin(), row.end());
            }
    return y;
}

Array mask_to_add(const Array& mask, bool is_boolean, const Shape& shape) {
    const Array full = broadcast(mask, shape);
    if (!is_boolean) return full;
    return map(full, [](double seen) { return seen != 0.0 ? 0.0 : -infinity; });
}

Case attention_case(Op op, const Sizes& s, Mask mask, Attention options) {
    const Shape shape{s.batch, s.heads, s.queries, s.keys};
    Case sample;
    sample.inputs = {{.shape = {s.batch, s.heads, s.queries, s.head_size}},
                     {.shape = {s.batch, s.kv_heads, s.keys, s.head_size}},
                     {.shape = {s.batch, s.kv_heads, s.keys, s.value_size}}};
    if (mask == Mask::boolean)
        sample.inputs.push_back({.shape = {s.batch, 1, s.queries, s.keys}, .dtype = DType::boolean});
    if (mask == Mask::padding) sample.inputs.push_back({.shape = {s.keys}, .dtype = DType::boolean});
    if (mask == Mask::floating) sample.inputs.push_back({.shape = {s.heads, s.queries, s.keys}});
    sample.call = [op, options](const std::vector<Tensor>& x) {
        manual_seed(dropout_seed);
        Attention with_mask = options;
        if (x.size() > 3) with_mask.mask = x[3];
        return std::vector<Tensor>{op(x[0], x[1], x[2], with_mask)};
    };
    sample.reference = [=](const std::vector<Array>& x) {
        Array added;
        if (mask != Mask::none) added = mask_to_add(x[3], mask != Mask::floating, shape);
        Array factors;
        if (options.dropout > 0.0) {
            Generator generator(dropout_seed);
            const Tensor kept =
                dropout(potluck::ones(shape, {DType::f64}), options.dropout, true, &generator);
            factors = {shape, kept.to_vector()};
        }
        return std::vector<Array>{attention_by_definition(x[0], x[1], x[2], added, factors, options)};
    };
    const char* masks[] = {"", ", mask", ", padding", ", added mask"};
    sample.note = std::string(options.causal ? "causal" : "all keys") + masks[static_cast<int>(mask)] +
                  (options.dropout > 0.0 ? ", dropout" : "");
    return sample;
}

Row attention_row(const char* name, Op op) {
    Row row{.op = name};
    const Sizes all_sizes[] = {
        {1, 1, 1, 1, 1, 1, 1},     {1, 2, 1, 3, 4, 2, 3},    {2, 2, 2, 3, 3, 2, 2},
        {1, 3, 1, 5, 2, 3, 2},     {0, 2, 1, 3, 3, 4, 4},    {1, 2, 1, 0, 3, 4, 4},
        {1, 2, 1, 3, 0, 4, 4},     {1, 2, 1, 3, 3, 0, 4},    {1, 2, 1, 3, 3, 4, 0},
        {1, 4, 2, 17, 33, 5, 20},  {1, 1, 1, 1, 129, 16, 8}, {1, 2, 2, 65, 129, 33, 16},
        {1, 1, 1, 130, 70, 64, 5}, {3, 3, 3, 3, 5, 4, 4},
    };
    for (const Sizes& sizes : all_sizes)
        for (const bool causal : {false, true})
            for (const Mask mask : {Mask::none, Mask::boolean, Mask::padding, Mask::floating})
                for (const double p : {0.0, 0.4}) {
                    if (p > 0.0 && mask != Mask::none && sizes.heads < 3) continue;
                    // Every mask on small shapes; on large ones each mask once.
                    if (sizes.queries * sizes.keys > 1000 &&
                        (mask == Mask::padding || (mask == Mask::boolean) == causal))
                        continue;
                    row.cases.push_back(attention_case(op, sizes, mask, {.causal = causal, .dropout = p}));
                }
    row.cases.push_back(attention_case(op, {1, 2, 2, 3, 4, 5, 2}, Mask::none, {.scale = 0.7}));
    row.cases.push_back(attention_case(op, {1, 2, 2, 3, 4, 5, 2}, Mask::none, {.dropout = 1.0}));

    const std::string told = std::string("[") + name + "]";
    const auto heads = [op](std::int64_t heads, std::int64_t kv_heads) {
        op(ones({1, heads, 2, 4}), ones({1, kv_heads, 2, 4}), ones({1, kv_heads, 2, 4}), {});
    };
    const Tensor x = ones({1, 2, 3, 4});
    row.refusals = {
        {[=] { heads(3, 2); }, {told, "3", "2"}},
        {[=] { heads(33, 2); }, {told, "33", "2"}},
        {[=] { heads(2, 4); }, {told, "2", "4"}},
        {[=] { heads(4, 0); }, {told, "4", "0"}},
        {[=] { op(x, x, x, {.dropout = -0.1}); }, {told, "-0.1"}},
        {[=] { op(x, x, x, {.dropout = 1.5}); }, {told, "1.5"}},
        {[=] {
             op(x, x, x, {.mask = ones({2, 3}, {DType::i64})});
         },
         {told, "i64"}},
        {[=] {
             op(x, x, x, {.mask = ones({2, 3}, {DType::boolean})});
         },
         {told, "(2, 3)", "(1, 2, 3, 3)"}},
        {[=] {
             op(x, ones({1, 2, 3, 5}), x, {});
         },
         {told, "(1, 2, 3, 4)", "(1, 2, 3, 5)"}},
        {[=] {
             op(x, x, ones({1, 2, 4, 4}), {});
         },
         {told, "(1, 2, 4, 4)"}},
        {[=] {
             op(ones({2, 3, 4}), x, x, {});
         },
         {told, "(2, 3, 4)"}},
        {[=] { op(x, x, x, {.scale = std::nan("")}); }, {told, "nan"}},
        {[=] {
             op(ones({1, 2, 3, 4}, {DType::i64}), x, x, {});
         },
         {told, "i64"}},
    };
    return row;
}

std::vector<Tensor> random_qkv(const Sizes& s, DType dtype, std::uint64_t seed = 1) {
    Generator generator(seed);
    std::vector<Tensor> x;
    for (const Shape& shape :
         {Shape{s.batch, s.heads, s.queries, s.head_size}, Shape{s.batch, s.kv_heads, s.keys, s.head_size},
          Shape{s.batch, s.kv_heads, s.keys, s.value_size}})
        x.push_back(to(randn(shape, {DType::f64, test_device()}, &generator), dtype).set_requires_grad());
    return x;
}

/// Largest difference, relative to the largest correct value.
double relative_error(const Tensor& got, const Tensor& right) {
    const std::vector<double> a = got.to_vector();
    const std::vector<double> b = right.to_vector();
    double distance = 0.0;
    double largest = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!(std::fabs(a[i] - b[i]) <= distance)) distance = std::fabs(a[i] - b[i]);
        largest = std::max(largest, std::fabs(b[i]));
    }
    return largest == 0.0 ? distance : distance / largest;
}

/// The output and the gradients of q, k and v for an upstream gradient of fixed numbers.
std::vector<Tensor> run(Op op, const std::vector<Tensor>& inputs, DType dtype, const Attention& options) {
    std::vector<Tensor> x;
    for (const Tensor& input : inputs) x.push_back(to(input.detach(), dtype).clone().set_requires_grad());
    const Tensor y = op(x[0], x[1], x[2], options);
    Generator generator(9);
    backward(y, {.gradient =
                     to(to(randn(y.shape(), {DType::f32, test_device()}, &generator), DType::bf16), dtype)});
    return {y, x[0].grad(), x[1].grad(), x[2].grad()};
}

}  // namespace

std::vector<Row> attention_rows() {
    Row fused = attention_row("scaled_dot_product_attention", scaled_dot_product_attention);
    fused.tolerance = 2.0;
    fused.dtypes = {DType::f64, DType::f32};
    Row halves = attention_row("scaled_dot_product_attention", scaled_dot_product_attention);
    halves.tolerance = 4.0;  // tensor cores use weights that are rounded to the half type
    halves.dtypes = {DType::f16, DType::bf16};
    halves.gradcheck = false;  // in f64, as for the row above
    halves.refusals = {};
    // Intermediate scores and weights are rounded to the dtype.
    Row composed = attention_row("attention_composed", attention_composed);
    composed.tolerance = 32.0;
    composed.gradient_tolerance = 4.0;
    return {fused, halves, composed};
}
const RowsOfFamily attention_family(attention_rows);

TEST_CASE("attention: queries that see no key give zeros and change no gradient") {
    on_each_device([] {
        const Tensor place = arange(0, 8);
        const Tensor mask = (maximum(unsqueeze(place, 0), unsqueeze(place, 1)) < 4).reshape({1, 1, 8, 8});
        for (const Op op : both_ops)
            for (const DType dtype : floating_dtypes()) {
                const std::vector<Tensor> x = random_qkv({1, 1, 1, 8, 8, 8, 8}, dtype);
                const Tensor y = op(x[0], x[1], x[2], {.mask = mask});
                CHECK(y.narrow(2, 4, 4).to_vector() == std::vector<double>(32, 0.0));
                y.narrow(2, 0, 4).sum().backward();

                std::vector<Tensor> part;
                for (const Tensor& input : x)
                    part.push_back(input.detach().narrow(2, 0, 4).clone().set_requires_grad());
                const Tensor small = op(part[0], part[1], part[2], {});
                small.sum().backward();
                const double limit = tolerance_of(dtype).relative * 8.0;
                CHECK(relative_error(y.narrow(2, 0, 4), small) <= limit);
                for (std::size_t i = 0; i < 3; ++i) {
                    CHECK(relative_error(x[i].grad().narrow(2, 0, 4), part[i].grad()) <= limit);
                    CHECK(x[i].grad().narrow(2, 4, 4).to_vector() == std::vector<double>(32, 0.0));
                }
            }
    });
}

TEST_CASE("attention: a causal mask and padding that together hide every key of a query") {
    on_each_device([] {
        // Keys 0 and 1 are padding: queries 0 and 1 see no key at all.
        const Tensor mask = arange(0, 5) >= 2;
        for (const Op op : both_ops) {
            const std::vector<Tensor> x = random_qkv({2, 2, 1, 5, 5, 4, 3}, DType::f32);
            const Tensor y = op(x[0], x[1], x[2], {.causal = true, .mask = mask});
            CHECK(y.narrow(2, 0, 2).to_vector() == std::vector<double>(24, 0.0));
            backward(y, {.gradient = ones(y.shape())});
            for (const Tensor& input : x) CHECK(all(is_finite(input.grad())).item<bool>());
            CHECK(x[0].grad().narrow(2, 0, 2).to_vector() == std::vector<double>(32, 0.0));
            CHECK(x[2].grad().narrow(2, 0, 2).to_vector() == std::vector<double>(12, 0.0));
        }
    });
}

TEST_CASE("attention: causal masks are aligned bottom-right") {
    on_each_device([] {
        const auto of_indices = [](Op op, std::int64_t queries, std::int64_t keys) {
            const Tensor v = arange(0, keys, 1, {DType::f32}).reshape({1, 1, keys, 1});
            return op(zeros({1, 1, queries, 4}), ones({1, 1, keys, 4}), v, {.causal = true}).to_vector();
        };
        for (const Op op : both_ops) {
            CHECK(of_indices(op, 2, 5) == std::vector<double>{1.5, 2.0});
            CHECK(of_indices(op, 5, 2) == std::vector<double>{0, 0, 0, 0, 0.5});
            CHECK(of_indices(op, 1, 8) == std::vector<double>{3.5});
            CHECK(of_indices(op, 1, 1) == std::vector<double>{0});
        }
    });
}

TEST_CASE("attention: any head size and length is at least half as exact as the composed form") {
    on_each_device([] {
        for (const auto& [head_size, value_size] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                                    {5, 5},
                                                    {20, 20},
                                                    {33, 33},
                                                    {80, 80},
                                                    {96, 96},
                                                    {100, 100},
                                                    {128, 128},
                                                    {128, 96},
                                                    {128, 40}})
            for (const std::int64_t time : {1, 17, 128, 129})
                for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
                    INFO(head_size << " " << value_size << " " << time << " " << name_of(dtype));
                    const std::vector<Tensor> x =
                        random_qkv({1, 2, 1, time, time, head_size, value_size}, dtype);
                    const Attention options{.causal = true};
                    const std::vector<Tensor> right = run(attention_composed, x, DType::f64, options);
                    const std::vector<Tensor> composed = run(attention_composed, x, dtype, options);
                    const std::vector<Tensor> fused = run(scaled_dot_product_attention, x, dtype, options);
                    for (std::size_t i = 0; i < right.size(); ++i)
                        CHECK(relative_error(fused[i], right[i]) <=
                              2.0 * relative_error(composed[i], right[i]) +
                                  2.0 * tolerance_of(dtype).relative);
                }
    });
}

TEST_CASE("attention: dropout keeps the mean, draws the same weights in both forms, and again in backward") {
    on_each_device([] {
        // Uniform weights over 1000 keys of value 1: each output is the mean of 1000 factors 0 or 2.
        const Tensor q = zeros({1, 1, 1000, 4});
        const Tensor k = ones({1, 1, 1000, 4});
        const Tensor v = ones({1, 1, 1000, 1});
        manual_seed(4);
        const Tensor y = scaled_dot_product_attention(q, k, v, {.dropout = 0.5});
        CHECK(std::fabs(y.mean().item() - 1.0) < 0.005);
        for (const double value : y.to_vector()) {
            const double kept = value * 500.0;
            CHECK(std::fabs(kept - std::round(kept)) < 1e-2);
            CHECK(std::fabs(kept - 500.0) < 100.0);
        }

        const std::vector<Tensor> x = random_qkv({2, 4, 2, 70, 90, 8, 8}, DType::f64);
        manual_seed(4);
        const std::vector<Tensor> fused = run(scaled_dot_product_attention, x, DType::f64, {.dropout = 0.3});
        manual_seed(4);
        const std::vector<Tensor> composed = run(attention_composed, x, DType::f64, {.dropout = 0.3});
        for (std::size_t i = 0; i < fused.size(); ++i) CHECK(relative_error(fused[i], composed[i]) < 1e-12);
    });
}

TEST_CASE("attention: long sequences take little memory, and any number of threads gives the same bits") {
    const std::vector<Tensor> x = random_qkv({1, 2, 1, 3000, 3000, 8, 8}, DType::f32);
    release_cached_memory();
    reset_peak_memory();
    const std::int64_t before = memory_statistics().current;
    set_threads(1);
    const std::vector<Tensor> one = run(scaled_dot_product_attention, x, DType::f32, {.causal = true});
    CHECK(memory_statistics().peak - before < 4 << 20);  // the matrices of weights would take 72 MB
    for (const int count : {2, 3}) {
        set_threads(count);
        const std::vector<Tensor> many = run(scaled_dot_product_attention, x, DType::f32, {.causal = true});
        for (std::size_t i = 0; i < one.size(); ++i) CHECK(many[i].to_vector() == one[i].to_vector());
    }
    set_threads(0);
}

TEST_CASE("attention: large scores do not overflow, NaN stays NaN") {
    on_each_device([] {
        std::vector<Tensor> x = random_qkv({1, 1, 1, 3, 70, 4, 4}, DType::f32);
        const Tensor y = scaled_dot_product_attention(x[0] * 1e15, x[1] * 1e15, x[2]);
        CHECK(all(is_finite(y)).item<bool>());
        Tensor k = x[1].detach().clone();
        k.select(2, 66).fill_(std::nan(""));
        const Tensor spoilt = scaled_dot_product_attention(x[0], k, x[2]);
        CHECK(all(is_nan(spoilt)).item<bool>());
        // A hidden key may contain anything.
        const Tensor hidden = scaled_dot_product_attention(x[0], k, x[2], {.mask = arange(0, 70) != 66});
        CHECK(all(is_finite(hidden)).item<bool>());
    });
}

}  // namespace potluck::test
