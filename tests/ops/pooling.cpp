#include "autograd/ops/pooling.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

const double infinity = std::numeric_limits<double>::infinity();

/// The number of windows that begin inside x or its left padding, counted one by one.
std::int64_t windows(std::int64_t size, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                     std::int64_t dilation, bool ceil_mode) {
    std::int64_t count = 0;
    for (std::int64_t start = -padding;; start += stride, ++count) {
        const std::int64_t last = start + dilation * (kernel - 1);
        if (last < size + padding) continue;
        // This one extends beyond x: in ceil mode it is used if the one before did not end at the border.
        const bool is_needed = start - stride + dilation * (kernel - 1) < size + padding - 1;
        return count + (ceil_mode && is_needed && start < size ? 1 : 0);
    }
}

/// Calls pool(values of the window inside x, number of elements including padding) for each window.
template <class Pool>
Array pooled(const Array& x, HeightWidth kernel, const Pooling2d& given, const Pool& pool) {
    const HeightWidth padding = given.padding, dilation = given.dilation;
    const HeightWidth stride{given.stride.height == 0 ? kernel.height : given.stride.height,
                             given.stride.width == 0 ? kernel.width : given.stride.width};
    const Shape& in = x.shape;
    const Shape out{
        in[0], in[1],
        windows(in[2], kernel.height, stride.height, padding.height, dilation.height, given.ceil_mode),
        windows(in[3], kernel.width, stride.width, padding.width, dilation.width, given.ceil_mode)};
    return from_indices(out, [&](const std::vector<std::int64_t>& at) {
        std::vector<double> values;
        double places = 0;
        for (std::int64_t i = 0; i < kernel.height; ++i)
            for (std::int64_t j = 0; j < kernel.width; ++j) {
                const std::int64_t row = at[2] * stride.height - padding.height + i * dilation.height;
                const std::int64_t column = at[3] * stride.width - padding.width + j * dilation.width;
                if (row >= in[2] + padding.height || column >= in[3] + padding.width) continue;
                places += 1;
                if (row < 0 || row >= in[2] || column < 0 || column >= in[3]) continue;
                values.push_back(x.values[static_cast<std::size_t>(
                    ((at[0] * in[1] + at[1]) * in[2] + row) * in[3] + column)]);
            }
        return pool(values, places);
    });
}

double largest(const std::vector<double>& values, double) {
    double best = -infinity;
    for (const double value : values) best = std::max(best, value);
    return best;
}
double mean_with_padding(const std::vector<double>& values, double places) {
    double total = 0;
    for (const double value : values) total += value;
    return total / places;
}
double mean_without_padding(const std::vector<double>& values, double) {
    return mean_with_padding(values, static_cast<double>(values.size()));
}

using Pool = double (*)(const std::vector<double>&, double);

Array as_image(const Array& x) { return {{x.shape[0], x.shape[1], 1, x.shape[2]}, x.values}; }
Array as_line(const Array& x) { return {{x.shape[0], x.shape[1], x.shape[3]}, x.values}; }

struct Sizes {
    Shape x;
    HeightWidth kernel;
    Pooling2d options = {};
};

void add_case(Row& row, const Sizes& sizes, Tensor (*op)(const Tensor&, HeightWidth, const Pooling2d&),
              Pool pool) {
    const HeightWidth kernel = sizes.kernel;
    const Pooling2d options = sizes.options;
    row.cases.push_back(
        {.inputs = {{.shape = sizes.x}},
         .call = call([=](const Tensor& x) { return op(x, kernel, options); }),
         .reference = reference([=](const Array& x) { return pooled(x, kernel, options, pool); }),
         .note = "kernel " + to_string({kernel.height, kernel.width}) + (options.ceil_mode ? ", ceil" : "") +
                 (options.count_padding ? "" : ", without padding")});
}

void add_line_case(Row& row, const Shape& x, std::int64_t kernel, const Pooling1d& options,
                   Tensor (*op)(const Tensor&, std::int64_t, const Pooling1d&), Pool pool) {
    const Pooling2d wide{{1, options.stride},
                         {0, options.padding},
                         {1, options.dilation},
                         options.ceil_mode,
                         options.count_padding};
    row.cases.push_back({.inputs = {{.shape = x}},
                         .call = call([=](const Tensor& x) { return op(x, kernel, options); }),
                         .reference = reference([=](const Array& x) {
                             return as_line(pooled(as_image(x), {1, kernel}, wide, pool));
                         })});
}

/// Values that differ by more than gradcheck's step, so that the largest remains the largest.
std::vector<double> distinct(std::int64_t count) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<double>(i * 37 % 101) / 25.0 - 2.0);
    return values;
}

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "accepted";
}

const std::vector<Sizes> all_sizes{
    {{1, 1, 1, 1}, 1},
    {{1, 2, 4, 4}, 2},
    {{2, 3, 5, 6}, {2, 3}},
    {{1, 2, 5, 5}, 3, {.stride = 1, .padding = 1}},
    {{1, 2, 6, 5}, {2, 3}, {.stride = {3, 2}, .padding = {0, 1}}},
    {{1, 1, 5, 7}, 2, {.ceil_mode = true}},
    {{1, 1, 6, 7}, 1, {.stride = 2, .ceil_mode = true}},
    {{2, 1, 6, 6}, 3, {.stride = 2, .padding = 1, .ceil_mode = true}},
    {{1, 2, 7, 8}, 2, {.stride = 1, .dilation = {2, 3}}},
    {{1, 1, 7, 7}, 3, {.stride = 2, .padding = 1, .dilation = 2, .ceil_mode = true}},
    {{0, 2, 4, 4}, 2},
    {{4, 8, 33, 35}, 3, {.stride = 2, .padding = 1}},
};

/// The errors that both kinds of pooling share.
std::vector<Refusal> refusals(const std::string& name,
                              Tensor (*op)(const Tensor&, HeightWidth, const Pooling2d&)) {
    return {{[op] { op(Tensor(), 2, {}); }, {"[" + name + "]", "undefined"}},
            {[op] {
                 op(ones({1, 1, 4, 4}, {DType::i32}), 2, {});
             },
             {"[" + name + "]", "i32"}},
            {[op] {
                 op(ones({1, 4, 4}), 2, {});
             },
             {"[" + name + "]", "(1, 4, 4)", "height, width"}},
            {[op] {
                 op(ones({1, 1, 4, 4}), 0, {});
             },
             {"[" + name + "]", "kernel along the height is 0"}},
            {[op] {
                 op(ones({1, 1, 4, 4}), 2, {.stride = {1, -1}});
             },
             {"stride along the width is -1"}},
            {[op] {
                 op(ones({1, 1, 4, 4}), {2, 5}, {});
             },
             {"no window fits into x (1, 1, 4, 4)", "kernel of 5", "width"}},
            {[op] {
                 op(ones({1, 1, 4, 4}), 2, {.padding = 2});
             },
             {"window 0 along the height", "nothing but padding", "begins at -2"}},
            // The positions -1 and 1 of the only window are left and right of the only element.
            {[op] {
                 op(ones({1, 1, 1, 1}), 2, {.padding = 1, .dilation = 2});
             },
             {"window 0", "nothing but padding", "dilation 2"}},
            {[op] {
                 op(ones({1, 1, 0, 4}), 1, {.padding = 1});
             },
             {"nothing but padding"}}};
}

}  // namespace

std::vector<Row> pooling_rows() {
    Row max2{.op = "max_pool2d", .refusals = refusals("max_pool2d", max_pool2d)};
    Row average2{
        .op = "average_pool2d", .tolerance = 2.0, .refusals = refusals("average_pool2d", average_pool2d)};
    for (const Sizes& sizes : all_sizes) {
        add_case(max2, sizes, max_pool2d, largest);
        if (element_count(sizes.x) < 200)
            max2.cases.back().inputs[0].values = distinct(element_count(sizes.x));
        add_case(average2, sizes, average_pool2d, mean_with_padding);
        Sizes without = sizes;
        without.options.count_padding = false;
        add_case(average2, without, average_pool2d, mean_without_padding);
    }
    Row max1{.op = "max_pool1d"}, average1{.op = "average_pool1d", .tolerance = 2.0};
    for (const auto& [x, kernel, options] : std::vector<std::tuple<Shape, std::int64_t, Pooling1d>>{
             {{2, 3, 8}, 2, {}},
             {{1, 2, 9}, 3, {.stride = 2, .padding = 1, .ceil_mode = true}},
             {{1, 1, 1}, 4, {.ceil_mode = true}},
             {{2, 0, 8}, 2, {}},
             {{3, 5, 4001}, 4, {.stride = 3, .padding = 2, .dilation = 2}}}) {
        add_line_case(max1, x, kernel, options, max_pool1d, largest);
        if (element_count(x) < 200) max1.cases.back().inputs[0].values = distinct(element_count(x));
        add_line_case(average1, x, kernel, options, average_pool1d, mean_with_padding);
    }
    max1.refusals = {{[] {
                          max_pool1d(ones({1, 4, 4, 4}), 2);
                      },
                      {"[max_pool1d]", "(1, 4, 4, 4)", "length"}},
                     {[] {
                          max_pool1d(ones({1, 1, 3}), 4);
                      },
                      {"[max_pool1d]", "kernel of 4", "length"}}};
    average1.refusals = {{[] {
                              average_pool1d(ones({4, 4}), 2);
                          },
                          {"[average_pool1d]", "(4, 4)", "length"}},
                         {[] {
                              average_pool1d(ones({1, 1, 3}), 4);
                          },
                          {"[average_pool1d]", "kernel of 4"}}};
    return {max2, average2, max1, average1};
}
const RowsOfFamily pooling_family(pooling_rows);

TEST_CASE("pooling: in ceil mode no window begins beyond the input") {
    on_each_device([] {
        Tensor x = arange(0, 42, 1, {DType::f32}).reshape({1, 1, 6, 7});
        x.set_requires_grad();
        const Tensor y = max_pool2d(x, 1, {.stride = 2, .ceil_mode = true});
        CHECK(y.shape() == Shape{1, 1, 3, 4});
        CHECK(y.to_vector() == std::vector<double>{0, 2, 4, 6, 14, 16, 18, 20, 28, 30, 32, 34});
        sum(y).backward();
        const std::vector<double> slopes = x.grad().to_vector();
        for (std::size_t i = 0; i < 42; ++i)
            CHECK(slopes[i] == (i / 7 % 2 == 0 && i % 7 % 2 == 0 ? 1.0 : 0.0));
        for (const auto& [length, windows] :
             {std::pair<std::int64_t, std::int64_t>{32, 16}, {10, 5}, {11, 6}}) {
            const Tensor line = max_pool1d(ones({1, 1, length}), 1, {.stride = 2, .ceil_mode = true});
            CHECK(line.to_vector() == std::vector<double>(static_cast<std::size_t>(windows), 1.0));
        }
    });
}

TEST_CASE("pooling: a window larger than the input is refused, or cut in ceil mode where it begins inside") {
    on_each_device([] {
        for (const std::int64_t stride : {1, 2}) {
            CHECK(refusal([&] {
                      max_pool2d(ones({1, 1, 4, 4}), 3, {.stride = stride, .dilation = 2});
                  }) ==
                  "[max_pool2d] no window fits into x (1, 1, 4, 4): the kernel of 3 with dilation 2 reaches "
                  "over 5 "
                  "along the height, where x has 4 with its padding of 0. Make the padding larger, or the "
                  "kernel or "
                  "its dilation smaller.");
            CHECK(refusal([&] {
                      max_pool1d(ones({1, 1, 1}), 4, {.stride = stride, .ceil_mode = true});
                  }).find("[max_pool1d] no window fits into x (1, 1, 1): the kernel of 4") == 0);
        }
        CHECK(max_pool1d(full({1, 1, 1}, 3.0), 4, {.ceil_mode = true}).to_vector() == std::vector<double>{3});
        CHECK(average_pool1d(full({1, 1, 1}, 3.0), 4, {.ceil_mode = true}).to_vector() ==
              std::vector<double>{3});
    });
}

TEST_CASE("pooling: NaN wins, and a window of -inf gives -inf") {
    on_each_device([] {
        const double nan = std::nan("");
        for (const DType dtype : floating_dtypes()) {
            for (const std::vector<double>& values : {std::vector<double>{nan, 1}, {1, nan}, {nan, nan}}) {
                Tensor x = tensor(values, {1, 1, 2}, {dtype});
                x.set_requires_grad();
                const Tensor y = max_pool1d(x, 2);
                CHECK(std::isnan(y.item()));
                sum(y).backward();
                const double first = std::isnan(values[0]) ? 1.0 : 0.0;
                CHECK(x.grad().to_vector() == std::vector<double>{first, 1.0 - first});
            }
            Tensor low = full({1, 1, 2, 2}, -infinity, {dtype});
            low.set_requires_grad();
            const Tensor y = max_pool2d(low, 2);
            CHECK(y.to_vector() == std::vector<double>{-infinity});
            sum(y).backward();
            CHECK(low.grad().to_vector() == std::vector<double>{1, 0, 0, 0});
            CHECK(max_pool2d(low, 2, {.padding = 1}).to_vector() == std::vector<double>(4, -infinity));
        }
    });
}

TEST_CASE("pooling: the gradient goes to the first of equals, and overlapping windows add up") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::bf16}) {
            Tensor x = ones({1, 1, 3, 3}, {dtype});
            x.set_requires_grad();
            sum(max_pool2d(x, 2, {.stride = 1})).backward();
            CHECK(x.grad().to_vector() == std::vector<double>{1, 1, 0, 1, 1, 0, 0, 0, 0});
            Tensor peak = tensor({0, 0, 0, 0, 9, 0, 0, 0, 0}, {1, 1, 3, 3}, {dtype});
            peak.set_requires_grad();
            sum(max_pool2d(peak, 2, {.stride = 1})).backward();
            CHECK(peak.grad().to_vector() == std::vector<double>{0, 0, 0, 0, 4, 0, 0, 0, 0});
        }
        // 1000 windows over one element: a running sum in bf16 would stop at 256.
        std::vector<double> values(1000, 0.0);
        values[999] = 1.0;
        Tensor x = tensor(values, {1, 1, 1000}, {DType::bf16});
        x.set_requires_grad();
        sum(max_pool1d(x, 1000, {.stride = 1, .padding = 999})).backward();
        CHECK(x.grad()[0][0][999].item() == 1000.0);
    });
}

TEST_CASE("pooling: padding counts as zeros or not, and what lies beyond never does") {
    on_each_device([] {
        const Tensor x = full({1, 1, 3}, 6.0);
        const auto pool = [&](bool count_padding) {
            return average_pool1d(
                       x, 3, {.stride = 2, .padding = 1, .ceil_mode = true, .count_padding = count_padding})
                .to_vector();
        };
        CHECK(pool(true) == std::vector<double>{4, 4});
        CHECK(pool(false) == std::vector<double>{6, 6});
        CHECK(
            average_pool1d(full({1, 1, 4}, 6.0), 3, {.stride = 2, .padding = 1, .ceil_mode = true})
                .to_vector() ==
            std::vector<double>{4, 6, 3});  // of the last, one lies in x, one in its padding, and one beyond
    });
}

}  // namespace potluck::test
