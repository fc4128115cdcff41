#include "autograd/ops/softmax.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/cpu/vector_math.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Array along_axis(const Array& x, std::int64_t axis, bool logarithm) {
    const Array largest = fold_slices(x, {axis}, true, [](const std::vector<double>& values) {
        double result = -infinity;
        for (const double value : values) result = std::max(result, value);
        return result;
    });
    const Array distance = map(x, largest, [](double a, double b) { return a - b; });
    const Array total = fold_slices(distance, {axis}, true, [](const std::vector<double>& values) {
        double result = 0.0;
        for (const double value : values) result += std::exp(value);
        return result;
    });
    return map(distance, total,
               [logarithm](double a, double b) { return logarithm ? a - std::log(b) : std::exp(a) / b; });
}

Row softmax_row(const char* name, Tensor (*op)(const Tensor&, std::int64_t), bool logarithm) {
    Row row{.op = name, .dtypes = number_dtypes(), .results = {floating_result}};
    for (const auto& [shape, axis] : {std::pair<Shape, std::int64_t>{{1}, 0},
                                      {{5}, -1},
                                      {{0}, 0},
                                      {{2, 0, 3}, 2},
                                      {{2, 0, 3}, 1},
                                      {{3, 17}, 1},
                                      {{17, 3}, 0},
                                      {{2, 3, 5}, 1},
                                      {{129, 2}, -2},
                                      {{4, 129}, -1},
                                      {{3, 11003}, -1}})
        for (const double range : {2.0, 30.0})
            row.cases.push_back({.inputs = {{.shape = shape, .low = -range, .high = range}},
                                 .call = call([op, axis = axis](const Tensor& x) { return op(x, axis); }),
                                 .reference = reference([axis = axis, logarithm](const Array& x) {
                                     return along_axis(x, axis, logarithm);
                                 }),
                                 .note = "axis " + std::to_string(axis)});
    const std::string told = std::string("[") + name + "]";
    row.refusals = {
        {[op] {
             op(ones({2, 3}), 2);
         },
         {told, "2"}},
        {[op] {
             op(ones({2, 3}), -3);
         },
         {told, "-3"}},
        {[op] { op(Tensor(), 0); }, {told}},
    };
    return row;
}

}  // namespace

std::vector<Row> softmax_rows() {
    return {softmax_row("softmax", softmax, false), softmax_row("log_softmax", log_softmax, true)};
}
const RowsOfFamily softmax_family(softmax_rows);

TEST_CASE("softmax: of a strided slice, a transposed and a repeated view is that of their copies") {
    on_each_device([] {
        std::vector<double> values;
        for (int i = 0; i < 16; ++i) values.push_back(0.1 * i);
        const Tensor x = tensor(values, {4, 4});
        const Tensor y = softmax(narrow(x, 1, 0, 2));
        for (std::int64_t row = 0; row < 4; ++row) {
            CHECK(y[row][0].item() == doctest::Approx(0.4750208).epsilon(1e-6));
            CHECK(y[row][1].item() == doctest::Approx(0.5249792).epsilon(1e-6));
        }
        CHECK(y.sum().item() == doctest::Approx(4.0).epsilon(1e-6));
        for (const Tensor& view : {transpose(x), x[1].expand({3, 4}), narrow(x, 1, 1, 1).expand({4, 3})}) {
            CHECK(softmax(view).to_vector() == softmax(view.clone()).to_vector());
            CHECK(softmax(view, 0).to_vector() == softmax(view.clone(), 0).to_vector());
        }
    });
}

TEST_CASE("softmax: nothing but -inf gives 0, its logarithm -inf, and the gradients are 0") {
    on_each_device([] {
        for (const DType dtype : floating_dtypes()) {
            Tensor x = tensor(std::vector<double>{1, 2, -infinity, -infinity}, {2, 2}, {dtype});
            x.set_requires_grad();
            const Tensor y = softmax(x);
            CHECK(y[1].to_vector() == std::vector<double>{0, 0});
            backward(y, {.gradient = tensor({{1, 0}, {1, 0}}, {dtype})});
            CHECK(x.grad()[1].to_vector() == std::vector<double>{0, 0});
            x.set_grad({});
            const Tensor z = log_softmax(x);
            CHECK(z[1].to_vector() == std::vector<double>{-infinity, -infinity});
            backward(z, {.gradient = tensor({{1, 0}, {1, 0}}, {dtype})});
            CHECK(x.grad()[1].to_vector() == std::vector<double>{0, 0});
            CHECK(x.grad()[0][0].item() == doctest::Approx(0.7310586).epsilon(1e-2));
        }
    });
}

TEST_CASE("softmax: logsumexp of a masked row is -inf and its gradient 0") {
    on_each_device([] {
        Tensor x = tensor({{1, 2}, {-infinity, -infinity}});
        x.set_requires_grad();
        const Tensor y = logsumexp(x, {-1});
        CHECK(y[0].item() == doctest::Approx(2.3132617).epsilon(1e-6));
        CHECK(y[1].item() == -infinity);
        backward(y, {.gradient = ones({2})});
        const std::vector<double> dx = x.grad().to_vector();
        CHECK(dx[0] == doctest::Approx(0.2689414).epsilon(1e-6));
        CHECK(dx[1] == doctest::Approx(0.7310586).epsilon(1e-6));
        CHECK(dx[2] == 0.0);
        CHECK(dx[3] == 0.0);
        CHECK(logsumexp(zeros({3, 0}), {-1}).to_vector() == std::vector<double>(3, -infinity));
    });
}

TEST_CASE("softmax: huge values do not overflow, and NaN stays NaN") {
    on_each_device([] {
        for (const DType dtype : {DType::f64, DType::f32}) {
            const Tensor y = softmax(tensor({1e30, 1e30, -1e30, 0.0}, {dtype}));
            CHECK(y.to_vector() == std::vector<double>{0.5, 0.5, 0, 0});
            for (const std::int64_t length : {2, 40, 5000}) {
                Tensor x = zeros({2, length}, {dtype});
                x.select(0, 1).select(0, length - 1).fill_(nan);
                const Tensor spoilt = softmax(x);
                CHECK(std::isfinite(spoilt[0].sum().item()));
                CHECK(std::isnan(spoilt[1][0].item()));
                CHECK(std::isnan(log_softmax(x)[1][0].item()));
            }
        }
    });
}

TEST_CASE("softmax: the exponential of weights is right to 1 ulp, 0 where it would be subnormal") {
    double largest = 0.0;
    for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 3571) {
        const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (!(x <= 87.0F)) continue;
        const double got = static_cast<double>(cpu::exponential_weight(x));
        if (x < -87.0F) {
            REQUIRE(got == 0.0);
            continue;
        }
        const double wanted = std::exp(static_cast<double>(x));
        largest = std::max(largest, std::fabs(got - wanted) / std::ldexp(1.0, std::ilogb(wanted) - 23));
    }
    CHECK(largest <= 1.0);
    CHECK(cpu::exponential_weight(0.0F) == 1.0F);
    CHECK(cpu::exponential_weight(-std::numeric_limits<float>::infinity()) == 0.0F);
    CHECK(std::isnan(cpu::exponential_weight(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace potluck::test
