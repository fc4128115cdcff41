#include "autograd/ops/cross_entropy.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/matmul.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/error.h"
#include "core/factories.h"
#include "tests/expect_error.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Array cross_entropy_by_definition(const Array& logits, const Array& labels, const CrossEntropy& options) {
    const std::int64_t classes = logits.shape.back();
    Array losses{labels.shape, {}};
    double count = 0.0;
    double total = 0.0;
    for (std::size_t row = 0; row < labels.values.size(); ++row) {
        const auto label = static_cast<std::int64_t>(labels.values[row]);
        double loss = 0.0;
        if (label != options.ignore_index) {
            const double* x = logits.values.data() + static_cast<std::int64_t>(row) * classes;
            double largest = -infinity;
            for (std::int64_t i = 0; i < classes; ++i) largest = std::max(largest, x[i]);
            double sum = 0.0;
            for (std::int64_t i = 0; i < classes; ++i) sum += std::exp(x[i] - largest);
            for (std::int64_t i = 0; i < classes; ++i) {
                const double target = (i == label ? 1.0 - options.label_smoothing : 0.0) +
                                      options.label_smoothing / static_cast<double>(classes);
                loss -= target * (x[i] - largest - std::log(sum));
            }
            count += 1.0;
        }
        losses.values.push_back(loss);
        total += loss;
    }
    if (options.reduction == Reduction::none) return losses;
    if (options.reduction == Reduction::sum) return {{}, {total}};
    return {{}, {count == 0.0 ? 0.0 : total / count}};
}

std::string told(const CrossEntropy& options) {
    const char* names[] = {"none", "sum", "mean"};
    return std::string(names[static_cast<int>(options.reduction)]) + ", smoothing " +
           std::to_string(options.label_smoothing);
}

Tensor labels_of(std::vector<std::int64_t> labels) {
    const auto count = static_cast<std::int64_t>(labels.size());
    return tensor(labels, {count});
}

}  // namespace

std::vector<Row> cross_entropy_rows() {
    Row row{.op = "cross_entropy", .results = {statistics_dtype}, .tolerance = 2.0};
    for (const auto& [shape, range] : {std::pair<Shape, double>{{3}, 2.0},
                                       {{4, 1}, 2.0},
                                       {{0, 5}, 2.0},
                                       {{3, 5}, 2.0},
                                       {{3, 5}, 30.0},
                                       {{2, 3, 4}, 2.0},
                                       {{5, 129}, 10.0},
                                       {{7, 3001}, 4.0}})
        for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean})
            for (const double smoothing : {0.0, 0.1, 1.0}) {
                const CrossEntropy options{
                    .ignore_index = -1, .label_smoothing = smoothing, .reduction = reduction};
                const Shape rows(shape.begin(), shape.end() - 1);
                std::vector<double> labels;
                for (std::int64_t i = 0; i < element_count(rows); ++i)
                    labels.push_back(i % 4 == 2 ? -1.0 : static_cast<double>((i * 7 + 1) % shape.back()));
                row.cases.push_back({.inputs = {{.shape = shape, .low = -range, .high = range},
                                                {.shape = rows, .dtype = DType::i64, .values = labels}},
                                     .call = call([options](const Tensor& logits, const Tensor& ids) {
                                         return cross_entropy(logits, ids, options);
                                     }),
                                     .reference = reference([options](const Array& logits, const Array& ids) {
                                         return cross_entropy_by_definition(logits, ids, options);
                                     }),
                                     .note = told(options)});
            }
    row.refusals = {
        {[] {
             cross_entropy(ones({3, 5}), labels_of({1, 4, -4}), {.ignore_index = -1});
         },
         {"[cross_entropy]", "-4", "position 2", "0..4"}},
        {[] {
             cross_entropy(ones({3, 5}), labels_of({1, 5, 0}));
         },
         {"[cross_entropy]", "5", "position 1"}},
        {[] {
             cross_entropy(ones({3, 5}), labels_of({1, 2}));
         },
         {"[cross_entropy]", "(3, 5)", "(2)"}},
        {[] {
             cross_entropy(ones({3, 5}), ones({3}));
         },
         {"[cross_entropy]", "f32"}},
        {[] {
             cross_entropy(ones({1, 5}, {DType::i64}), labels_of({1}));
         },
         {"[cross_entropy]", "i64"}},
        {[] {
             cross_entropy(ones({1, 5}), labels_of({1}), {.label_smoothing = 1.5});
         },
         {"[cross_entropy]", "1.5"}},
        {[] {
             cross_entropy(ones({1, 0}), labels_of({0}));
         },
         {"[cross_entropy]", "(1, 0)"}},
        {[] { cross_entropy(Tensor(), labels_of({0})); }, {"[cross_entropy]"}},
    };
    return {row};
}
const RowsOfFamily cross_entropy_family(cross_entropy_rows);

TEST_CASE("cross_entropy: when every label is ignored, losses and gradients are exactly 0") {
    on_each_device([] {
        for (const DType dtype : floating_dtypes())
            for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
                Tensor logits = to(randn({5, 10}, {DType::f32, test_device()}), dtype);
                logits.set_requires_grad();
                const Tensor labels = full({5}, -100, {DType::i64});
                const Tensor loss = cross_entropy(logits, labels, {.reduction = reduction});
                for (const double value : loss.to_vector()) CHECK(value == 0.0);
                backward(loss, {.gradient = ones(loss.shape(), {loss.dtype()})});
                CHECK(logits.grad().to_vector() == std::vector<double>(50, 0.0));
            }
    });
}

TEST_CASE("cross_entropy: a wrong label is named, nothing is changed, and the next batch works") {
    on_each_device([] {
        Tensor logits = tensor(std::vector<double>{0.5, -1, 2, 0, 1}, {1, 5}).expand({3, 5}).clone();
        const std::string message = error_of([&] {
            cross_entropy(logits, labels_of({1, 4, -4}), {.ignore_index = -1});
        });
        CHECK(contains(message, "label -4 at position 2"));
        CHECK(contains(message, "ignore_index -1"));
        const std::vector<double> right{2.074438, 3.574438, 0.574438, 2.574438, 1.574438};
        for (std::int64_t label = 0; label < 5; ++label)
            CHECK(cross_entropy(logits, labels_of({label, label, label})).item() ==
                  doctest::Approx(right[static_cast<std::size_t>(label)]).epsilon(1e-6));
    });
}

TEST_CASE("cross_entropy: an ignore_index above the classes, and labels of u8 and i32") {
    on_each_device([] {
        const Tensor logits = tensor({{1, 2, 3}, {3, 2, 1}, {9, 9, 9}});
        for (const DType dtype : {DType::i64, DType::i32, DType::u8}) {
            const Tensor labels = to(labels_of({0, 1, 255}), dtype);
            const Tensor none =
                cross_entropy(logits, labels, {.ignore_index = 255, .reduction = Reduction::none});
            CHECK(none[0].item() == doctest::Approx(2.4076059).epsilon(1e-6));
            CHECK(none[1].item() == doctest::Approx(1.4076059).epsilon(1e-6));
            CHECK(none[2].item() == 0.0);
            const double sum =
                cross_entropy(logits, labels, {.ignore_index = 255, .reduction = Reduction::sum}).item();
            CHECK(sum == doctest::Approx(3.8152118).epsilon(1e-6));
            CHECK(cross_entropy(logits, labels, {.ignore_index = 255}).item() == doctest::Approx(sum / 2));
        }
    });
}

TEST_CASE(
    "cross_entropy: sums over parts divided by all that count give the mean over all, whatever the parts") {
    on_each_device([] {
        // Sequences of 1 .. 8 valid labels, divided into micro-batches.
        Generator generator(1);
        const Tensor x = randn({8, 8, 6}, {DType::f64, test_device()}, &generator);
        std::vector<std::int64_t> ids;
        for (std::int64_t sequence = 0; sequence < 8; ++sequence)
            for (std::int64_t t = 0; t < 8; ++t) ids.push_back(t <= sequence ? (sequence * 3 + t) % 5 : -100);
        const Tensor labels = tensor(ids, {8, 8});
        Tensor weight = randn({5, 6}, {DType::f64, test_device()}, &generator);
        weight.set_requires_grad();

        const Tensor whole = cross_entropy(linear(x, weight), labels);
        whole.backward();
        const std::vector<double> expected = weight.grad().to_vector();
        for (const std::int64_t size : {1, 2, 4, 8}) {
            weight.set_grad({});
            double loss = 0.0;
            for (std::int64_t first = 0; first < 8; first += size) {
                const Tensor part =
                    cross_entropy(linear(x.narrow(0, first, size), weight), labels.narrow(0, first, size),
                                  {.reduction = Reduction::sum}) /
                    36.0;
                part.backward();
                loss += part.item();
            }
            CHECK(loss == doctest::Approx(whole.item()).epsilon(1e-12));
            const std::vector<double> got = weight.grad().to_vector();
            for (std::size_t i = 0; i < got.size(); ++i)
                CHECK(got[i] == doctest::Approx(expected[i]).epsilon(1e-6));
        }
    });
}

TEST_CASE("cross_entropy: the extremes") {
    on_each_device([] {
        // Labels with probability 0 have infinite loss; huge logits do not overflow; NaN stays NaN.
        CHECK(cross_entropy(tensor({{0, -infinity}}), labels_of({1})).item() == infinity);
        CHECK(cross_entropy(tensor({{-infinity, -infinity}}), labels_of({1})).item() == infinity);
        CHECK(cross_entropy(tensor({{1e30, -1e30}}), labels_of({0})).item() == 0.0);
        CHECK(cross_entropy(tensor({{1e4, 1e4 - 1}}), labels_of({0})).item() ==
              doctest::Approx(0.3132617).epsilon(1e-6));
        CHECK(std::isnan(cross_entropy(tensor({{0, nan}}), labels_of({0})).item()));
        // A row with NaN does not affect the others.
        Tensor logits = tensor({{0, nan}, {1, 2}});
        logits.set_requires_grad();
        const Tensor losses = cross_entropy(logits, labels_of({0, 0}), {.reduction = Reduction::none});
        CHECK(std::isnan(losses[0].item()));
        CHECK(losses[1].item() == doctest::Approx(1.3132617).epsilon(1e-6));
        // An ignored row with NaN has no effect.
        Tensor ignored = tensor({{nan, nan}, {1, 2}});
        ignored.set_requires_grad();
        const Tensor loss = cross_entropy(ignored, labels_of({-100, 0}));
        CHECK(loss.item() == doctest::Approx(1.3132617).epsilon(1e-6));
        loss.backward();
        CHECK(ignored.grad()[0].to_vector() == std::vector<double>{0, 0});
    });
}

TEST_CASE("cross_entropy: the logits keep their values when somebody else holds them") {
    on_each_device([] {
        Tensor x = randn({4, 7}, {DType::f32, test_device()});
        x.set_requires_grad();
        const Tensor logits = x * 2.0;
        const std::vector<double> before = logits.to_vector();
        cross_entropy(logits, labels_of({0, 1, 2, 3})).backward();
        CHECK(logits.to_vector() == before);
    });
}

}  // namespace potluck::test
