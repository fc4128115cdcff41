// Attention: keys that a query may not see do not affect its results, whatever they contain.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "autograd/ops/attention.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/on_device.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

using Op = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const Attention&);
constexpr Op fused = scaled_dot_product_attention;
constexpr Op both_ops[] = {scaled_dot_product_attention, attention_composed};

enum class Hiding : std::uint8_t { causal, boolean, floating, causal_and_padding };
constexpr Hiding all_hidings[] = {Hiding::causal, Hiding::boolean, Hiding::floating,
                                  Hiding::causal_and_padding};

struct Sizes {
    std::int64_t batch, heads, kv_heads, queries, keys, head_size, value_size;
};

/// Deterministic numbers for choices, independent of those of the tensors.
class Choice {
public:
    explicit Choice(std::uint64_t seed) : seed_(seed) {}
    /// One of 0 .. count - 1.
    std::size_t operator()(std::size_t count) { return philox({seed_, 0}, next_++)[0] % count; }

private:
    std::uint64_t seed_, next_ = 0;
};

/// Inputs in f64 on the CPU, and which key each query sees (one table for all heads of a batch).
struct Sample {
    Sizes sizes;
    Attention options;         // without the mask
    std::vector<double> mask;  // (batch, 1, queries, keys), as bool or numbers to add; empty: none
    bool is_boolean = true;
    std::vector<char> sees;     // (batch, queries, keys)
    std::vector<Tensor> clean;  // q k v dy, finite

    bool query_sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
        return sees[static_cast<std::size_t>((b * sizes.queries + i) * sizes.keys + j)] != 0;
    }
};

Sample sample_of(const Sizes& s, Hiding hiding, double dropout) {
    Sample sample;
    sample.sizes = s;
    sample.options.dropout = dropout;
    sample.options.causal = hiding == Hiding::causal || hiding == Hiding::causal_and_padding;
    sample.is_boolean = hiding != Hiding::floating;
    Choice choose(static_cast<std::uint64_t>(s.queries * 1000 + s.keys));
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t i = 0; i < s.queries; ++i)
            for (std::int64_t j = 0; j < s.keys; ++j) {
                bool is_seen = true;
                if (hiding == Hiding::boolean || hiding == Hiding::floating) is_seen = choose(3) != 0;
                if (hiding == Hiding::causal_and_padding) is_seen = j + b + 1 < s.keys && j % 3 != 2;
                if (hiding != Hiding::causal)
                    sample.mask.push_back(sample.is_boolean ? (is_seen ? 1.0 : 0.0)
                                                            : (is_seen ? 0.25 : -infinity));
                if (sample.options.causal) is_seen = is_seen && j <= i + s.keys - s.queries;
                sample.sees.push_back(is_seen ? 1 : 0);
            }
    Generator generator(3);
    for (const Shape& shape :
         {Shape{s.batch, s.heads, s.queries, s.head_size}, Shape{s.batch, s.kv_heads, s.keys, s.head_size},
          Shape{s.batch, s.kv_heads, s.keys, s.value_size}, Shape{s.batch, s.heads, s.queries, s.value_size}})
        sample.clean.push_back(randn(shape, {DType::f64}, &generator));
    return sample;
}

/// A copy of x (batch, heads, rows, columns) with `value` at several columns of a row, for all heads.
void spoil(Tensor& x, std::int64_t b, std::int64_t row, Choice& choose) {
    constexpr double values[] = {nan, infinity, -infinity};
    for (std::int64_t h = 0; h < x.size(1); ++h)
        for (std::int64_t c = 0; c < x.size(3); ++c)
            if (c == 0 || choose(2) == 0)
                x.data<double>()[((b * x.size(1) + h) * x.size(2) + row) * x.size(3) + c] = values[choose(3)];
}

/// y, dq, dk, dv, and dmask for a floating mask.
std::vector<Tensor> results(Op op, const Sample& sample, const std::vector<Tensor>& inputs, DType dtype) {
    manual_seed(8);
    const Device device = test_device();
    std::vector<Tensor> x;
    for (const Tensor& input : inputs) x.push_back(to(input, dtype).to(device).clone());
    for (std::size_t i = 0; i < 3; ++i) x[i].set_requires_grad();
    Attention options = sample.options;
    const Sizes& s = sample.sizes;
    if (!sample.mask.empty()) {
        const DType of_mask = sample.is_boolean ? DType::boolean : dtype;
        options.mask =
            to(tensor(sample.mask, {s.batch, 1, s.queries, s.keys}, {DType::f64}), of_mask).clone();
        if (!sample.is_boolean) options.mask.set_requires_grad();
    }
    const Tensor y = op(x[0], x[1], x[2], options);
    backward(y, {.gradient = x[3]});
    std::vector<Tensor> found{y.detach(), x[0].grad(), x[1].grad(), x[2].grad()};
    if (!sample.is_boolean) found.push_back(options.mask.grad());
    return found;
}

/// Checks that the rows of got and right (batch, heads, rows, columns) for which `counts` holds are finite and equal.
template <class Counts>
void check_rows(const Tensor& got, const Tensor& right, Counts counts) {
    const std::vector<double> a = got.to_vector();
    const std::vector<double> b = right.to_vector();
    REQUIRE(a.size() == b.size());
    const std::int64_t rows = got.size(2), columns = got.size(3);
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const auto row = static_cast<std::int64_t>(i) / columns;
        if (!counts(row / rows / got.size(1), row % rows)) continue;
        if (!std::isfinite(a[i]) || a[i] != b[i]) ++wrong;
    }
    CHECK(wrong == 0);
}

/// Puts infinity and NaN into random keys and values, and into queries that see no key; results that do not depend on
/// them must not change.
void check_hidden(Op op, const Sizes& s, Hiding hiding, double dropout, DType dtype) {
    INFO("sizes " << s.batch << " " << s.heads << " " << s.kv_heads << " " << s.queries << " " << s.keys
                  << " " << s.head_size << " " << s.value_size << " " << name_of(dtype) << ", hiding "
                  << static_cast<int>(hiding) << ", dropout " << dropout
                  << std::string(op == fused ? "" : ", composed"));
    const Sample sample = sample_of(s, hiding, dropout);
    std::vector<Tensor> inputs;
    for (const Tensor& x : sample.clean) inputs.push_back(x.clone());
    Choice choose(7);
    std::vector<char> is_bad(static_cast<std::size_t>(s.batch * s.keys), 0);
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t j = 0; j < s.keys; ++j) {
            // The last key too, which under causality only the last query sees.
            if (j + 1 < s.keys && choose(static_cast<std::size_t>(s.keys)) > 1) continue;
            is_bad[static_cast<std::size_t>(b * s.keys + j)] = 1;
            const std::size_t which = choose(3);
            if (which != 1) spoil(inputs[1], b, j, choose);
            if (which != 0) spoil(inputs[2], b, j, choose);
        }
    // A query that sees no key, and one that sees a bad key, do not affect the gradients of keys that they do not see.
    std::vector<char> is_clean_query, sees_nothing;
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t i = 0; i < s.queries; ++i) {
            bool is_clean = true, sees_any = false;
            for (std::int64_t j = 0; j < s.keys; ++j) {
                if (!sample.query_sees(b, i, j)) continue;
                sees_any = true;
                if (is_bad[static_cast<std::size_t>(b * s.keys + j)] != 0) is_clean = false;
            }
            is_clean_query.push_back(is_clean ? 1 : 0);
            sees_nothing.push_back(sees_any ? 0 : 1);
            if (!sees_any) spoil(inputs[0], b, i, choose);
        }
    const std::vector<Tensor> right = results(op, sample, sample.clean, dtype);
    const std::vector<Tensor> got = results(op, sample, inputs, dtype);
    const auto of_clean_query = [&](std::int64_t b, std::int64_t i) {
        return is_clean_query[static_cast<std::size_t>(b * s.queries + i)] != 0;
    };
    const auto of_clean_key = [&](std::int64_t b, std::int64_t j) {
        for (std::int64_t i = 0; i < s.queries; ++i)
            if (sample.query_sees(b, i, j) && !of_clean_query(b, i)) return false;
        return true;
    };
    const char* names[] = {"y", "dq", "dk", "dv", "dmask"};
    for (std::size_t i = 0; i < got.size(); ++i) {
        INFO(names[i]);
        if (i == 2 || i == 3)
            check_rows(got[i], right[i], of_clean_key);
        else
            check_rows(got[i], right[i], of_clean_query);
    }
    // A visible key has an effect: the last query sees the last key unless a mask hides it.
    if (hiding == Hiding::causal) CHECK(!std::isfinite(got[0].to_vector().back() + got[0].sum().item()));
}

}  // namespace

TEST_CASE("attention: a hidden key gives nothing, whatever stands in it") {
    on_each_device([] {
        for (const Op op : both_ops)
            for (const DType dtype : floating_dtypes())
                for (const double bad : {6.0, nan, infinity, -infinity}) {
                    Tensor x = arange(0, 8, 1, {DType::f64}).reshape({1, 1, 2, 4}).clone();
                    x.narrow(2, 1, 1).fill_(bad);
                    const Tensor q = to(arange(0, 8, 1, {DType::f64}).reshape({1, 1, 2, 4}), dtype);
                    Tensor k = to(x, dtype).clone().set_requires_grad();
                    Tensor v = to(x, dtype).clone().set_requires_grad();
                    const Tensor hiding_masks[] = {tensor({1, 0}, {DType::boolean}),
                                                   to(tensor({0.0, -infinity}), dtype)};
                    for (const Tensor& mask : hiding_masks) {
                        const Tensor y = op(q, k, v, {.mask = mask});
                        CHECK(y.to_vector() == std::vector<double>{0, 1, 2, 3, 0, 1, 2, 3});
                        backward(y, {.gradient = ones(y.shape(), {dtype})});
                        CHECK(v.grad().to_vector() == std::vector<double>{2, 2, 2, 2, 0, 0, 0, 0});
                        CHECK(k.grad().to_vector() == std::vector<double>(8, 0.0));
                        k.set_grad({});
                        v.set_grad({});
                    }
                }
    });
}

TEST_CASE("attention: infinity and NaN reach only the queries that may see them, and their gradients") {
    on_each_device([] {
        const Sizes all_sizes[] = {{1, 1, 1, 4, 4, 4, 4},    {2, 2, 1, 1, 70, 5, 3},
                                   {1, 4, 2, 70, 70, 8, 20}, {1, 1, 1, 33, 130, 36, 7},
                                   {2, 1, 1, 66, 5, 16, 16}, {1, 1, 1, 130, 65, 70, 64}};
        for (const Op op : both_ops)
            for (const DType dtype : floating_dtypes())
                for (const Sizes& sizes : all_sizes)
                    for (const Hiding hiding : all_hidings)
                        for (const double dropout : {0.0, 0.3}) {
                            if (dropout > 0.0 && sizes.queries > 70) continue;
                            // The composed form is the same for all dtypes except for its casts.
                            if (op != fused && dtype != DType::f64) continue;
                            check_hidden(op, sizes, hiding, dropout, dtype);
                        }
    });
}

TEST_CASE(
    "attention: every head size that has a kernel of its own keeps infinity and NaN where they are seen") {
    on_each_device([] {
        for (const std::int64_t size : {32, 64, 96, 128, 256, 264})
            for (const DType dtype : {DType::f16, DType::bf16})
                for (const Hiding hiding : {Hiding::causal, Hiding::boolean})
                    check_hidden(scaled_dot_product_attention, {1, 2, 1, 40, 70, size, size}, hiding, 0.0,
                                 dtype);
        for (const DType dtype : {DType::f32, DType::f64})
            check_hidden(scaled_dot_product_attention, {1, 1, 1, 40, 70, 136, 130}, Hiding::causal, 0.0,
                         dtype);
    });
}

TEST_CASE("attention: one bad value at the end of a long causal text spoils the last output alone") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::bf16}) {
            Generator generator(2);
            const Tensor x = randn({1, 1, 300, 8}, {DType::f32}, &generator);
            Tensor spoiled = x.clone();
            spoiled.narrow(2, 299, 1).fill_(nan);
            const auto y = [&](const Tensor& v) {
                const Device device = test_device();
                const Tensor q = to(x, dtype).to(device);
                return scaled_dot_product_attention(q, q, to(v, dtype).to(device), {.causal = true})
                    .narrow(2, 0, 299)
                    .to_vector();
            };
            CHECK(y(spoiled) == y(x));
        }
    });
}

TEST_CASE("attention: second derivatives are those of what is seen") {
    on_each_device([] {
        const auto second = [](double hidden_value) {
            Generator generator(4);
            std::vector<Tensor> x;
            for (int i = 0; i < 3; ++i) x.push_back(randn({1, 2, 6, 4}, {DType::f64}, &generator));
            for (int i = 1; i < 3; ++i) x[static_cast<std::size_t>(i)].narrow(2, 3, 2).fill_(hidden_value);
            for (Tensor& input : x) input = input.to(test_device()).clone().set_requires_grad();
            const Tensor mask = tensor({1, 1, 1, 0, 0, 1}, {DType::boolean});
            const Tensor y = scaled_dot_product_attention(x[0], x[1], x[2], {.causal = true, .mask = mask});
            Tensor sum;
            for (const Tensor& first : gradients(square(y).sum(), x, {.create_graph = true}))
                sum = sum.defined() ? sum + square(first).sum() : square(first).sum();
            std::vector<double> all;
            for (const Tensor& found : gradients(sum, x))
                for (const double value : found.to_vector()) all.push_back(value);
            return all;
        };
        const std::vector<double> right = second(0.5);
        for (const double value : {nan, infinity, -infinity}) {
            const std::vector<double> got = second(value);
            REQUIRE(got.size() == right.size());
            double distance = 0.0;
            for (std::size_t i = 0; i < got.size(); ++i)
                if (!(std::fabs(got[i] - right[i]) <= distance)) distance = std::fabs(got[i] - right[i]);
            CHECK(distance < 1e-12);
        }
    });
}

}  // namespace potluck::test
