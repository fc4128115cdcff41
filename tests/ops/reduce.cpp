#include "autograd/ops/reduce.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/view.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Slices {
    Shape shape;
    Axes axes;
    bool keep_axes = false;
};

/// Shapes and axes: all, one, several, outer ones (summed along columns), kept axes, and rows that several threads
/// share.
std::vector<Slices> usual_slices(bool with_empty) {
    std::vector<Slices> all{
        {{}, {}},
        {{1}, {0}},
        {{17}, {}},
        {{3, 17}, {0}},
        {{3, 17}, {-1}, true},
        {{2, 3, 5}, {0, 2}},
        {{2, 3, 5}, {1}, true},
        {{2, 3, 5}, {2, 0, 1}},
        {{4, 1, 3}, {1}},
        {{0, 3}, {1}},
        {{129, 33}, {0}},
        {{5, 3, 40}, {0, 1}},
        {{2, 5, 40}, {1}},
        {{3000, 18}, {0}},
        {{70001}, {0}},
        {{2, 66000}, {1}},
        {{3, 11003}, {1}},
    };
    if (with_empty) {
        all.push_back({{0}, {}});
        all.push_back({{2, 0, 3}, {1}});
        all.push_back({{0, 3}, {0}, true});
    }
    return all;
}

using Fold = double (*)(const std::vector<double>&);

template <class Function>
Row reduce_row(const char* name, Function function, Fold expected, bool with_empty, bool whole = false) {
    Row row{.op = name};
    for (const Slices& slices : usual_slices(with_empty)) {
        std::string note;
        for (const std::int64_t axis : slices.axes) note += " " + std::to_string(axis);
        row.cases.push_back(
            {.inputs = {{.shape = slices.shape, .whole = whole}},
             .call = call([=](const Tensor& x) { return function(x, slices.axes, slices.keep_axes); }),
             .reference = reference(
                 [=](const Array& x) { return fold_slices(x, slices.axes, slices.keep_axes, expected); }),
             .note = "axes" + note});
    }
    return row;
}

double sum_of(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }
double mean_of(const std::vector<double>& x) { return sum_of(x) / static_cast<double>(x.size()); }
double max_of(const std::vector<double>& x) { return *std::max_element(x.begin(), x.end()); }
double min_of(const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); }
double argmax_of(const std::vector<double>& x) {
    return static_cast<double>(std::max_element(x.begin(), x.end()) - x.begin());
}
double argmin_of(const std::vector<double>& x) {
    return static_cast<double>(std::min_element(x.begin(), x.end()) - x.begin());
}
double any_of(const std::vector<double>& x) {
    return std::any_of(x.begin(), x.end(), [](double v) { return v != 0.0; }) ? 1.0 : 0.0;
}
double all_of(const std::vector<double>& x) {
    return std::all_of(x.begin(), x.end(), [](double v) { return v != 0.0; }) ? 1.0 : 0.0;
}
double variance_of(const std::vector<double>& x) {
    const double center = mean_of(x);
    double total = 0.0;
    for (const double v : x) total += (v - center) * (v - center);
    return x.size() < 2 ? nan : total / static_cast<double>(x.size() - 1);
}
double population_variance_of(const std::vector<double>& x) {
    return x.size() == 1 ? 0.0
                         : variance_of(x) * static_cast<double>(x.size() - 1) / static_cast<double>(x.size());
}
double deviation_of(const std::vector<double>& x) { return std::sqrt(variance_of(x)); }
double norm1_of(const std::vector<double>& x) {
    double total = 0.0;
    for (const double v : x) total += std::fabs(v);
    return total;
}
double norm2_of(const std::vector<double>& x) {
    double total = 0.0;
    for (const double v : x) total += v * v;
    return std::sqrt(total);
}
double norm_infinity_of(const std::vector<double>& x) {
    double largest = 0.0;
    for (const double v : x) largest = std::max(largest, std::fabs(v));
    return largest;
}
double logsumexp_of(const std::vector<double>& x) {
    double total = 0.0;
    for (const double v : x) total += std::exp(v);
    return std::log(total);
}

void append(Row& row, const Row& more) {
    row.cases.insert(row.cases.end(), more.cases.begin(), more.cases.end());
}

/// argmax or argmin: of the whole tensor, and along one axis.
Row place_row(const char* name, Tensor (*whole)(const Tensor&),
              Tensor (*along)(const Tensor&, std::int64_t, bool), Fold expected) {
    Row row{.op = name, .dtypes = number_dtypes(), .results = {i64_dtype}, .differentiable = false};
    for (const Shape& shape : {Shape{}, Shape{17}, Shape{3, 17}, Shape{3, 25003}})
        row.cases.push_back(
            {.inputs = {{.shape = shape, .whole = true}},
             .call = call(whole),
             .reference = reference([=](const Array& x) { return fold_slices(x, {}, false, expected); }),
             .note = "of all"});
    for (const Slices& slices : usual_slices(false)) {
        if (slices.axes.size() != 1) continue;
        row.cases.push_back(
            {.inputs = {{.shape = slices.shape, .whole = true}},
             .call = call([=](const Tensor& x) { return along(x, slices.axes[0], slices.keep_axes); }),
             .reference = reference(
                 [=](const Array& x) { return fold_slices(x, slices.axes, slices.keep_axes, expected); }),
             .note = "axis " + std::to_string(slices.axes[0])});
    }
    row.refusals = {{[=] { whole(zeros({0})); }, {name}},
                    {[=] {
                         along(zeros({2, 3}), 2, false);
                     },
                     {name, "2"}}};
    return row;
}

}  // namespace

std::vector<Row> reduce_rows() {
    Row sum_row = reduce_row(
        "sum", [](const Tensor& x, const Axes& a, bool k) { return sum(x, a, k); }, sum_of, true);
    sum_row.dtypes = all_dtypes();
    sum_row.results = {sum_result};
    sum_row.refusals = {{[] {
                             sum(zeros({2, 3}), {2});
                         },
                         {"[sum]", "2"}},
                        {[] {
                             sum(zeros({2, 3}), {0, -2});
                         },
                         {"[sum]", "twice"}}};

    Row mean_row = reduce_row(
        "mean", [](const Tensor& x, const Axes& a, bool k) { return mean(x, a, k); }, mean_of, true);
    mean_row.dtypes = all_dtypes();
    mean_row.results = {floating_result};

    Row max_row = reduce_row(
        "max", [](const Tensor& x, const Axes& a, bool k) { return max(x, a, k); }, max_of, false);
    max_row.dtypes = number_dtypes();
    max_row.refusals = {{[] { max(zeros({2, 0}), {1}); }, {"[max]"}}, {[] { max(zeros({0})); }, {"[max]"}}};
    Row min_row = reduce_row(
        "min", [](const Tensor& x, const Axes& a, bool k) { return min(x, a, k); }, min_of, false);
    min_row.dtypes = number_dtypes();
    min_row.refusals = {{[] { min(zeros({0})); }, {"[min]"}}};

    Row var_row = reduce_row(
        "var", [](const Tensor& x, const Axes& a, bool k) { return var(x, a, 1.0, k); }, variance_of, false);
    append(var_row, reduce_row(
                        "var", [](const Tensor& x, const Axes& a, bool k) { return var(x, a, 0.0, k); },
                        population_variance_of, false));
    Row deviation_row = reduce_row(
        "stddev", [](const Tensor& x, const Axes& a, bool k) { return stddev(x, a, 1.0, k); }, deviation_of,
        false);
    // One element has no unbiased estimate: the result and finite differences are NaN.
    for (Row* row : {&var_row, &deviation_row})
        for (Case& sample : row->cases)
            if (element_count(sample.inputs[0].shape) == 1 || sample.inputs[0].shape == Shape{4, 1, 3})
                sample.inputs[0].differentiable = false;

    Row norm_row = reduce_row(
        "norm", [](const Tensor& x, const Axes& a, bool k) { return norm(x, 2.0, a, k); }, norm2_of, true);
    append(norm_row, reduce_row(
                         "norm", [](const Tensor& x, const Axes& a, bool k) { return norm(x, 1.0, a, k); },
                         norm1_of, true));
    append(norm_row,
           reduce_row(
               "norm", [](const Tensor& x, const Axes& a, bool k) { return norm(x, infinity, a, k); },
               norm_infinity_of, true));
    norm_row.refusals = {{[] { norm(ones({2}), 3.0); }, {"[norm]", "3"}}};

    Row logsumexp_row = reduce_row(
        "logsumexp", [](const Tensor& x, const Axes& a, bool k) { return logsumexp(x, a, k); }, logsumexp_of,
        true);

    Row any_row = reduce_row(
        "any", [](const Tensor& x, const Axes& a, bool k) { return any(x, a, k); }, any_of, true, true);
    Row all_row = reduce_row(
        "all", [](const Tensor& x, const Axes& a, bool k) { return all(x, a, k); }, all_of, true, true);
    for (Row* row : {&any_row, &all_row}) {
        row->dtypes = all_dtypes();
        row->results = {boolean_dtype};
        row->differentiable = false;
    }
    return {sum_row,
            mean_row,
            max_row,
            min_row,
            place_row("argmax", argmax, argmax, argmax_of),
            place_row("argmin", argmin, argmin, argmin_of),
            var_row,
            deviation_row,
            norm_row,
            logsumexp_row,
            any_row,
            all_row};
}
const RowsOfFamily reduce_family(reduce_rows);

TEST_CASE("reduce: sums and means of millions of f32 values are right") {
    on_each_device([] {
        // In the emulator each write takes long: there the ones are a single element, broadcast.
        const bool is_quick = test_device() == Device::cpu();
        CHECK(sum(is_quick ? ones({33554432}) : ones({1}).expand({33554432})).item() == 33554432.0);
        CHECK(std::fabs(mean(full({1000000}, 9991.0)).item() - 9991.0) < 1e-3);
        CHECK(std::fabs(sum(full({1392640}, 0.1)).item() - 139264.0) < 0.05);
        CHECK(sum(ones({8192, 4}, {DType::bf16}), {0}).to_vector() == std::vector<double>(4, 8192.0));
        CHECK(sum(ones({8192, 40}, {DType::bf16}), {0}).to_vector() == std::vector<double>(40, 8192.0));
        const std::int64_t rows = is_quick ? 3000000 : 30000;
        CHECK(sum(ones({rows, 20}), {0}).to_vector() == std::vector<double>(20, static_cast<double>(rows)));
    });
}

TEST_CASE("reduce: the mean of 838,860,800 ones is 1" * doctest::test_suite("long")) {
    CHECK(mean(ones({838860800})).item() == 1.0);
    CHECK(sum(ones({1}).expand({std::int64_t{1} << 32})).item() == 4294967296.0);
}

TEST_CASE("reduce: means, variances and norms of f64 numbers whose sums leave the range") {
    on_each_device([] {
        const double large = 1.7e308;
        const auto near = [&](const Tensor& x, double expected) {
            for (const double value : x.to_vector()) CHECK(value / large == doctest::Approx(expected));
        };
        for (const std::int64_t length : {4, 100, 4000, 80000}) {
            CAPTURE(length);
            std::vector<double> values;
            for (std::int64_t i = 0; i < length; ++i) values.push_back(i % 4 == 0 ? large : -large);
            const Tensor row = tensor(values, {1, length}, {DType::f64});
            const Tensor columns = row.transpose(0, 1).expand({length, 20}).contiguous();
            near(mean(full({length}, large, {DType::f64})), 1.0);
            near(mean(row, 1), -0.5);
            near(mean(columns, 0), -0.5);
            near(stddev(row * 0.5, 1, 0), std::sqrt(0.75) / 2);
            near(stddev(row, 1, 0), std::sqrt(0.75));
            near(stddev(columns, 0, 0), std::sqrt(0.75));
            CHECK(var(row * 1e-200, 1, 0).item() / (large * 1e-200) / (large * 1e-200) ==
                  doctest::Approx(0.75));
            near(norm(row * (0.5 / std::sqrt(static_cast<double>(length)))), 0.5);
        }
        // What is infinite stays so.
        CHECK(std::isinf(sum(full({4}, large, {DType::f64})).item()));
        CHECK(std::isinf(mean(tensor({large, infinity, large}, {DType::f64})).item()));
        CHECK(std::isnan(mean(tensor({infinity, -infinity}, {DType::f64})).item()));
        CHECK(std::isinf(var(tensor({large, -large, -large, -large}, {DType::f64})).item()));
    });
}

TEST_CASE("reduce: integer sums keep all their bits") {
    on_each_device([] {
        CHECK(sum(full({3}, (std::int64_t{1} << 53) + 1, {DType::i64})).item<std::int64_t>() ==
              3 * ((std::int64_t{1} << 53) + 1));
        CHECK(sum(full({1000}, 2000000000, {DType::i32})).item<std::int64_t>() == 2000000000000);
        CHECK(sum(full({1000}, 255, {DType::u8})).item<std::int64_t>() == 255000);
        CHECK(sum(full({1000}, true, {DType::boolean})).item<std::int64_t>() == 1000);
    });
}

TEST_CASE("reduce: logsumexp of a slice of -inf is -inf with gradient 0") {
    on_each_device([] {
        Tensor x = tensor({{1.0, 2.0}, {-infinity, -infinity}});
        x.set_requires_grad();
        const Tensor y = logsumexp(x, {-1});
        CHECK(std::fabs(y[0].item() - 2.3132617) < 1e-6);
        CHECK(y[1].item() == -infinity);
        y.sum().backward();
        CHECK(std::fabs(x.grad()[0][0].item() - 0.2689414) < 1e-6);
        CHECK(std::fabs(x.grad()[0][1].item() - 0.7310586) < 1e-6);
        CHECK(x.grad()[1].to_vector() == std::vector<double>{0.0, 0.0});
        CHECK(logsumexp(zeros({3, 0}), {1}).to_vector() == std::vector<double>(3, -infinity));
        CHECK(logsumexp(tensor({1.0, infinity})).item() == infinity);
        CHECK(std::isnan(logsumexp(tensor({1.0, nan})).item()));
        CHECK(logsumexp(tensor({1000.0, 1000.0})).item() == doctest::Approx(1000.0 + std::log(2.0)));
    });
}

TEST_CASE("reduce: NaN wins max, min, argmax and argmin, also when it comes late") {
    on_each_device([] {
        for (const std::int64_t length : {2, 17, 3000, 200001}) {
            INFO(length);
            const Tensor x = ones({length});
            x.select(0, length - 1).fill_(nan);
            CHECK(std::isnan(max(x).item()));
            CHECK(std::isnan(min(x).item()));
            CHECK(argmax(x).item<std::int64_t>() == length - 1);
            CHECK(argmin(x).item<std::int64_t>() == length - 1);
            x.fill_(nan);
            CHECK(std::isnan(max(x).item()));
            CHECK(argmax(x).item<std::int64_t>() == 0);
        }
        CHECK(max(full({5}, -infinity)).item() == -infinity);
        CHECK(argmax(full({5}, -infinity)).item<std::int64_t>() == 0);
    });
}

TEST_CASE("reduce: the gradient of a tied maximum goes to the first place") {
    on_each_device([] {
        Tensor x = tensor({{3.0, 7.0, 7.0}, {5.0, 5.0, 5.0}});
        x.set_requires_grad();
        max(x, {1}).sum().backward();
        CHECK(x.grad().to_vector() == std::vector<double>{0, 1, 0, 1, 0, 0});
        Tensor half = ones({70000}, {DType::f16});
        half.set_requires_grad();
        max(half).backward();
        CHECK(sum(half.grad()).item() == 1.0);
    });
}

TEST_CASE("reduce: the variance of large shifted numbers does not cancel") {
    on_each_device([] {
        CHECK(var(tensor({20000.0, 20001.0, 19999.0, 20004.0}), {}, 0.0).item() == 3.5);
        CHECK(var(tensor({20000.0, 20001.0, 19999.0, 20004.0})).item() == doctest::Approx(14.0 / 3.0));
        CHECK(var(full({1000}, 7.0)).item() == 0.0);
        CHECK(std::isnan(var(ones({1})).item()));
    });
}

TEST_CASE("reduce: one axis may be given as a number, of any integer type") {
    on_each_device([] {
        const Tensor x = tensor({{1.0, 5.0, 3.0}, {4.0, 2.0, 6.0}});
        const auto equal = [](const Tensor& a, const Tensor& b) {
            CHECK(a.shape() == b.shape());
            CHECK(a.to_vector() == b.to_vector());
        };
        const std::size_t last = 1;
        equal(sum(x, 1), sum(x, {1}));
        CHECK(sum(x, 1).to_vector() == std::vector<double>{9, 12});
        equal(sum(x, -1), sum(x, {1}));
        equal(sum(x, 0), sum(x, {0}));
        CHECK(sum(x, 0).shape() == Shape{3});
        equal(sum(x, last), sum(x, {1}));
        equal(sum(x, 1, true), sum(x, {1}, true));
        equal(mean(x, 1), mean(x, {1}));
        equal(max(x, 1), max(x, {1}));
        equal(min(x, 1), min(x, {1}));
        equal(var(x, 1), var(x, {1}));
        equal(var(x, 1, 0.0), var(x, {1}, 0.0));
        equal(stddev(x, 1), stddev(x, {1}));
        equal(norm(x, 2.0, 1), norm(x, 2.0, {1}));
        equal(logsumexp(x, 1), logsumexp(x, {1}));
        equal(any(x, 1), any(x, {1}));
        equal(all(x, 1), all(x, {1}));
        CHECK(sum(x, {}).shape() == Shape{});  // no axis named: all
        CHECK(sum(x, std::vector<std::int64_t>{0, 1}).shape() == Shape{});
    });
}

TEST_CASE("reduce: the variance of data with a NaN or an infinity is NaN") {
    on_each_device([] {
        for (const double bad : {std::nan(""), double{INFINITY}}) {
            const std::vector<double> values =
                var(tensor({{1.0, 1.0}, {2.0, bad}, {4.0, 5.0}}), {0}).to_vector();
            CHECK(values[0] == doctest::Approx(7.0 / 3.0));
            CHECK(std::isnan(values[1]));
            CHECK(std::isnan(stddev(tensor({1.0, bad})).item()));
        }
    });
}

}  // namespace potluck::test
