#include "autograd/ops/norm.h"

#include <doctest/doctest.h>

#include <cmath>

#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

Array normalised(const Array& x, double epsilon, bool centered) {
    const auto mean = [](const std::vector<double>& values) {
        double total = 0.0;
        for (const double value : values) total += value;
        return total / static_cast<double>(values.size());
    };
    Array y = x;
    if (centered) y = map(x, fold_slices(x, {-1}, true, mean), [](double a, double b) { return a - b; });
    const Array mean_square =
        fold_slices(map(y, [](double value) { return value * value; }), {-1}, true, mean);
    return map(y, mean_square, [epsilon](double a, double b) { return a / std::sqrt(b + epsilon); });
}

Array multiply(const Array& x, const Array& y) {
    return map(x, y, [](double a, double b) { return a * b; });
}

std::vector<Shape> norm_shapes() {
    return {{2}, {17}, {0, 3}, {3, 17}, {2, 2, 5}, {129, 2}, {5, 129}, {40, 768}, {2, 3000}};
}

Array add(const Array& x, const Array& y) {
    return map(x, y, [](double a, double b) { return a + b; });
}

/// Integers, so that the sum with the residual is exact in every dtype.
Input whole_input(const Shape& shape) { return {.shape = shape, .low = -8.0, .high = 8.0, .whole = true}; }

Row add_layer_row() {
    Row row{.op = "add_layer_norm", .tolerance = 2.0, .gradient_tolerance = 2.0};
    for (const Shape& shape : norm_shapes()) {
        const Input x = whole_input(shape), parameter{.shape = {shape.back()}};
        row.cases.push_back({.inputs = {x, x, parameter, parameter},
                             .call = call([](const Tensor& input, const Tensor& residual,
                                             const Tensor& weight, const Tensor& bias) {
                                 return add_layer_norm(input, residual, weight, bias, 1e-3);
                             }),
                             .reference = [](const std::vector<Array>& in) -> std::vector<Array> {
                                 const Array sum = add(in[0], in[1]);
                                 return {sum, add(multiply(normalised(sum, 1e-3, true), in[2]), in[3])};
                             }});
    }
    row.refusals = {{[] {
                         add_layer_norm(ones({2, 3}), ones({3}));
                     },
                     {"[add_layer_norm]", "(2, 3)", "(3)"}},
                    {[] {
                         add_layer_norm(ones({2, 3}), {});
                     },
                     {"[add_layer_norm]", "residual"}},
                    {[] {
                         add_layer_norm(ones({2, 3}), ones({2, 3}), ones({2}));
                     },
                     {"[add_layer_norm]", "(2, 3)", "(2)"}}};
    return row;
}

Row add_rms_row() {
    Row row{.op = "add_rms_norm", .tolerance = 2.0, .gradient_tolerance = 2.0};
    for (const Shape& shape : norm_shapes()) {
        const Input x = whole_input(shape), parameter{.shape = {shape.back()}};
        row.cases.push_back(
            {.inputs = {x, x, parameter},
             .call = call([](const Tensor& input, const Tensor& residual, const Tensor& weight) {
                 return add_rms_norm(input, residual, weight, 1e-3);
             }),
             .reference = [](const std::vector<Array>& in) -> std::vector<Array> {
                 const Array sum = add(in[0], in[1]);
                 return {sum, multiply(normalised(sum, 1e-3, false), in[2])};
             }});
    }
    row.refusals = {{[] {
                         add_rms_norm(ones({2, 3}), ones({3}));
                     },
                     {"[add_rms_norm]", "(2, 3)", "(3)"}},
                    {[] {
                         add_rms_norm(ones({2, 3}), ones({2, 3}), ones({2}));
                     },
                     {"[add_rms_norm]", "(2, 3)", "(2)"}}};
    return row;
}

}  // namespace

std::vector<Row> norm_rows() {
    Row layer_row{.op = "layer_norm", .tolerance = 2.0, .gradient_tolerance = 2.0};
    Row rms_row{.op = "rms_norm", .tolerance = 2.0, .gradient_tolerance = 2.0};
    for (const Shape& shape : norm_shapes()) {
        const Input x{.shape = shape};
        const Input parameter{.shape = {shape.back()}};
        layer_row.cases.push_back(
            {.inputs = {x, parameter, parameter},
             .call = call([](const Tensor& input, const Tensor& weight, const Tensor& bias) {
                 return layer_norm(input, weight, bias, 1e-3);
             }),
             .reference = reference([](const Array& input, const Array& weight, const Array& bias) {
                 return map(multiply(normalised(input, 1e-3, true), weight), bias,
                            [](double a, double b) { return a + b; });
             })});
        layer_row.cases.push_back({.inputs = {x, parameter},
                                   .call = call([](const Tensor& input, const Tensor& weight) {
                                       return layer_norm(input, weight, {}, 1e-3);
                                   }),
                                   .reference = reference([](const Array& input, const Array& weight) {
                                       return multiply(normalised(input, 1e-3, true), weight);
                                   }),
                                   .note = "no bias"});
        layer_row.cases.push_back(
            {.inputs = {x},
             .call = call([](const Tensor& input) { return layer_norm(input, {}, {}, 1e-3); }),
             .reference = reference([](const Array& input) { return normalised(input, 1e-3, true); }),
             .note = "plain"});
        rms_row.cases.push_back({.inputs = {x, parameter},
                                 .call = call([](const Tensor& input, const Tensor& weight) {
                                     return rms_norm(input, weight, 1e-3);
                                 }),
                                 .reference = reference([](const Array& input, const Array& weight) {
                                     return multiply(normalised(input, 1e-3, false), weight);
                                 })});
        rms_row.cases.push_back(
            {.inputs = {x},
             .call = call([](const Tensor& input) { return rms_norm(input, {}, 1e-3); }),
             .reference = reference([](const Array& input) { return normalised(input, 1e-3, false); }),
             .note = "plain"});
    }
    layer_row.refusals = {
        {[] {
             layer_norm(ones({2, 3}), ones({2}));
         },
         {"[layer_norm]", "(2, 3)", "(2)"}},
        {[] {
             layer_norm(ones({2, 3}), ones({3}), ones({3, 1}));
         },
         {"[layer_norm]", "(3, 1)"}},
        {[] {
             layer_norm(ones({2, 3}), {}, {}, -1.0);
         },
         {"[layer_norm]", "-1"}},
        {[] {
             layer_norm(ones({2, 3}, {DType::i64}));
         },
         {"[layer_norm]", "i64"}},
        {[] { layer_norm(ones({})); }, {"[layer_norm]", "()"}},
    };
    rms_row.refusals = {
        {[] {
             rms_norm(ones({2, 3}), ones({2}));
         },
         {"[rms_norm]", "(2, 3)", "(2)"}},
        {[] {
             rms_norm(ones({2, 3}), {}, std::nan(""));
         },
         {"[rms_norm]", "nan"}},
        {[] { rms_norm(ones({})); }, {"[rms_norm]", "()"}},
    };
    return {layer_row, rms_row, add_layer_row(), add_rms_row()};
}
const RowsOfFamily norm_family(norm_rows);

TEST_CASE("norm: a constant row is the bias, with an epsilon that half types do not hold") {
    on_each_device([] {
        for (const DType dtype : floating_dtypes())
            for (const double value : {0.0, 3.0, 0.1})
                for (const std::int64_t width : {10, 768}) {
                    Tensor x = full({1, width}, value, {dtype});
                    x.set_requires_grad();
                    const Tensor y =
                        layer_norm(x, ones({width}, {dtype}), full({width}, 0.5, {dtype}), 1e-12);
                    CHECK(y.to_vector() == std::vector<double>(static_cast<std::size_t>(width), 0.5));
                    backward(y, {.gradient = ones(y.shape(), {dtype})});
                    for (const double slope : x.grad().to_vector()) CHECK(slope == 0.0);
                }
    });
}

TEST_CASE("norm: rows far from 0 keep their shape") {
    on_each_device([] {
        for (const double shift : {2000.0, 20000.0}) {
            const Tensor x = tensor({shift, shift + 1, shift - 1, shift + 4});
            const std::vector<double> y = layer_norm(x).to_vector();
            const std::vector<double> expected{-0.5345217, 0.0, -1.0690434, 1.6035652};
            for (std::size_t i = 0; i < 4; ++i) CHECK(std::fabs(y[i] - expected[i]) < 1e-3);
        }
    });
}

TEST_CASE("norm: rms_norm of values whose squares are too large for their dtype") {
    on_each_device([] {
        for (const auto& [dtype, value] : {std::pair{DType::f16, 8192.0},
                                           {DType::bf16, 8192.0},
                                           {DType::bf16, 0x1p100},
                                           {DType::f32, 0x1p100},
                                           {DType::f64, 0x1p400}})
            for (const std::int64_t width : {4096, 64, 3}) {
                std::vector<double> values;
                for (std::int64_t i = 0; i < width; ++i) values.push_back(i % 2 == 0 ? value : -value);
                Tensor x = tensor(values, {1, width}, {dtype});
                x.set_requires_grad();
                const Tensor y = rms_norm(x, ones({width}, {dtype}), 1e-6);
                for (std::int64_t i = 0; i < width; ++i)
                    CHECK(y[0][i].item() == doctest::Approx(i % 2 == 0 ? 1.0 : -1.0).epsilon(1e-6));
                backward(y, {.gradient = ones(y.shape(), {dtype})});
                for (const double slope : x.grad().to_vector()) CHECK(std::isfinite(slope));
                const Tensor z = layer_norm(x, {}, {}, 1e-6);
                if (width % 2 == 0) CHECK(z[0][0].item() == doctest::Approx(1.0).epsilon(1e-6));
            }
    });
}

TEST_CASE("norm: sums and distances that leave the range of the dtype") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f64}) {
            const double large = dtype == DType::f32 ? 3e38 : 1.7e308;
            for (const std::int64_t width : {4, 64, 3000}) {
                CAPTURE(width);
                const auto n = static_cast<std::size_t>(width);
                // One of four is large, the others as far below 0: distances from the mean are 1.5 and -0.5 of it.
                std::vector<double> values(n), expected(n);
                for (std::size_t i = 0; i < n; ++i) {
                    values[i] = i % 4 == 0 ? large : -large;
                    expected[i] = (i % 4 == 0 ? 1.5 : -0.5) / std::sqrt(0.75);
                }
                Tensor x = tensor(values, {1, width}, {dtype});
                x.set_requires_grad();
                Tensor weight = ones({width}, {dtype});
                weight.set_requires_grad();
                const Tensor y = layer_norm(x, weight);
                const std::vector<double> got = y.to_vector();
                for (std::size_t i = 0; i < n; ++i)
                    CHECK(got[i] == doctest::Approx(expected[i]).epsilon(1e-5));
                backward(y, {.gradient = ones(y.shape(), {dtype})});
                const std::vector<double> slopes = weight.grad().to_vector();
                for (std::size_t i = 0; i < n; ++i)
                    CHECK(slopes[i] == doctest::Approx(expected[i]).epsilon(1e-5));
                for (const double slope : x.grad().to_vector()) CHECK(std::isfinite(slope));
                // Two that cancel, and a row of equal ones.
                for (std::size_t i = 0; i < n; ++i) values[i] = i % 2 == 0 ? large : -large;
                CHECK(layer_norm(tensor(values, {1, width}, {dtype}))[0][1].item() ==
                      doctest::Approx(-1.0).epsilon(1e-5));
                CHECK(layer_norm(full({1, width}, large, {dtype})).to_vector() ==
                      std::vector<double>(n, 0.0));
                CHECK(rms_norm(full({1, width}, large, {dtype}))[0][1].item() ==
                      doctest::Approx(1.0).epsilon(1e-5));
            }
        }
        // Reciprocals that f32 does not hold.
        for (const std::int64_t width : {2, 64, 3000}) {
            const Tensor x = full({1, width}, 1e-40);
            for (const double value : rms_norm(x, {}, 0.0).to_vector())
                CHECK(value == doctest::Approx(1.0).epsilon(1e-4));
            CHECK(layer_norm(x, {}, {}, 1e-90).to_vector() ==
                  std::vector<double>(static_cast<std::size_t>(width), 0.0));
        }
    });
}

TEST_CASE("norm: gradients over an input of rank 3, and of a row worked out by hand") {
    on_each_device([] {
        Tensor x = arange(0, 24, 1, {DType::f32}).reshape({2, 3, 4});
        Tensor weight = ones({4});
        Tensor bias = zeros({4});
        weight.set_requires_grad();
        bias.set_requires_grad();
        backward(layer_norm(x, weight, bias), {.gradient = x});
        CHECK(bias.grad().to_vector() == std::vector<double>{60, 66, 72, 78});
        const std::vector<double> dweight{-80.4981, -29.5160, 32.1993, 104.6476};
        for (std::size_t i = 0; i < 4; ++i)
            CHECK(weight.grad().to_vector()[i] == doctest::Approx(dweight[i]).epsilon(1e-5));

        Tensor row = tensor({1, 2, 4, 7});
        Tensor scale = tensor({1, 1, 2, 3});
        row.set_requires_grad();
        scale.set_requires_grad();
        backward(layer_norm(row, scale, zeros({4})), {.gradient = tensor({1, 0, -1, 2})});
        const std::vector<double> drow{0.800130, -0.000001, -1.600263, 0.800134};
        const std::vector<double> dscale{-1.091088, 0, -0.218218, 3.055048};
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(std::fabs(row.grad().to_vector()[i] - drow[i]) < 5e-6);
            CHECK(std::fabs(scale.grad().to_vector()[i] - dscale[i]) < 5e-6);
        }
    });
}

TEST_CASE("norm: gradients of parameters in half types are summed in f32 or better") {
    on_each_device([] {
        // The sums run along columns. In the emulator each element takes long: fewer columns are enough there.
        const std::int64_t width = test_device() == Device::cpu() ? 768 : 48;
        for (const DType dtype : {DType::bf16, DType::f16}) {
            Generator generator(3);
            const Tensor x = to(randn({8, 1024, width}, {DType::f32, test_device()}, &generator), dtype);
            Tensor weight = ones({width}, {dtype});
            Tensor bias = zeros({width}, {dtype});
            weight.set_requires_grad();
            bias.set_requires_grad();
            Tensor wide_weight = ones({width}, {DType::f64});
            wide_weight.set_requires_grad();
            const Tensor wide = layer_norm(to(x, DType::f64), wide_weight);
            backward(wide, {.gradient = ones(wide.shape(), {DType::f64})});
            const std::vector<double> expected = wide_weight.grad().to_vector();
            for (int micro_batch = 1; micro_batch <= 4; ++micro_batch) {
                const Tensor y = layer_norm(x, weight, bias);
                backward(y, {.gradient = ones(y.shape(), {dtype})});
                CHECK(bias.grad().to_vector() == std::vector<double>(expected.size(), 8192.0 * micro_batch));
                if (micro_batch > 1) continue;
                const std::vector<double> got = weight.grad().to_vector();
                for (std::size_t i = 0; i < got.size(); ++i)
                    REQUIRE(std::fabs(got[i] - expected[i]) <= 0.01 * std::fabs(expected[i]) + 1e-3);
            }
        }
    });
}

TEST_CASE("norm: NaN and infinity are not hidden") {
    on_each_device([] {
        for (const double value : {std::nan(""), HUGE_VAL}) {
            const Tensor x = tensor({{1, 2}, {value, 1}});
            for (const Tensor& y : {layer_norm(x), rms_norm(x)}) {
                CHECK(std::isfinite(y[0][0].item()));
                CHECK(std::isnan(y[1][0].item()));
            }
        }
    });
}

TEST_CASE("norm: add and norm is the sum and its norm, to the bit") {
    on_each_device([] {
        Generator generator(5);
        for (const DType dtype : floating_dtypes())
            for (const std::int64_t width : {7, 64, 3000}) {
                std::vector<Tensor> gradients;
                std::vector<Tensor> outputs;
                const Tensor given = to(randn({5, width}, {DType::f32, test_device()}, &generator), dtype);
                const Tensor residual = to(randn({5, width}, {DType::f32, test_device()}, &generator), dtype);
                for (const bool fused : {true, false}) {
                    Tensor x = given.clone();
                    x.set_requires_grad();
                    const Tensor weight = full({width}, 1.5, {dtype});
                    const auto [sum, y] = fused ? add_layer_norm(x, residual, weight)
                                                : std::pair{x + residual, layer_norm(x + residual, weight)};
                    const auto [rms_sum, rms_y] =
                        fused ? add_rms_norm(x, residual, weight)
                              : std::pair{x + residual, rms_norm(x + residual, weight)};
                    outputs.insert(outputs.end(), {sum, y, rms_sum, rms_y});
                    // The gradient of the residual is accumulated first, and the norm adds its own.
                    backward(y * y + sum, {.gradient = ones(y.shape(), {dtype})});
                    gradients.push_back(x.grad());
                }
                for (std::size_t i = 0; i < 4; ++i)
                    CHECK(outputs[i].to_vector() == outputs[i + 4].to_vector());
                const std::vector<double> fused = gradients[0].to_vector(),
                                          composed = gradients[1].to_vector();
                for (std::size_t i = 0; i < fused.size(); ++i)
                    REQUIRE(is_close(fused[i], composed[i], gradient_tolerance_of(dtype)));
            }
    });
}

TEST_CASE("norm: a residual of another dtype than the weight") {
    on_each_device([] {
        const Tensor x = tensor({{1.0, 2.0}}, {DType::bf16});
        const auto [sum, y] = add_layer_norm(x, x, ones({2}), {}, 0.0);
        CHECK(sum.dtype() == DType::bf16);
        CHECK(y.dtype() == DType::f32);
        CHECK(sum.to_vector() == std::vector<double>{2.0, 4.0});
        CHECK(y.to_vector() == std::vector<double>{-1.0, 1.0});
    });
}

}  // namespace potluck::test
