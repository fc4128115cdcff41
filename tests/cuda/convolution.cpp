// Convolutions on the CUDA device against the CPU, by cuDNN and by the matrix products that replace it.

#include <doctest/doctest.h>

#include <cmath>

#include "core/backend.h"
#include "core/factories.h"
#include "tests/cuda/device.h"
#include "tests/cuda/difference.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/library_refusal.h"
#endif

namespace potluck::test {
namespace {

struct Results {
    Tensor y, dx, dweight, dbias;
};

Results convolve(Device device, const Tensor& x, const Tensor& weight, const Tensor& bias, const Shape& shape,
                 const ConvolutionSpec& options) {
    const TensorOptions like{x.dtype(), device};
    const Tensor x_there = x.to(device), weight_there = weight.to(device), bias_there = bias.to(device);
    Results r{Tensor::empty(shape, like), Tensor::empty(x.shape(), like), Tensor::empty(weight.shape(), like),
              Tensor::empty(bias.shape(), like)};
    backend(device).convolution(x_there, weight_there, bias_there, options, r.y);
    backend(device).convolution_backward(x_there, weight_there, r.y, options, r.dx, r.dweight, r.dbias);
    return r;
}

/// Plans are cached by shape: another number of images creates other plans.
void check_convolutions(std::int64_t more_images) {
    struct Case {
        Shape x, weight;
        ConvolutionSpec options;
    };
    const auto with = [](std::array<std::int64_t, 2> stride, std::array<std::int64_t, 2> padding,
                         std::array<std::int64_t, 2> dilation, std::int64_t groups) {
        ConvolutionSpec options;
        options.stride = stride;
        options.padding = padding;
        options.dilation = dilation;
        options.groups = groups;
        return options;
    };
    const std::vector<Case> cases{
        {{2, 3, 8, 9}, {4, 3, 3, 3}, with({1, 1}, {1, 1}, {1, 1}, 1)},
        {{1, 4, 7, 6}, {6, 2, 2, 3}, with({2, 1}, {0, 2}, {1, 2}, 2)},
        {{3, 4, 5, 5}, {4, 1, 3, 3}, with({1, 2}, {1, 0}, {1, 1}, 4)},   // depthwise
        {{2, 3, 1, 11}, {5, 3, 1, 4}, with({1, 3}, {0, 2}, {1, 1}, 1)},  // one dimension
        {{2, 8, 4, 4}, {3, 8, 1, 1}, with({1, 1}, {0, 0}, {1, 1}, 1)},
    };
    Generator generator(3);
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
        for (Case c : cases) {
            c.x[0] += more_images;
            CAPTURE(name_of(dtype));
            CAPTURE(to_string(c.x));
            Shape shape{c.x[0], c.weight[0]};
            for (std::size_t axis = 0; axis < 2; ++axis) {
                const std::int64_t reach = (c.weight[2 + axis] - 1) * c.options.dilation[axis] + 1;
                shape.push_back(
                    (c.x[2 + axis] + 2 * c.options.padding[axis] - reach) / c.options.stride[axis] + 1);
            }
            const Tensor x = randn(c.x, {}, &generator).to(dtype),
                         weight = randn(c.weight, {}, &generator).to(dtype);
            const Tensor bias = randn({c.weight[0]}, {}, &generator).to(dtype);
            const Results expected = convolve(Device::cpu(), x, weight, bias, shape, c.options);
            const Results got = convolve(Device::cuda(), x, weight, bias, shape, c.options);
            const double tolerance = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 1e-2;
            CHECK(relative_difference(got.y, expected.y) <= tolerance);
            CHECK(relative_difference(got.dx, expected.dx) <= tolerance);
            CHECK(relative_difference(got.dweight, expected.dweight) <= tolerance);
            CHECK(relative_difference(got.dbias, expected.dbias) <= tolerance);
        }
}

}  // namespace

TEST_CASE("cuda convolution: agrees with the CPU, forward and backward, in every dtype") {
    if (!has_cuda_device()) return;
    check_convolutions(0);
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE("cuda convolution: what cuDNN refuses becomes matrix products") {
    check_convolutions(2);  // creates plans that are refused when they run
    emulator::refuse_convolutions(true);
    check_convolutions(2);
    check_convolutions(1);
    emulator::refuse_convolutions(false);
}
#endif

TEST_CASE("cuda convolution: an empty batch gives empty outputs and gradients of zeros") {
    if (!has_cuda_device()) return;
    const Results r =
        convolve(Device::cuda(), zeros({0, 2, 5, 5}), ones({3, 2, 3, 3}), ones({3}), {0, 3, 3, 3}, {});
    CHECK(r.dweight.to_vector() == std::vector<double>(54, 0.0));
    CHECK(r.dbias.to_vector() == std::vector<double>(3, 0.0));
}

TEST_CASE("cuda convolution: f32 keeps its bits unless TF32 is allowed") {
    if (!has_cuda_device()) return;
    const double value = 1.0 + std::ldexp(1.0, -20);  // TF32 rounds it to 1
    const Tensor x = full({1, 1, 3, 3}, value), weight = ones({1, 1, 2, 2});
    const Results r = convolve(Device::cuda(), x, weight, zeros({1}), {1, 1, 2, 2}, {});
    CHECK(r.y.to_vector() == std::vector<double>(4, 4 * value));
}

}  // namespace potluck::test
