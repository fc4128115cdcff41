#include "autograd/ops/elementwise.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "core/error.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

using TensorFunction = Tensor (*)(const Tensor&);
using TensorFunction2 = Tensor (*)(const Tensor&, const Tensor&);
using Number = double (*)(double);
using Number2 = double (*)(double, double);

struct Range {
    double low = -2.0;
    double high = 2.0;
};

/// A function of one tensor on the usual shapes.
std::vector<Case> unary_cases(TensorFunction function, Number expected, Range range = {}) {
    std::vector<Case> cases;
    for (const Shape& shape : usual_shapes())
        cases.push_back({.inputs = {{.shape = shape, .low = range.low, .high = range.high}},
                         .call = call(function),
                         .reference = reference([expected](const Array& x) { return map(x, expected); })});
    return cases;
}

/// A function of two tensors on shapes that broadcast.
std::vector<Case> binary_cases(TensorFunction2 function, Number2 expected, Range a = {}, Range b = {},
                               bool whole = false) {
    std::vector<Case> cases;
    for (const auto& [first, second] : usual_shape_pairs())
        cases.push_back({.inputs = {{.shape = first, .low = a.low, .high = a.high, .whole = whole},
                                    {.shape = second, .low = b.low, .high = b.high, .whole = whole}},
                         .call = call(function),
                         .reference = reference(
                             [expected](const Array& x, const Array& y) { return map(x, y, expected); })});
    return cases;
}

/// A tensor and a C++ number.
template <class Function>
Case scalar_case(Function function, Number expected, bool whole = false) {
    return {.inputs = {{.shape = {3, 5}, .low = 1.0, .high = 4.0, .whole = whole}},
            .call = call(function),
            .reference = reference([expected](const Array& x) { return map(x, expected); }),
            .note = "with a number"};
}

double python_remainder(double a, double b) { return a - b * std::floor(a / b); }
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }
double smaller(double a, double b) { return std::isnan(a) || a < b ? a : b; }
double sign_of(double x) { return x > 0 ? 1.0 : (x < 0 ? -1.0 : x); }

std::vector<Row> arithmetic_rows() {
    const auto sum = [](double a, double b) { return a + b; };
    const auto difference = [](double a, double b) { return a - b; };
    const auto product = [](double a, double b) { return a * b; };
    const auto quotient = [](double a, double b) { return a / b; };
    const Range divisor{0.5, 3.0};

    std::vector<Row> rows{
        {.op = "add", .cases = binary_cases(add, sum), .dtypes = number_dtypes()},
        {.op = "subtract", .cases = binary_cases(subtract, difference), .dtypes = number_dtypes()},
        {.op = "multiply", .cases = binary_cases(multiply, product), .dtypes = number_dtypes()},
        {.op = "divide",
         .cases = binary_cases(divide, quotient, {}, divisor),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "maximum", .cases = binary_cases(maximum, larger), .dtypes = number_dtypes()},
        {.op = "minimum", .cases = binary_cases(minimum, smaller), .dtypes = number_dtypes()},
        {.op = "operator+", .cases = binary_cases(operator+, sum), .dtypes = number_dtypes()},
        {.op = "operator-", .cases = binary_cases(operator-, difference), .dtypes = number_dtypes()},
        {.op = "operator*", .cases = binary_cases(operator*, product), .dtypes = number_dtypes()},
        {.op = "operator/",
         .cases = binary_cases(operator/, quotient, {}, divisor),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
    };
    rows[0].refusals = {
        {[] {
             add(ones({2, 3}), ones({4, 3}));
         },
         {"[add]", "(2, 3)", "(4, 3)"}},
        {[] { add(Tensor(), ones({2})); }, {"[add]"}},
    };
    rows[6].cases.push_back(
        scalar_case([](const Tensor& x) { return x + 3; }, [](double x) { return x + 3; }));
    rows[6].cases.push_back(
        scalar_case([](const Tensor& x) { return 3 + x; }, [](double x) { return 3 + x; }));
    rows[7].cases.push_back(
        scalar_case([](const Tensor& x) { return x - 3; }, [](double x) { return x - 3; }));
    rows[7].cases.push_back(
        scalar_case([](const Tensor& x) { return 3 - x; }, [](double x) { return 3 - x; }));
    rows[7].cases.push_back(scalar_case([](const Tensor& x) { return -x; }, [](double x) { return -x; }));
    rows[8].cases.push_back(
        scalar_case([](const Tensor& x) { return x * 3; }, [](double x) { return x * 3; }));
    rows[8].cases.push_back(
        scalar_case([](const Tensor& x) { return 3 * x; }, [](double x) { return 3 * x; }));
    rows[9].cases.push_back(
        scalar_case([](const Tensor& x) { return x / 3; }, [](double x) { return x / 3; }));
    rows[9].cases.push_back(
        scalar_case([](const Tensor& x) { return 3 / x; }, [](double x) { return 3 / x; }));

    Row power_row{.op = "power",
                  .cases = binary_cases(power, [](double a, double b) { return std::pow(a, b); }, {0.3, 2.5},
                                        {0.0, 3.0}),
                  .dtypes = number_dtypes(),
                  .tolerance = 2.0,
                  .gradient_tolerance = 4.0};
    for (const double exponent : {2.0, 3.0, 1.0, 0.0})
        power_row.cases.push_back({.inputs = {{.shape = {3, 5}}},
                                   .call = call([exponent](const Tensor& x) {
                                       return power(x, static_cast<std::int64_t>(exponent));
                                   }),
                                   .reference = reference([exponent](const Array& x) {
                                       return map(x, [exponent](double v) { return std::pow(v, exponent); });
                                   }),
                                   .note = "whole exponent"});
    power_row.refusals = {{[] { power(tensor(std::vector<std::int64_t>{2}, {1}), -2); }, {"[power]", "-2"}}};
    rows.push_back(power_row);

    Row remainder_row{.op = "remainder",
                      .cases = binary_cases(remainder, python_remainder, {-9.0, 9.0}, {1.0, 4.0}),
                      .dtypes = number_dtypes()};
    for (Case& sample : remainder_row.cases) sample.inputs[1].differentiable = false;
    remainder_row.refusals = {{[] {
                                   remainder(tensor(std::vector<std::int64_t>{7, 7}, {2}),
                                             tensor(std::vector<std::int64_t>{2, 0}, {2}));
                               },
                               {"[remainder]", "position 1", "0"}}};
    rows.push_back(remainder_row);
    remainder_row.op = "operator%";
    remainder_row.cases = binary_cases(operator%, python_remainder, {-9.0, 9.0}, {1.0, 4.0});
    for (Case& sample : remainder_row.cases) sample.inputs[1].differentiable = false;
    rows.push_back(remainder_row);
    // The quotients are not close to integers, where one ulp would matter.
    Row floor_divide_row{
        .op = "floor_divide",
        .cases = binary_cases(floor_divide, [](double a, double b) { return std::floor(a / b); }, {0.1, 0.9},
                              {-1.9, -1.1}),
        .dtypes = number_dtypes()};
    floor_divide_row.refusals = {{[] {
                                      floor_divide(tensor(std::vector<std::int64_t>{7, 7}, {2}),
                                                   tensor(std::vector<std::int64_t>{2, 0}, {2}));
                                  },
                                  {"[floor_divide]", "position 1", "0"}}};
    rows.push_back(floor_divide_row);
    return rows;
}

std::vector<Row> function_rows() {
    const Range positive{0.1, 4.0};
    return {
        {.op = "negate",
         .cases = unary_cases(negate, [](double x) { return -x; }),
         .dtypes = number_dtypes()},
        {.op = "abs",
         .cases = unary_cases(abs, [](double x) { return std::fabs(x); }),
         .dtypes = number_dtypes()},
        {.op = "sign", .cases = unary_cases(sign, sign_of), .dtypes = number_dtypes()},
        {.op = "square",
         .cases = unary_cases(square, [](double x) { return x * x; }),
         .dtypes = number_dtypes()},
        {.op = "sqrt",
         .cases = unary_cases(
             sqrt, [](double x) { return std::sqrt(x); }, positive),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "rsqrt",
         .cases = unary_cases(
             rsqrt, [](double x) { return 1.0 / std::sqrt(x); }, positive),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "reciprocal",
         .cases = unary_cases(
             reciprocal, [](double x) { return 1.0 / x; }, positive),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "exp",
         .cases = unary_cases(exp, [](double x) { return std::exp(x); }, {-5.0, 5.0}),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "log",
         .cases = unary_cases(
             log, [](double x) { return std::log(x); }, positive),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "sin",
         .cases = unary_cases(sin, [](double x) { return std::sin(x); }, {-20.0, 20.0}),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "cos",
         .cases = unary_cases(cos, [](double x) { return std::cos(x); }, {-20.0, 20.0}),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "erf",
         .cases = unary_cases(erf, [](double x) { return std::erf(x); }, {-3.0, 3.0}),
         .dtypes = number_dtypes(),
         .results = {floating_result}},
        {.op = "floor",
         .cases = unary_cases(floor, [](double x) { return std::floor(x); }),
         .dtypes = number_dtypes()},
        {.op = "ceil",
         .cases = unary_cases(ceil, [](double x) { return std::ceil(x); }),
         .dtypes = number_dtypes()},
        {.op = "round",
         .cases = unary_cases(round, [](double x) { return std::nearbyint(x); }),
         .dtypes = number_dtypes()},
    };
}

Row test_row(const char* name, TensorFunction function, Number expected) {
    Row row{.op = name,
            .cases = unary_cases(function, expected),
            .dtypes = all_dtypes(),
            .results = {boolean_dtype},
            .differentiable = false};
    row.cases.push_back({.inputs = {{.shape = {6}, .values = {nan, infinity, -infinity, 0.0, 1.0, -3.0}}},
                         .call = call(function),
                         .reference = reference([expected](const Array& x) { return map(x, expected); }),
                         .note = "NaN and infinity"});
    return row;
}

Row compare_row(const char* name, TensorFunction2 function, Number2 expected) {
    Row row{.op = name,
            .cases = binary_cases(function, expected, {0.0, 3.0}, {0.0, 3.0}, true),
            .dtypes = all_dtypes(),
            .results = {boolean_dtype},
            .differentiable = false};
    row.cases.push_back(
        {.inputs = {{.shape = {4}, .values = {nan, infinity, 1.0, nan}},
                    {.shape = {4}, .values = {nan, infinity, nan, 1.0}}},
         .call = call(function),
         .reference = reference([expected](const Array& x, const Array& y) { return map(x, y, expected); }),
         .note = "NaN and infinity"});
    return row;
}

std::vector<Row> compare_rows() {
    std::vector<Row> rows{
        test_row("is_nan", is_nan, [](double x) { return std::isnan(x) ? 1.0 : 0.0; }),
        test_row("is_finite", is_finite, [](double x) { return std::isfinite(x) ? 1.0 : 0.0; }),
        test_row("logical_not", logical_not, [](double x) { return x == 0.0 ? 1.0 : 0.0; }),
    };
    const auto add_pair = [&](const char* name, const char* symbol, TensorFunction2 function,
                              TensorFunction2 infix, auto infix_number, Number2 expected, Number to_two) {
        rows.push_back(compare_row(name, function, expected));
        Row row = compare_row(symbol, infix, expected);
        row.cases.push_back(scalar_case(infix_number, to_two, true));
        rows.push_back(row);
    };
    add_pair(
        "equal", "operator==", equal, operator==, [](const Tensor& x) { return x == 2; },
        [](double a, double b) { return a == b ? 1.0 : 0.0; }, [](double x) { return x == 2 ? 1.0 : 0.0; });
    add_pair(
        "not_equal", "operator!=", not_equal, operator!=, [](const Tensor& x) { return x != 2; },
        [](double a, double b) { return a != b ? 1.0 : 0.0; }, [](double x) { return x != 2 ? 1.0 : 0.0; });
    add_pair(
        "less", "operator<", less, operator<, [](const Tensor& x) { return x < 2; },
        [](double a, double b) { return a < b ? 1.0 : 0.0; }, [](double x) { return x < 2 ? 1.0 : 0.0; });
    add_pair(
        "less_equal", "operator<=", less_equal, operator<=, [](const Tensor& x) { return x <= 2; },
        [](double a, double b) { return a <= b ? 1.0 : 0.0; }, [](double x) { return x <= 2 ? 1.0 : 0.0; });
    add_pair(
        "greater", "operator>", greater, operator>, [](const Tensor& x) { return x > 2; },
        [](double a, double b) { return a > b ? 1.0 : 0.0; }, [](double x) { return x > 2 ? 1.0 : 0.0; });
    add_pair(
        "greater_equal", "operator>=", greater_equal, operator>=, [](const Tensor& x) { return x >= 2; },
        [](double a, double b) { return a >= b ? 1.0 : 0.0; }, [](double x) { return x >= 2 ? 1.0 : 0.0; });
    return rows;
}

std::vector<Row> choice_rows() {
    Row where_row{.op = "where", .dtypes = all_dtypes()};
    for (const auto& [condition, a, b] : {std::tuple<Shape, Shape, Shape>{{}, {}, {}},
                                          {{3, 1}, {1, 5}, {3, 5}},
                                          {{17}, {}, {17}},
                                          {{2, 0}, {1}, {2, 0}},
                                          {{5}, {2, 5}, {2, 1}},
                                          {{2, 11003}, {2, 11003}, {1}}})
        where_row.cases.push_back(
            {.inputs = {{.shape = condition, .dtype = DType::boolean}, {.shape = a}, {.shape = b}},
             .call = call([](const Tensor& c, const Tensor& x, const Tensor& y) { return where(c, x, y); }),
             .reference = reference([](const Array& c, const Array& x, const Array& y) {
                 const Array shape = map(map(c, x, [](double u, double) { return u; }), y,
                                         [](double u, double) { return u; });
                 const Array yes = broadcast(x, shape.shape);
                 const Array no = broadcast(y, shape.shape);
                 Array result = shape;
                 for (std::size_t i = 0; i < result.values.size(); ++i)
                     result.values[i] = shape.values[i] != 0.0 ? yes.values[i] : no.values[i];
                 return result;
             })});
    where_row.refusals = {{[] { where(ones({2}), ones({2}), ones({2})); }, {"[where]", "bool"}}};

    Row clamp_row{.op = "clamp",
                  .cases = unary_cases([](const Tensor& x) { return clamp(x, -0.75, 1.25); },
                                       [](double x) { return x < -0.75 ? -0.75 : (x > 1.25 ? 1.25 : x); })};
    clamp_row.refusals = {{[] { clamp(ones({2}), 1.0, -1.0); }, {"[clamp]", "1", "-1"}}};

    const Row whole_clamp_row{
        .op = "clamp",
        .cases = unary_cases([](const Tensor& x) { return clamp(x, -1.0, 3.0); },
                             [](double x) { return x < -1.0 ? -1.0 : (x > 3.0 ? 3.0 : x); }, {-5.0, 9.0}),
        .dtypes = number_dtypes()};

    Row fill_row{.op = "masked_fill", .dtypes = number_dtypes()};
    for (const auto& [shape, mask] : {std::pair<Shape, Shape>{{}, {}},
                                      {{17}, {17}},
                                      {{3, 5}, {5}},
                                      {{3, 5}, {3, 1}},
                                      {{0, 3}, {3}},
                                      {{2, 11003}, {11003}}})
        fill_row.cases.push_back(
            {.inputs = {{.shape = shape}, {.shape = mask, .dtype = DType::boolean}},
             .call = call([](const Tensor& x, const Tensor& m) { return masked_fill(x, m, 7); }),
             .reference = reference([](const Array& x, const Array& m) {
                 return map(x, m, [](double value, double hidden) { return hidden != 0.0 ? 7.0 : value; });
             })});
    fill_row.refusals = {{[] { masked_fill(ones({2}), ones({2}), 0); }, {"[masked_fill]", "bool"}}};
    return {where_row, clamp_row, whole_clamp_row, fill_row};
}

}  // namespace

std::vector<Row> elementwise_rows() {
    std::vector<Row> rows = arithmetic_rows();
    for (const auto& more : {function_rows(), compare_rows(), choice_rows()})
        rows.insert(rows.end(), more.begin(), more.end());
    return rows;
}
const RowsOfFamily elementwise_family(elementwise_rows);

TEST_CASE("elementwise: NaN passes through maximum, minimum, sign, clamp and abs") {
    on_each_device([] {
        const Tensor x = tensor({nan, 1.0});
        const Tensor y = tensor({1.0, nan});
        for (const Tensor& result : {maximum(x, y), minimum(x, y)}) {
            CHECK(std::isnan(result[0].item()));
            CHECK(std::isnan(result[1].item()));
        }
        for (const Tensor& result : {sign(x), clamp(x, 0.0, 0.5), abs(x)}) {
            CHECK(std::isnan(result[0].item()));
            CHECK(!std::isnan(result[1].item()));
        }
    });
}

}  // namespace potluck::test
