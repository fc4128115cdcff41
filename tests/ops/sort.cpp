#include "autograd/ops/sort.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "autograd/ops/index.h"
#include "core/factories.h"
#include "tests/expect_error.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

/// The first k of each line along axis, and their indices, by a stable sort.
std::vector<Array> sorted(const Array& x, std::int64_t k, std::size_t axis, bool largest) {
    Shape shape = x.shape;
    shape[axis] = k;
    Array values = from_indices(shape, [](const auto&) { return 0.0; });
    Array places = values;
    for (std::size_t i = 0; i < values.values.size(); ++i) {
        std::vector<std::int64_t> indices = indices_at(shape, static_cast<std::int64_t>(i));
        if (indices[axis] != 0) continue;  // one pass per line, at its first element
        std::vector<double> line;
        for (; indices[axis] < x.shape[axis]; ++indices[axis])
            line.push_back(x.values[static_cast<std::size_t>(position_at(x.shape, indices))]);
        std::vector<std::size_t> order(line.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return largest ? line[a] > line[b] : line[a] < line[b];
        });
        for (indices[axis] = 0; indices[axis] < k; ++indices[axis]) {
            const std::size_t place = order[static_cast<std::size_t>(indices[axis])];
            const auto at = static_cast<std::size_t>(position_at(shape, indices));
            values.values[at] = line[place];
            places.values[at] = static_cast<double>(place);
        }
    }
    return {values, places};
}

}  // namespace

std::vector<Row> sort_rows() {
    Row topk_row{.op = "topk", .dtypes = number_dtypes(), .results = {same_dtype, i64_dtype}};
    for (const auto& [shape, k, axis] : {std::tuple<Shape, std::int64_t, std::int64_t>{{5}, 2, 0},
                                         {{2, 5}, 2, -1},
                                         {{2, 5}, 5, 1},
                                         {{5, 3}, 4, 0},
                                         {{2, 4, 3}, 2, 1},
                                         {{2, 5}, 0, 1},
                                         {{0, 5}, 2, 1},
                                         {{3, 129}, 17, 1},
                                         {{2, 2500}, 60, 1}})
        for (const bool largest : {true, false}) {
            const auto from_front =
                static_cast<std::size_t>(axis < 0 ? axis + static_cast<std::int64_t>(shape.size()) : axis);
            topk_row.cases.push_back({.inputs = {{.shape = shape}},
                                      .call = call([k = k, axis = axis, largest](const Tensor& x) {
                                          return topk(x, k, axis, largest);
                                      }),
                                      .reference =
                                          [k = k, from_front, largest](const std::vector<Array>& x) {
                                              return sorted(x[0], k, from_front, largest);
                                          },
                                      .note = std::to_string(k) + (largest ? " largest" : " smallest")});
        }
    topk_row.refusals = {{[] {
                              topk(ones({2, 5}), 6);
                          },
                          {"[topk]", "6", "5"}},
                         {[] {
                              topk(ones({2, 5}), -1);
                          },
                          {"[topk]", "-1"}},
                         {[] {
                              topk(ones({2, 5}), 1, 2);
                          },
                          {"[topk]", "2"}}};

    Row multinomial_row{.op = "multinomial", .results = {i64_dtype}, .differentiable = false};
    for (const auto& [shape, samples, replacement] : {std::tuple<Shape, std::int64_t, bool>{{5}, 3, false},
                                                      {{5}, 30, true},
                                                      {{4, 7}, 7, false},
                                                      {{4, 7}, 2, true},
                                                      {{3, 2500}, 10, false},
                                                      {{2, 5}, 0, true}})
        multinomial_row.cases.push_back(
            {.inputs = {{.shape = shape, .low = 0.1, .high = 1.0}},
             .call = call([samples = samples, replacement = replacement](const Tensor& weights) {
                 Generator generator(5);
                 return multinomial(weights, samples, replacement, &generator);
             })});
    multinomial_row.refusals = {
        {[] {
             multinomial(tensor({0.5, 0.0, 0.5}), 3);
         },
         {"[multinomial]", "2", "3"}},
        {[] {
             multinomial(tensor({0.5, -0.5, 1.0}), 1);
         },
         {"[multinomial]", "-0.5", "position 1"}},
        {[] {
             multinomial(tensor({0.0, 0.0}), 1);
         },
         {"[multinomial]", "0"}},
        {[] {
             multinomial(tensor({1.0, std::nan("")}), 1, true);
         },
         {"[multinomial]", "nan"}},
        {[] {
             multinomial(ones({2, 2, 2}), 1);
         },
         {"[multinomial]", "(2, 2, 2)"}},
        {[] { multinomial(ones({2}), -1); }, {"[multinomial]", "-1"}},
        {[] { multinomial(ones({3}, {DType::i64}), 1); }, {"[multinomial]", "i64"}},
    };
    return {topk_row, multinomial_row};
}
const RowsOfFamily sort_family(sort_rows);

TEST_CASE("sort: the gradient of topk goes to the places taken") {
    on_each_device([] {
        Tensor x = tensor({{1.0, 2.0, 6.0, 4.0, 5.0}, {9.0, 5.0, 6.0, 7.0, 8.0}});
        x.set_requires_grad();
        const Tensor total = topk(x, 2).first.sum();
        CHECK(total.item() == 28.0);
        total.backward();
        CHECK(x.grad().to_vector() == std::vector<double>{0, 0, 1, 0, 1, 1, 0, 0, 0, 1});
    });
}

TEST_CASE("sort: among equals the lower index comes first, and NaN is the largest") {
    on_each_device([] {
        const Tensor x = tensor({2.0, std::nan(""), 3.0, 2.0, std::nan(""), 3.0});
        CHECK(topk(x, 6).second.to_vector() == std::vector<double>{1, 4, 2, 5, 0, 3});
        CHECK(topk(x, 6, -1, false).second.to_vector() == std::vector<double>{0, 3, 2, 5, 1, 4});
    });
}

TEST_CASE("sort: multinomial draws as the weights say") {
    on_each_device([] {
        Generator generator(3);
        const Tensor weights = tensor({0.0, 1.0, 0.0, 3.0, 4.0});
        std::vector<double> counts(5);
        for (const double index : multinomial(weights, 80000, true, &generator).to_vector())
            counts[static_cast<std::size_t>(index)] += 1.0;
        CHECK(counts[0] == 0.0);
        CHECK(counts[2] == 0.0);
        // Five standard deviations: sqrt(n p (1 - p)).
        CHECK(std::fabs(counts[1] - 10000.0) < 5.0 * 94.0);
        CHECK(std::fabs(counts[3] - 30000.0) < 5.0 * 137.0);
        CHECK(std::fabs(counts[4] - 40000.0) < 5.0 * 141.0);
    });
}

TEST_CASE("sort: multinomial without replacement draws each index at most once, heavy ones earlier") {
    on_each_device([] {
        Generator generator(4);
        const Tensor weights = tensor({1.0, 0.0, 1.0, 8.0}).expand({20000, 4});
        const Tensor drawn = multinomial(weights, 3, false, &generator);
        const std::vector<double> values = drawn.to_vector();
        double heavy_first = 0.0;
        for (std::size_t row = 0; row < 20000; ++row) {
            const std::set<double> seen(values.begin() + static_cast<std::ptrdiff_t>(3 * row),
                                        values.begin() + static_cast<std::ptrdiff_t>(3 * row + 3));
            REQUIRE(seen == std::set<double>{0.0, 2.0, 3.0});
            heavy_first += values[3 * row] == 3.0 ? 1.0 : 0.0;
        }
        CHECK(std::fabs(heavy_first - 16000.0) < 5.0 * 57.0);
    });
}

TEST_CASE("sort: huge and tiny weights do not overflow or vanish") {
    on_each_device([] {
        Generator generator(6);
        const double huge = std::numeric_limits<double>::max();
        const Tensor weights = tensor(std::vector<double>{huge, huge, huge}, {3}, {DType::f64});
        std::set<double> seen;
        for (const double index : multinomial(weights, 100, true, &generator).to_vector()) seen.insert(index);
        CHECK(seen.size() == 3);
        const Tensor tiny = tensor(std::vector<double>{5e-324, 5e-324}, {2}, {DType::f64});
        seen.clear();
        for (const double index : multinomial(tiny, 100, true, &generator).to_vector()) seen.insert(index);
        CHECK(seen.size() == 2);
    });
}

TEST_CASE(
    "sort: every device takes the same elements, with many equal ones, both zeros, infinities and NaN") {
    Generator generator(12);
    const double infinity = std::numeric_limits<double>::infinity();
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i64, DType::u8}) {
        std::vector<double> values = randint(0, 9, {3 * 2000}, {DType::i64}, &generator).to_vector();
        if (is_floating(dtype)) {
            for (std::size_t i = 0; i < values.size(); ++i) {
                if (i % 3 == 0) values[i] = -values[i];  // -0 among them
                if (i % 101 == 7) values[i] = i % 2 == 0 ? infinity : -infinity;
                if (i % 211 == 9) values[i] = std::nan("");
            }
        }
        const Tensor x = potluck::tensor(values, {3, 2000}, {dtype});
        for (const std::int64_t k : {1, 40, 1024, 1025, 2000}) {
            for (const bool largest : {true, false}) {
                INFO(name_of(dtype) << ", k " << k << (largest ? ", largest" : ", smallest"));
                std::vector<std::vector<double>> places;
                on_each_device([&] {
                    const auto [taken, indices] = topk(x.to(test_device()), k, -1, largest);
                    places.push_back(indices.to_vector());
                    const Tensor again = gather(x.to(test_device()), 1, indices);
                    const std::vector<double> a = taken.to_vector(), b = again.to_vector();
                    std::size_t wrong = 0;
                    for (std::size_t i = 0; i < a.size(); ++i)
                        wrong += a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i])) ? 1 : 0;
                    CHECK(wrong == 0);
                });
                for (const auto& found : places) CHECK(found == places.front());
            }
        }
    }
}

TEST_CASE("sort: the same key draws the same samples on every device") {
    Generator generator(13);
    const Tensor weights = rand({5, 3001}, {}, &generator);
    for (const bool replacement : {true, false}) {
        std::vector<std::vector<double>> samples;
        on_each_device([&] {
            Generator numbers(14);
            samples.push_back(multinomial(weights.to(test_device()), 300, replacement, &numbers).to_vector());
        });
        for (const auto& drawn : samples) CHECK(drawn == samples.front());
    }
}

TEST_CASE("sort: bad weights are named by every device in the same words") {
    std::vector<std::string> texts;
    on_each_device([&] {
        std::string all;
        for (const Tensor& weights :
             {tensor({{1.0, 1.0, 1.0}, {1.0, -2.0, -1.0}, {std::nan(""), 1.0, 1.0}}),
              tensor({{1.0, 0.0}, {0.0, 0.0}}), tensor({{1.0, 1.0, 1.0}, {0.0, 1.0, 0.0}})})
            all += error_of([&] { multinomial(weights, 2, weights.size(1) == 2); }) + "\n";
        texts.push_back(all);
        CHECK(multinomial(tensor({0.0, 2.0}), 1).item() == 1.0);
    });
    CHECK(contains(texts[0], "weight -2 at position 1 of row 1"));
    CHECK(contains(texts[0], "all weights of row 1 are 0"));
    CHECK(contains(texts[0], "row 1 has 1 weights above 0, too few for 2 samples"));
    for (const std::string& text : texts) CHECK(text == texts[0]);
}

}  // namespace potluck::test
