#include "autograd/ops/matmul.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numbers>

#include "autograd/tape.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

/// (.., m, k) x (.., k, n) with broadcast batches, by the definition.
Array product(Array a, Array b) {
    const bool row = a.shape.size() == 1;
    const bool column = b.shape.size() == 1;
    if (row) a.shape.insert(a.shape.begin(), 1);
    if (column) b.shape.push_back(1);
    const std::size_t rank = std::max(a.shape.size(), b.shape.size());
    while (a.shape.size() < rank) a.shape.insert(a.shape.begin(), 1);
    while (b.shape.size() < rank) b.shape.insert(b.shape.begin(), 1);
    const std::int64_t inner = a.shape[rank - 1];
    Shape shape;
    for (std::size_t i = 0; i + 2 < rank; ++i) shape.push_back(a.shape[i] == 1 ? b.shape[i] : a.shape[i]);
    shape.push_back(a.shape[rank - 2]);
    shape.push_back(b.shape[rank - 1]);
    Array y = from_indices(shape, [&](const std::vector<std::int64_t>& at) {
        std::vector<std::int64_t> left = at;
        std::vector<std::int64_t> right = at;
        for (std::size_t i = 0; i + 2 < rank; ++i) {
            if (a.shape[i] == 1) left[i] = 0;
            if (b.shape[i] == 1) right[i] = 0;
        }
        double total = 0.0;
        for (std::int64_t p = 0; p < inner; ++p) {
            left[rank - 1] = p;
            right[rank - 2] = p;
            total += a.values[static_cast<std::size_t>(position_at(a.shape, left))] *
                     b.values[static_cast<std::size_t>(position_at(b.shape, right))];
        }
        return total;
    });
    if (column) y.shape.pop_back();
    if (row) y.shape.erase(y.shape.end() - (column ? 1 : 2));
    return y;
}

Array transposed(const Array& x) {
    return from_indices({x.shape[1], x.shape[0]}, [&](const std::vector<std::int64_t>& at) {
        return x.values[static_cast<std::size_t>(position_at(x.shape, {at[1], at[0]}))];
    });
}

Array add_bias(const Array& x, const Array& bias) {
    return map(x, bias, [](double a, double b) { return a + b; });
}

}  // namespace

std::vector<Row> matmul_rows() {
    // Terms that cancel leave the rounding errors of many terms.
    Row matmul_row{.op = "matmul", .dtypes = number_dtypes(), .tolerance = 4.0};
    for (const auto& [a, b] : {std::pair<Shape, Shape>{{1, 1}, {1, 1}},
                               {{2, 3}, {3, 4}},
                               {{3}, {3}},
                               {{3}, {3, 2}},
                               {{2, 3}, {3}},
                               {{4}, {2, 4, 3}},
                               {{2, 3, 4}, {4}},
                               {{2, 3, 4}, {4, 5}},
                               {{4, 5}, {2, 5, 3}},
                               {{2, 3, 4}, {2, 4, 5}},
                               {{2, 1, 3, 2}, {5, 2, 4}},
                               {{0, 3}, {3, 2}},
                               {{2, 0}, {0, 3}},
                               {{2, 3}, {3, 0}},
                               {{0, 2, 3}, {3, 4}},
                               {{17, 129}, {129, 3}},
                               {{1, 129}, {129, 65}},
                               {{70, 33}, {33, 130}},
                               {{3, 65, 7}, {3, 7, 33}}})
        matmul_row.cases.push_back(
            {.inputs = {{.shape = a}, {.shape = b}},
             .call = call([](const Tensor& x, const Tensor& y) { return matmul(x, y); }),
             .reference = reference(product)});
    matmul_row.refusals = {
        {[] {
             matmul(ones({4, 3}), ones({5, 2}));
         },
         {"[matmul]", "(4, 3)", "(5, 2)"}},
        {[] { matmul(ones({3}), ones({4})); }, {"[matmul]", "3", "4"}},
        {[] {
             matmul(ones({2, 4, 3}), ones({3, 3, 2}));
         },
         {"[matmul]", "2", "3"}},
        {[] { matmul(ones({}), ones({3})); }, {"[matmul]", "()"}},
        {[] {
             matmul(ones({2, 2}, {DType::boolean}), ones({2, 2}, {DType::boolean}));
         },
         {"[matmul]", "bool"}},
        {[] {
             matmul(Tensor(), ones({2, 2}));
         },
         {"[matmul]"}},
    };

    Row linear_row{.op = "linear", .dtypes = floating_dtypes(), .tolerance = 4.0};
    for (const auto& [x, out] : {std::pair<Shape, std::int64_t>{{3}, 2},
                                 {{2, 3}, 4},
                                 {{2, 2, 3}, 1},
                                 {{0, 3}, 2},
                                 {{2, 0}, 3},
                                 {{2, 3}, 0},
                                 {{17, 129}, 3},
                                 {{2, 33, 65}, 70}}) {
        const Shape weight{out, x.back()};
        linear_row.cases.push_back(
            {.inputs = {{.shape = x}, {.shape = weight}, {.shape = {out}}},
             .call = call(
                 [](const Tensor& input, const Tensor& w, const Tensor& b) { return linear(input, w, b); }),
             .reference = reference([](const Array& input, const Array& w, const Array& b) {
                 return add_bias(product(input, transposed(w)), b);
             })});
        linear_row.cases.push_back(
            {.inputs = {{.shape = x}, {.shape = weight}},
             .call = call([](const Tensor& input, const Tensor& w) { return linear(input, w); }),
             .reference =
                 reference([](const Array& input, const Array& w) { return product(input, transposed(w)); }),
             .note = "no bias"});
        linear_row.cases.push_back(
            {.inputs = {{.shape = x}, {.shape = {x.back(), out}}, {.shape = {out}}},
             .call = call([](const Tensor& input, const Tensor& w, const Tensor& b) {
                 return linear(input, w, b, WeightLayout::in_out);
             }),
             .reference = reference([](const Array& input, const Array& w, const Array& b) {
                 return add_bias(product(input, w), b);
             }),
             .note = "weight (in, out)"});
    }
    linear_row.refusals = {
        {[] {
             linear(ones({4, 3}), ones({2, 4}));
         },
         {"[linear]", "(4, 3)", "(2, 4)"}},
        {[] {
             linear(ones({4, 3}), ones({2, 3}), ones({3}));
         },
         {"[linear]", "(2, 3)", "(3)"}},
        {[] {
             linear(ones({4, 3}), ones({2, 3}), {}, WeightLayout::in_out);
         },
         {"[linear]", "(4, 3)", "(3, out)", "(2, 3)", "transpose"}},
    };

    Row gelu_row{
        .op = "linear_gelu", .dtypes = floating_dtypes(), .tolerance = 4.0, .gradient_tolerance = 4.0};
    for (const auto& [x, out] : {std::pair<Shape, std::int64_t>{{3}, 2},
                                 {{2, 2, 3}, 8},
                                 {{0, 3}, 8},
                                 {{2, 0}, 8},
                                 {{17, 129}, 24},
                                 {{2, 33, 65}, 70}}) {
        const auto gelu_of = [](const Array& sums) {
            return map(sums, [](double v) {
                return 0.5 * v *
                       (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
            });
        };
        gelu_row.cases.push_back(
            {.inputs = {{.shape = x}, {.shape = {out, x.back()}}, {.shape = {out}}},
             .call = call([](const Tensor& input, const Tensor& w, const Tensor& b) {
                 return linear_gelu(input, w, b);
             }),
             .reference = reference([gelu_of](const Array& input, const Array& w, const Array& b) {
                 return gelu_of(add_bias(product(input, transposed(w)), b));
             })});
        gelu_row.cases.push_back(
            {.inputs = {{.shape = x}, {.shape = {x.back(), out}}, {.shape = {out}}},
             .call = call([](const Tensor& input, const Tensor& w, const Tensor& b) {
                 return linear_gelu(input, w, b, WeightLayout::in_out);
             }),
             .reference = reference([gelu_of](const Array& input, const Array& w, const Array& b) {
                 return gelu_of(add_bias(product(input, w), b));
             }),
             .note = "weight (in, out)"});
    }
    gelu_row.refusals = {
        {[] {
             linear_gelu(ones({4, 3}), ones({2, 4}), ones({2}));
         },
         {"[linear]", "(4, 3)", "(2, 4)"}},
    };
    return {matmul_row, linear_row, gelu_row};
}
const RowsOfFamily matmul_family(matmul_rows);

TEST_CASE("matmul: integers are exact, with all of their 64 bits") {
    on_each_device([] {
        const std::int64_t large = (std::int64_t{1} << 53) + 1;
        const Tensor x = tensor(std::vector<std::int64_t>{large, 1}, {1, 2});
        const Tensor y = tensor(std::vector<std::int64_t>{1, -2}, {2, 1});
        CHECK(matmul(x, y).item<std::int64_t>() == large - 2);
    });
}

TEST_CASE("matmul: half types are summed in f32") {
    on_each_device([] {
        for (const DType dtype : {DType::f16, DType::bf16}) {
            // A running sum in f16 stops at 2048, one in bf16 at 256.
            const Tensor y = matmul(ones({1, 8192}, {dtype}), ones({8192, 1}, {dtype}));
            CHECK(y.item() == 8192.0);
        }
    });
}

TEST_CASE("matmul: products of half types over many tiles are those of f32, with any number of threads") {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        const Tensor a = randn({2, 530, 801}).to(dtype), b = randn({801, 500}).to(dtype);
        const Tensor exact = matmul(a.to(DType::f64), b.to(DType::f64));
        set_threads(1);
        const Tensor one = matmul(a, b);
        const Tensor turned = matmul(b.transpose(0, 1), a[0].transpose(0, 1));
        const Tolerance tolerance{tolerance_of(dtype).relative, 1e-4};
        CHECK(difference(one, {exact.shape(), exact.to_vector()}, tolerance) == "");
        CHECK(difference(turned.transpose(0, 1), {exact[0].shape(), exact[0].to_vector()}, tolerance) == "");
        for (const int threads : {2, 3}) {
            set_threads(threads);
            CHECK(matmul(a, b).to_vector() == one.to_vector());
            CHECK(matmul(b.transpose(0, 1), a[0].transpose(0, 1)).to_vector() == turned.to_vector());
        }
        set_threads(0);
    }
}

TEST_CASE("linear: the gradient of the bias is summed in f32 or better") {
    on_each_device([] {
        for (const DType dtype : {DType::bf16, DType::f16}) {
            Tensor bias = zeros({3}, {dtype});
            bias.set_requires_grad();
            const Tensor weight = zeros({3, 2}, {dtype});
            for (int micro_batch = 0; micro_batch < 4; ++micro_batch) {
                const Tensor y = linear(zeros({8, 1024, 2}, {dtype}), weight, bias);
                backward(y, {.gradient = ones(y.shape(), {dtype})});
                CHECK(bias.grad().to_vector() == std::vector<double>(3, 8192.0 * (micro_batch + 1)));
            }
        }
    });
}

}  // namespace potluck::test
