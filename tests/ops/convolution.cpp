#include "autograd/ops/convolution.h"

#include <doctest/doctest.h>

#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

std::int64_t windows(std::int64_t size, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                     std::int64_t dilation) {
    return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

/// The definition: x (batch, channels, height, width), weight (filters, channels / groups, kernel..).
Array convolved(const Array& x, const Array& weight, const Array& bias, const Convolution2d& options) {
    const HeightWidth stride = options.stride, padding = options.padding, dilation = options.dilation;
    const Shape &in = x.shape, &kernel = weight.shape;
    const Shape out{in[0], kernel[0],
                    windows(in[2], kernel[2], stride.height, padding.height, dilation.height),
                    windows(in[3], kernel[3], stride.width, padding.width, dilation.width)};
    const std::int64_t filters = kernel[0] / options.groups;
    return from_indices(out, [&](const std::vector<std::int64_t>& at) {
        double total = bias.values.empty() ? 0.0 : bias.values[static_cast<std::size_t>(at[1])];
        for (std::int64_t c = 0; c < kernel[1]; ++c)
            for (std::int64_t i = 0; i < kernel[2]; ++i) {
                const std::int64_t row = at[2] * stride.height - padding.height + i * dilation.height;
                if (row < 0 || row >= in[2]) continue;
                const std::int64_t channel = at[1] / filters * kernel[1] + c;
                const double* from = x.values.data() + ((at[0] * in[1] + channel) * in[2] + row) * in[3];
                const double* factors =
                    weight.values.data() + ((at[1] * kernel[1] + c) * kernel[2] + i) * kernel[3];
                for (std::int64_t j = 0; j < kernel[3]; ++j) {
                    const std::int64_t column = at[3] * stride.width - padding.width + j * dilation.width;
                    if (column >= 0 && column < in[3]) total += factors[j] * from[column];
                }
            }
        return total;
    });
}

/// (a, b, c) as (a, b, 1, c), and back.
Array as_image(const Array& x) { return {{x.shape[0], x.shape[1], 1, x.shape[2]}, x.values}; }
Array as_line(const Array& x) { return {{x.shape[0], x.shape[1], x.shape[3]}, x.values}; }

struct Sizes {
    Shape x, weight;
    Convolution2d options = {};
};

void add_cases(Row& row, const Sizes& sizes) {
    const Convolution2d options = sizes.options;
    const Input x{.shape = sizes.x}, weight{.shape = sizes.weight, .low = -1.0, .high = 1.0};
    const Input bias{.shape = {sizes.weight[0]}};
    const std::string note = "stride " + to_string({options.stride.height, options.stride.width}) +
                             ", padding " + to_string({options.padding.height, options.padding.width}) +
                             ", dilation " + to_string({options.dilation.height, options.dilation.width}) +
                             ", groups " + std::to_string(options.groups);
    row.cases.push_back(
        {.inputs = {x, weight, bias},
         .call = call([options](const Tensor& x, const Tensor& weight, const Tensor& bias) {
             return conv2d(x, weight, bias, options);
         }),
         .reference = reference([options](const Array& x, const Array& weight, const Array& bias) {
             return convolved(x, weight, bias, options);
         }),
         .note = note});
    row.cases.push_back({.inputs = {x, weight},
                         .call = call([options](const Tensor& x, const Tensor& weight) {
                             return conv2d(x, weight, {}, options);
                         }),
                         .reference = reference([options](const Array& x, const Array& weight) {
                             return convolved(x, weight, {}, options);
                         }),
                         .note = note + ", no bias"});
}

void add_line_case(Row& row, const Shape& x, const Shape& weight, const Convolution1d& options) {
    const Convolution2d wide{
        {1, options.stride}, {0, options.padding}, {1, options.dilation}, options.groups};
    row.cases.push_back(
        {.inputs = {{.shape = x}, {.shape = weight, .low = -1.0, .high = 1.0}, {.shape = {weight[0]}}},
         .call = call([options](const Tensor& x, const Tensor& weight, const Tensor& bias) {
             return conv1d(x, weight, bias, options);
         }),
         .reference = reference([wide](const Array& x, const Array& weight, const Array& bias) {
             return as_line(convolved(as_image(x), as_image(weight), bias, wide));
         })});
}

/// Checks that every device gives the same error text, and returns it.
std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "accepted";
}

}  // namespace

std::vector<Row> convolution_rows() {
    // A weight's gradient is a sum of up to 2040 terms, which a device may accumulate sequentially in f32.
    Row images{.op = "conv2d", .tolerance = 8.0, .gradient_tolerance = 32.0};
    for (const Sizes& sizes : std::vector<Sizes>{
             {{1, 1, 1, 1}, {1, 1, 1, 1}},
             {{1, 2, 3, 3}, {2, 1, 2, 2}, {.groups = 2}},                     // differentiated twice
             {{1, 1, 3, 4}, {2, 1, 2, 2}, {.stride = {2, 1}, .padding = 1}},  // differentiated twice
             {{2, 3, 5, 6}, {4, 3, 3, 2}},
             {{2, 2, 5, 4}, {2, 2, 3, 3}, {.stride = 2, .padding = 1}},
             {{1, 2, 7, 5}, {3, 2, 3, 2}, {.padding = {2, 0}, .dilation = {2, 3}}},
             {{2, 4, 4, 3}, {8, 1, 2, 2}, {.groups = 4}},   // depthwise
             {{1, 1, 7, 7}, {2, 1, 1, 1}, {.stride = 3}},   // elements outside all windows
             {{1, 1, 2, 2}, {1, 1, 2, 2}, {.padding = 3}},  // windows of padding only
             {{3, 2, 4, 5}, {2, 2, 4, 5}},                  // one window
             {{0, 2, 3, 3}, {2, 2, 2, 2}},
             {{2, 3, 4, 4}, {0, 3, 2, 2}},
             {{8, 16, 15, 17}, {24, 16, 3, 3}, {.padding = 1}},  // several tiles, in forward and backward
             {{40, 32, 3, 3}, {16, 16, 3, 3}, {.padding = 1, .groups = 2}},  // tiles of several samples
             {{1, 1, 9, 16}, {1024, 1, 3, 3}, {.padding = 1}},               // tiles of some rows of a sample
             {{1, 1, 1, 140}, {1024, 1, 1, 9}, {.padding = {0, 4}}},         // tiles of parts of a row
             {{3, 5, 4, 4}, {6, 5, 1, 1}},
             {{2, 4, 3, 8}, {6, 2, 1, 1}, {.groups = 2}},
             {{2, 3, 4, 4}, {2, 3, 1, 1}, {.padding = 1}},
             {{2, 2, 11, 13}, {2, 2, 3, 3}, {.stride = 2, .padding = 2, .dilation = 3}},
             {{1, 2, 8, 12}, {2, 2, 2, 2}, {.stride = 3, .padding = 1}},
             {{2, 3, 4, 8}, {3, 3, 3, 3}, {.padding = 1}},
             {{1, 2, 5, 32}, {2, 2, 3, 3}, {.padding = 1}},
             {{1, 2, 3, 64}, {2, 2, 3, 5}, {.padding = {1, 2}}}})
        add_cases(images, sizes);
    images.refusals = {
        {[] {
             conv2d(Tensor(), ones({1, 1, 2, 2}));
         },
         {"[conv2d]", "x is an undefined tensor"}},
        {[] {
             conv2d(ones({1, 1, 2, 2}), Tensor());
         },
         {"[conv2d]", "weight is an undefined tensor"}},
        {[] {
             conv2d(ones({1, 1, 2, 2}, {DType::i64}), ones({1, 1, 2, 2}));
         },
         {"[conv2d]", "i64"}},
        {[] {
             conv2d(ones({1, 2, 2}), ones({1, 1, 2, 2}));
         },
         {"[conv2d]", "(1, 2, 2)", "height, width"}},
        {[] {
             conv2d(ones({1, 1, 2, 2}), ones({1, 2, 2}));
         },
         {"[conv2d]", "(1, 2, 2)", "kernel height"}},
        {[] {
             conv2d(ones({1, 3, 4, 4}), ones({2, 2, 2, 2}));
         },
         {"[conv2d]", "(1, 3, 4, 4)", "(2, 2, 2, 2)"}},
        {[] {
             conv2d(ones({1, 4, 3, 3}), ones({6, 2, 2, 2}), {}, {.groups = 3});
         },
         {"[conv2d]", "groups is 3", "4 channels", "(1, 4, 3, 3)"}},
        {[] {
             conv2d(ones({1, 4, 3, 3}), ones({5, 2, 2, 2}), {}, {.groups = 2});
         },
         {"groups is 2", "5 filters"}},
        {[] {
             conv2d(ones({1, 4, 3, 3}), ones({4, 4, 2, 2}), {}, {.groups = 0});
         },
         {"groups is 0"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({2, 1, 2, 2}), ones({3}));
         },
         {"[conv2d]", "a bias (2)", "(3)"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 2, 2}), {}, {.stride = {1, 0}});
         },
         {"[conv2d]", "stride along the width is 0"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 2, 2}), {}, {.padding = -1});
         },
         {"padding along the height is -1"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 2, 2}), {}, {.dilation = 0});
         },
         {"dilation along the height is 0"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 2, 2}), {}, {.padding = std::int64_t{1} << 62});
         },
         {"padding along the height is 4611686018427387904"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 0, 2}));
         },
         {"kernel along the height is 0"}},
        {[] {
             conv2d(ones({1, 1, 3, 3}), ones({1, 1, 2, 4}));
         },
         {"[conv2d] no window fits into x (1, 1, 3, 3)", "kernel of 4", "width"}},
    };

    Row lines{.op = "conv1d", .tolerance = 8.0, .gradient_tolerance = 4.0};
    add_line_case(lines, {1, 2, 4}, {2, 2, 3}, {.padding = 1});  // differentiated twice
    add_line_case(lines, {2, 3, 9}, {4, 3, 3}, {});
    add_line_case(lines, {2, 4, 10}, {2, 2, 3}, {.stride = 2, .padding = 2, .dilation = 2, .groups = 2});
    add_line_case(lines, {0, 3, 9}, {4, 3, 3}, {});
    add_line_case(lines, {3, 8, 1500}, {12, 8, 5}, {.stride = 2, .padding = 2});
    lines.refusals = {
        {[] {
             conv1d(ones({1, 2, 3, 4}), ones({1, 2, 3}));
         },
         {"[conv1d]", "(1, 2, 3, 4)", "length"}},
        {[] {
             conv1d(ones({1, 2, 4}), ones({1, 2, 3}), {}, {.dilation = 2});
         },
         {"[conv1d] no window fits into x (1, 2, 4)", "kernel of 3", "dilation 2", "reaches over 5",
          "length"}},
        {[] {
             conv1d(ones({1, 2, 4}), ones({1, 2, 3}), {}, {.stride = 0});
         },
         {"stride along the length is 0"}},
    };
    return {images, lines};
}
const RowsOfFamily convolution_family(convolution_rows);

TEST_CASE("convolution: groups see their own channels, forward and backward") {
    on_each_device([] {
        Tensor x = ones({1, 4, 3, 3}), weight = ones({8, 2, 2, 2});
        x.set_requires_grad();
        weight.set_requires_grad();
        const Tensor y = conv2d(x, weight, {}, {.groups = 2});
        CHECK(y.shape() == Shape{1, 8, 2, 2});
        CHECK(y.to_vector() == std::vector<double>(32, 8.0));
        sum(y).backward();
        CHECK(weight.grad().to_vector() == std::vector<double>(64, 4.0));
        for (std::int64_t channel = 0; channel < 4; ++channel)
            CHECK(x.grad()[0][channel].to_vector() == std::vector<double>{4, 8, 4, 8, 16, 8, 4, 8, 4});

        // Depthwise: a filter for every channel.
        Tensor image = arange(0, 8, 1, {DType::f32}).reshape({1, 4, 1, 2});
        const Tensor scales = tensor({1, 10, 100, 1000}).reshape({4, 1, 1, 1});
        CHECK(conv2d(image, scales, {}, {.groups = 4}).to_vector() ==
              std::vector<double>{0, 1, 20, 30, 400, 500, 6000, 7000});
        CHECK(
            refusal([] {
                conv2d(ones({1, 4, 3, 3}), ones({3, 1, 2, 2}), {}, {.groups = 3});
            }) ==
            "[conv2d] groups is 3, but it must divide the 4 channels of x (1, 4, 3, 3) and the 3 filters of "
            "weight (3, 1, 2, 2).");
    });
}

TEST_CASE("convolution: a dilated kernel larger than the input is refused for every stride") {
    on_each_device([] {
        for (const std::int64_t stride : {1, 2, 3, 100}) {
            const std::string text = refusal([&] {
                conv2d(ones({1, 1, 4, 4}), ones({1, 1, 3, 3}), {}, {.stride = stride, .dilation = 2});
            });
            CHECK(text ==
                  "[conv2d] no window fits into x (1, 1, 4, 4): the kernel of 3 with dilation 2 reaches over "
                  "5 along "
                  "the height, where x has 4 with its padding of 0. Make the padding larger, or the kernel "
                  "or its "
                  "dilation smaller.");
        }
        CHECK(conv2d(ones({1, 1, 5, 5}), ones({1, 1, 3, 3}), {}, {.stride = 2, .dilation = 2}).shape() ==
              Shape{1, 1, 1, 1});
    });
}

TEST_CASE("convolution: half types are summed in f32") {
    on_each_device([] {
        // A running sum in bf16 would stop at 256.
        for (const DType dtype : {DType::bf16, DType::f16}) {
            Tensor x = ones({2, 64, 8, 8}, {dtype}), weight = ones({1, 64, 8, 8}, {dtype});
            Tensor bias = zeros({1}, {dtype});
            weight.set_requires_grad();
            bias.set_requires_grad();
            const Tensor y = conv2d(x, weight, bias, {.padding = 8});
            CHECK(max(y).item() == 4096.0);
            sum(y).backward();
            CHECK(bias.grad().item() == 2 * 17 * 17 - (dtype == DType::bf16 ? 2 : 0));  // 578, rounded
            CHECK(weight.grad().to_vector() == std::vector<double>(64 * 64, 128.0));
        }
    });
}

TEST_CASE("convolution: operands of other dtypes are promoted, and each gets a gradient of its own") {
    on_each_device([] {
        Tensor x = ones({1, 1, 2, 2}, {DType::bf16}), weight = ones({1, 1, 2, 2});
        x.set_requires_grad();
        weight.set_requires_grad();
        const Tensor y = conv2d(x, weight);
        CHECK(y.dtype() == DType::f32);
        sum(y).backward();
        CHECK(x.grad().dtype() == DType::bf16);
        CHECK(weight.grad().dtype() == DType::f32);
    });
}

TEST_CASE("convolution: only what is asked for is computed and kept") {
    on_each_device([] {
        for (int wanted = 0; wanted < 3; ++wanted) {
            std::vector<Tensor> leaves{ones({2, 3, 4, 4}), ones({5, 3, 2, 2}), ones({5})};
            leaves[static_cast<std::size_t>(wanted)].set_requires_grad();
            const Tensor y = conv2d(leaves[0], leaves[1], leaves[2]);
            CHECK(y.node()->saved.bytes() == (wanted == 0 ? 60 : wanted == 1 ? 96 : 0) * 4);
            sum(y).backward();
            for (std::size_t i = 0; i < 3; ++i)
                CHECK(leaves[i].grad().defined() == (i == static_cast<std::size_t>(wanted)));
        }
    });
}

}  // namespace potluck::test
