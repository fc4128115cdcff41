// Reductions of squares (norm, stddev, layer_norm, rms_norm, batch_norm) of numbers whose squares are out of range of
// their dtype, and their gradients.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/ops/batch_norm.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/norm.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

Tensor numbers(const std::vector<double>& values, DType dtype) {
    return tensor(values, {static_cast<std::int64_t>(values.size())}, {dtype});
}

void check_close(const Tensor& x, const std::vector<double>& expected, double epsilon = 1e-5) {
    const std::vector<double> values = x.to_vector<double>();
    REQUIRE(values.size() == expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        CAPTURE(i);
        CHECK(std::fabs(values[i] - expected[i]) <= epsilon * std::fabs(expected[i]));
    }
}

/// The scales that a dtype must handle: squares that are far too large or far too small.
std::vector<double> scales_of(DType dtype) {
    if (dtype == DType::f64) return {1.0, 1e200, 1e300, 1e-200, 1e-300};
    return {1.0, 1e30, 1e37, 1e-30, 1e-37};
}

Tensor gradient_of(const Tensor& given, const std::function<Tensor(const Tensor&)>& function,
                   bool create_graph) {
    Tensor x = given.clone();
    x.set_requires_grad();
    BackwardOptions options;
    options.create_graph = create_graph;
    return gradients(function(x), {x}, options)[0];
}

}  // namespace

TEST_CASE("squares: norm and stddev of numbers whose squares are out of range") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f64}) {
            for (const double scale : scales_of(dtype)) {
                CAPTURE(name_of(dtype));
                CAPTURE(scale);
                const Tensor x = numbers({3.0 * scale, 4.0 * scale}, dtype);
                check_close(norm(x), {5.0 * scale});
                const Tensor pair = numbers({scale, -scale}, dtype);
                check_close(stddev(pair), {std::sqrt(2.0) * scale});
                check_close(stddev(pair, {}, 0.0), {scale});
                for (const bool create_graph : {false, true}) {
                    check_close(gradient_of(
                                    x, [](const Tensor& t) { return norm(t); }, create_graph),
                                {0.6, 0.8});
                    check_close(gradient_of(
                                    pair, [](const Tensor& t) { return stddev(t); }, create_graph),
                                {std::sqrt(0.5), -std::sqrt(0.5)});
                }
                // Along both axes, with zeros in between.
                const Tensor rows = tensor({3.0 * scale, 0.0, 4.0 * scale, 0.0}, {2, 2}, {dtype});
                check_close(norm(rows, 2.0, {0}), {5.0 * scale, 0.0});
                check_close(norm(rows, 2.0, {1}), {3.0 * scale, 4.0 * scale});
                check_close(stddev(rows, {0}, 0.0), {0.5 * scale, 0.0});
            }
        }
        // Squares of very different magnitudes in one row.
        check_close(norm(numbers({1e-200, 1.0, 1e-300}, DType::f64)), {1.0});
        check_close(norm(numbers({1.0, 1e200, 1e-200, 1e200}, DType::f64)), {std::sqrt(2.0) * 1e200});
        check_close(norm(numbers({3e60, 4e60}, DType::f64).to(DType::f64)), {5e60});
        check_close(norm(full({40000}, 1e200, {DType::f64})), {200e200});
        check_close(norm(full({3, 40000}, 1e-200, {DType::f64}), 2.0, {1}), {200e-200, 200e-200, 200e-200});
        const double infinity = std::numeric_limits<double>::infinity();
        CHECK(norm(numbers({infinity, 1e200}, DType::f64)).item() == infinity);
        CHECK(std::isnan(norm(numbers({NAN, 1e200}, DType::f64)).item()));
        CHECK(norm(numbers({0.0, 0.0}, DType::f64)).item() == 0.0);
    });
}

TEST_CASE("squares: norms of rows and of channels whose squares are out of range") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f64}) {
            for (const double scale : scales_of(dtype)) {
                CAPTURE(name_of(dtype));
                CAPTURE(scale);
                const bool tiny = scale < 1.0;
                // Without epsilon the scale does not matter; the smallest numbers have a reciprocal only in f64.
                const double epsilon = tiny ? 0.0 : 1e-5;
                if (tiny && (scale < 1e-290 || (dtype == DType::f32 && scale < 1e-36))) continue;
                const Tensor x = tensor({scale, -scale, 3.0 * scale, scale}, {2, 2}, {dtype});
                check_close(layer_norm(x, {}, {}, epsilon), {1.0, -1.0, 1.0, -1.0}, 1e-4);
                check_close(rms_norm(x, {}, epsilon), {1.0, -1.0, 3.0 / std::sqrt(5.0), 1.0 / std::sqrt(5.0)},
                            1e-4);
                const BatchNormMode mode{.training = true, .epsilon = epsilon};
                const Tensor channels =
                    tensor({scale, 2.0 * scale, 3.0 * scale, 4.0 * scale}, {4, 1}, {dtype});
                const double root = std::sqrt(1.25);
                check_close(batch_norm(channels, {}, {}, {}, {}, mode),
                            {-1.5 / root, -0.5 / root, 0.5 / root, 1.5 / root}, 1e-4);
                // d y / d x scales with 1 / scale: the comparison multiplies by the scale.
                const Tensor weights = tensor({1.0, 2.0, 4.0, 8.0}, {2, 2}, {dtype});
                const auto of_rms = [&](const Tensor& t) {
                    return (rms_norm(t, {}, epsilon) * weights).sum();
                };
                const std::vector<double> plain = gradient_of(x, of_rms, false).to_vector<double>();
                const std::vector<double> composed = gradient_of(x, of_rms, true).to_vector<double>();
                for (std::size_t i = 0; i < 4; ++i)
                    CHECK(composed[i] * scale == doctest::Approx(plain[i] * scale).epsilon(1e-3));
                CHECK(std::fabs(plain[0] * scale - 1.5) < 1e-3);
            }
        }
        // With an epsilon, tiny rows stay small.
        check_close(rms_norm(full({1, 2}, 1e-200, {DType::f64}), {}, 1e-6), {1e-197, 1e-197});
        check_close(rms_norm(full({1, 2}, 1e-30), {}, 1e-6), {1e-27, 1e-27});
        check_close(layer_norm(full({1, 3}, 7.0, {DType::f64})), {0.0, 0.0, 0.0});
    });
}

}  // namespace potluck::test
