#include "autograd/ops/rotary.h"

#include <doctest/doctest.h>

#include <cmath>

#include "autograd/ops/matmul.h"
#include "autograd/ops/view.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

double angle_of(std::int64_t position, std::int64_t pair, std::int64_t head_size, double base) {
    return static_cast<double>(position) /
           std::pow(base, 2.0 * static_cast<double>(pair) / static_cast<double>(head_size));
}

Array turned(const Array& x, const Array& cosine, const Array& sine) {
    const std::int64_t half = x.shape[3] / 2;
    return from_indices(x.shape, [&](std::vector<std::int64_t> at) {
        const bool first = at[3] < half;
        const std::int64_t pair = first ? at[3] : at[3] - half;
        const auto table = static_cast<std::size_t>(at[2] * half + pair);
        const double here = x.values[static_cast<std::size_t>(position_at(x.shape, at))];
        at[3] = first ? at[3] + half : pair;
        const double other = x.values[static_cast<std::size_t>(position_at(x.shape, at))];
        return here * cosine.values[table] + (first ? -other : other) * sine.values[table];
    });
}

}  // namespace

std::vector<Row> rotary_rows() {
    Row tables_row{
        .op = "rotary_tables", .dtypes = {DType::f32}, .results = {f32_dtype}, .differentiable = false};
    for (const auto& [positions, head_size, base] :
         {std::tuple<std::int64_t, std::int64_t, double>{5, 8, 1e4},
          {1, 2, 1e4},
          {0, 8, 1e4},
          {3, 0, 1e4},
          {2000, 64, 1e4},
          {100, 128, 5e5}})
        tables_row.cases.push_back(
            {.call =
                 [positions = positions, head_size = head_size, base = base](const std::vector<Tensor>&) {
                     return as_list(rotary_tables(positions, head_size, base, test_device()));
                 },
             .reference =
                 [positions = positions, head_size = head_size, base = base](const std::vector<Array>&) {
                     const Shape shape{positions, head_size / 2};
                     return std::vector<Array>{
                         from_indices(shape,
                                      [&](const std::vector<std::int64_t>& at) {
                                          return std::cos(angle_of(at[0], at[1], head_size, base));
                                      }),
                         from_indices(shape, [&](const std::vector<std::int64_t>& at) {
                             return std::sin(angle_of(at[0], at[1], head_size, base));
                         })};
                 }});
    tables_row.refusals = {
        {[] { rotary_tables(4, 3); }, {"[rotary_tables]", "3"}},
        {[] { rotary_tables(-1, 4); }, {"[rotary_tables]", "-1"}},
        {[] { rotary_tables(4, 4, 0.0); }, {"[rotary_tables]", "0"}},
    };

    Row row{.op = "rotary"};
    for (const Shape& shape : {Shape{1, 1, 1, 2}, Shape{2, 3, 4, 6}, Shape{1, 2, 0, 4}, Shape{2, 1, 3, 0},
                               Shape{0, 2, 3, 4}, Shape{1, 2, 17, 34}, Shape{2, 3, 65, 64}}) {
        const Input table{.shape = {shape[2], shape[3] / 2}, .low = -1.0, .high = 1.0, .dtype = DType::f32};
        row.cases.push_back({.inputs = {{.shape = shape}, table, table},
                             .call = call([](const Tensor& x, const Tensor& cosine, const Tensor& sine) {
                                 return rotary(x, cosine, sine);
                             }),
                             .reference = reference(turned)});
    }
    row.refusals = {
        {[] { rotary_tables(std::int64_t{1} << 58, 4, 10000.0, test_device()); },
         {"[rotary_tables]"}},  // out of memory: an Error as well
        {[] {
             rotary(ones({1, 1, 2, 3}), ones({2, 1}), ones({2, 1}));
         },
         {"[rotary]", "(1, 1, 2, 3)"}},
        {[] {
             rotary(ones({1, 1, 2, 4}), ones({3, 2}), ones({3, 2}));
         },
         {"[rotary]", "(1, 1, 2, 4)", "(3, 2)"}},
        {[] {
             rotary(ones({2, 4}), ones({2, 2}), ones({2, 2}));
         },
         {"[rotary]", "(2, 4)"}},
    };
    return {tables_row, row};
}
const RowsOfFamily rotary_family(rotary_rows);

TEST_CASE("rotary: products of turned vectors depend on the distance of their positions alone") {
    on_each_device([] {
        const auto [cosine, sine] = rotary_tables(40, 16, 10000.0, test_device());
        Generator generator(2);
        const Tensor q = randn({1, 1, 1, 16}, {DType::f32, test_device()}, &generator);
        const Tensor k = randn({1, 1, 1, 16}, {DType::f32, test_device()}, &generator);
        const auto at = [&](const Tensor& x, std::int64_t position) {
            return rotary(x, cosine.narrow(0, position, 1), sine.narrow(0, position, 1));
        };
        const auto product = [&](std::int64_t i, std::int64_t j) {
            return matmul(at(q, i), transpose(at(k, j))).item();
        };
        CHECK(product(0, 0) == doctest::Approx(matmul(q, transpose(k)).item()).epsilon(1e-5));
        for (const std::int64_t shift : {1, 7, 30})
            CHECK(product(5 + shift, 2 + shift) == doctest::Approx(product(5, 2)).epsilon(1e-4));
    });
}

}  // namespace potluck::test
