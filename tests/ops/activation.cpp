#include "autograd/ops/activation.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "autograd/ops/elementwise.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

double relu_of(double x) { return x < 0.0 ? 0.0 : x; }
double gelu_of(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double gelu_tanh_of(double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}
double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu_of(double x) { return x * sigmoid_of(x); }

template <class Function>
Row activation_row(const char* name, Function function, double (*expected)(double)) {
    Row row{.op = name};
    for (const Shape& shape : usual_shapes())
        row.cases.push_back(
            {.inputs = {{.shape = shape, .low = -4.0, .high = 4.0}},
             .call = call(function),
             .reference = reference([expected](const Array& x) { return map(x, expected); })});
    return row;
}

/// The largest error of a function of f32, in units in the last place, over floats of all magnitudes.
double largest_error(Tensor (*function)(const Tensor&), double (*expected)(double)) {
    constexpr std::uint32_t step = 3571;  // a prime: the low bits vary
    std::vector<float> inputs;
    for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += step) {
        const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (std::isfinite(x)) inputs.push_back(x);
    }
    const auto count = static_cast<std::int64_t>(inputs.size());
    const Tensor y = function(from_values<float>(inputs, {count}));
    const float* got = y.data<float>();
    double largest = 0.0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const double wanted = expected(static_cast<double>(inputs[i]));
        if (std::isnan(wanted)) {
            if (!std::isnan(got[i])) return infinity;
            continue;
        }
        if (std::fabs(wanted) < 0x1p-126 || std::fabs(wanted) > 0x1p127) continue;
        const double unit = std::ldexp(1.0, std::ilogb(wanted) - 23);
        const double error = std::fabs(static_cast<double>(got[i]) - wanted) / unit;
        if (!(error <= largest)) largest = std::isnan(error) ? infinity : error;
    }
    return largest;
}

}  // namespace

std::vector<Row> activation_rows() {
    Row gelu_row = activation_row(
        "gelu", [](const Tensor& x) { return gelu(x); }, gelu_of);
    const Row tanh_kind = activation_row(
        "gelu", [](const Tensor& x) { return gelu(x, GeluKind::tanh); }, gelu_tanh_of);
    for (Case sample : tanh_kind.cases) {
        sample.note = "tanh";
        gelu_row.cases.push_back(sample);
    }
    Row swiglu_row{.op = "swiglu", .dtypes = number_dtypes(), .results = {floating_result}};
    for (const auto& [gate, up] : usual_shape_pairs())
        swiglu_row.cases.push_back({.inputs = {{.shape = gate, .low = -4.0, .high = 4.0}, {.shape = up}},
                                    .call = call(swiglu),
                                    .reference = reference([](const Array& x, const Array& y) {
                                        return map(x, y, [](double a, double b) { return silu_of(a) * b; });
                                    })});
    swiglu_row.refusals = {
        {[] {
             swiglu(ones({2, 3}), ones({4, 3}));
         },
         {"[swiglu]", "(2, 3)", "(4, 3)"}},
        {[] { swiglu(Tensor(), ones({2})); }, {"[swiglu]"}},
        {[] { swiglu(ones({2}), Tensor()); }, {"[swiglu]"}},
    };
    return {swiglu_row,
            activation_row("relu", relu, relu_of),
            gelu_row,
            activation_row("silu", silu, silu_of),
            activation_row("tanh", tanh, [](double x) { return std::tanh(x); }),
            activation_row("sigmoid", sigmoid, sigmoid_of)};
}
const RowsOfFamily activation_family(activation_rows);

TEST_CASE("activation: NaN stays NaN, and the ends are right") {
    on_each_device([] {
        const Tensor x = tensor({nan, infinity, -infinity, -1e30, 1e30});
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
            INFO(name_of(dtype));
            for (const Tensor& y : {relu(x.to(dtype)), gelu(x.to(dtype)), gelu(x.to(dtype), GeluKind::tanh),
                                    silu(x.to(dtype))}) {
                CHECK(std::isnan(y[0].item()));
                CHECK(y[1].item() == infinity);
                CHECK(y[2].item() == 0.0);
                CHECK(y[3].item() == 0.0);
            }
            CHECK(std::isnan(tanh(x.to(dtype))[0].item()));
            CHECK(tanh(x.to(dtype))[1].item() == 1.0);
            CHECK(tanh(x.to(dtype))[2].item() == -1.0);
            CHECK(std::isnan(sigmoid(x.to(dtype))[0].item()));
            CHECK(sigmoid(x.to(dtype))[1].item() == 1.0);
            CHECK(sigmoid(x.to(dtype))[2].item() == 0.0);
        }
    });
}

TEST_CASE("activation: swiglu and its gradients are those of silu(gate) * up, in one pass each") {
    on_each_device([] {
        Generator generator(8);
        std::vector<Tensor> results[2];
        const Tensor gate = randn({7, 33}, {DType::f32, test_device()}, &generator);
        const Tensor up = randn({33}, {DType::f32, test_device()}, &generator);
        for (const bool fused : {true, false}) {
            Tensor a = (gate * 3.0).detach(), b = up.clone();
            a.set_requires_grad();
            b.set_requires_grad();
            const Tensor y = fused ? swiglu(a, b) : silu(a) * b;
            square(y).sum().backward();
            results[fused ? 0 : 1] = {y, a.grad(), b.grad()};
        }
        for (std::size_t i = 0; i < 3; ++i) {
            const std::vector<double> got = results[0][i].to_vector(), expected = results[1][i].to_vector();
            for (std::size_t k = 0; k < got.size(); ++k) REQUIRE(is_close(got[k], expected[k], {1e-5, 1e-6}));
        }
        CHECK(swiglu(tensor({infinity, -infinity, nan}), tensor({2, 2, 2})).to_vector<float>()[0] ==
              std::numeric_limits<float>::infinity());
        CHECK(swiglu(tensor({-infinity}), tensor({2})).item() == 0.0);
        CHECK(std::isnan(swiglu(tensor({nan}), tensor({2})).item()));
    });
}

TEST_CASE("activation: gradients far out are 0 or 1, never NaN") {
    on_each_device([] {
        for (const auto& function :
             {+[](const Tensor& x) { return relu(x); }, +[](const Tensor& x) { return gelu(x); },
              +[](const Tensor& x) { return gelu(x, GeluKind::tanh); },
              +[](const Tensor& x) { return silu(x); }}) {
            Tensor x = tensor({infinity, -infinity, 1e4, -1e4});
            x.set_requires_grad();
            function(x).sum().backward();
            CHECK(x.grad().to_vector() == std::vector<double>{1.0, 0.0, 1.0, 0.0});
        }
    });
}

TEST_CASE("activation: relu has gradient 0 at 0") {
    on_each_device([] {
        Tensor x = tensor({0.0, -1.0, 2.0});
        x.set_requires_grad();
        relu(x).sum().backward();
        CHECK(x.grad().to_vector() == std::vector<double>{0.0, 0.0, 1.0});
    });
}

TEST_CASE("activation: the f32 functions keep the stated error over the whole range") {
    CHECK(largest_error(exp, [](double x) { return std::exp(x); }) < 1.0);
    CHECK(largest_error(log, [](double x) { return std::log(x); }) < 2.0);
    CHECK(largest_error(tanh, [](double x) { return std::tanh(x); }) < 2.0);
    CHECK(largest_error(erf, [](double x) { return std::erf(x); }) < 2.0);
    CHECK(largest_error(sigmoid, sigmoid_of) < 3.0);
    CHECK(largest_error([](const Tensor& x) { return gelu(x); }, gelu_of) < 8.0);
}

}  // namespace potluck::test
