// Errors that element-wise kernels can only make on a GPU: in copies through shared memory, rounding by other
// instructions, random numbers that must equal the CPU's, and errors that only the device detects.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/view.h"
#include "core/backend.h"
#include "core/error.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/cuda/device.h"

namespace potluck::test {
namespace {

constexpr DType dtypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16,
                            DType::i64, DType::i32, DType::u8,  DType::boolean};

/// Whether all elements are equal, where NaN equals NaN.
bool same(const Tensor& a, const Tensor& b) {
    if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
    if (a.dtype() == DType::i64) return a.to_vector<std::int64_t>() == b.to_vector<std::int64_t>();
    const std::vector<double> x = a.to_vector(), y = b.to_vector();
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (std::isnan(x[i]) && std::isnan(y[i])) continue;
        if (x[i] != y[i] || std::signbit(x[i]) != std::signbit(y[i])) return false;
    }
    return true;
}

/// The results of `function` on the CPU and on the GPU for the same input.
template <class Function>
void check_same(const Tensor& x, Function function) {
    CHECK(same(function(x.to(Device::cuda())).to(Device::cpu()), function(x)));
}

/// Checks that `function` throws the same Error on both devices; returns its text.
template <class Function>
std::string same_error(Function function) {
    std::string messages[2];
    for (const Device device : {Device::cpu(), Device::cuda()}) {
        try {
            function(device);
            backend(device).synchronize();
            FAIL_CHECK("was accepted on " << name_of(device));
        } catch (const Error& error) {
            messages[device == Device::cuda() ? 1 : 0] = error.what();
        }
    }
    CHECK(messages[0] == messages[1]);
    return messages[1];
}

Tensor numbers(const Shape& shape, DType dtype) {
    return to(remainder(arange(0, element_count(shape)), tensor(std::vector<std::int64_t>{251}, {1}))
                  .reshape(shape),
              dtype);
}

}  // namespace

TEST_CASE("cuda copy: transposes of every element size, whole tiles and parts of them, in planes") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::u8})
        for (const Shape& shape :
             {Shape{1, 40, 3, 70}, Shape{2, 4, 3, 4}, Shape{2, 3, 32, 64}, Shape{3, 2, 33, 31}})
            for (const auto& order :
                 {std::vector<std::int64_t>{0, 1, 3, 2}, {3, 2, 1, 0}, {0, 3, 1, 2}, {2, 3, 0, 1}}) {
                INFO(name_of(dtype) << " " << to_string(shape) << " " << to_string(order));
                check_same(numbers(shape, dtype), [&](const Tensor& x) { return permute(x, order).clone(); });
            }
}

TEST_CASE("cuda copy: into targets of any strides, and from repeated elements") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::f16})
        for (const DType other : {DType::f32, DType::f16}) {
            check_same(numbers({6, 40}, dtype), [&](const Tensor& x) {
                const Tensor around = zeros({40, 14}, {other, x.device()});
                transpose(around, 0, 1).narrow(0, 3, 6).copy_(x);  // to a transpose: contiguous in memory
                around.narrow(0, 2, 20).narrow(1, 9, 5).copy_(x[3].narrow(0, 7, 1).expand({20, 5}));
                return around;
            });
        }
    // More axes than a kernel supports.
    Shape shape(15, 2);
    std::vector<std::int64_t> order(15);
    std::iota(order.rbegin(), order.rend(), 0);
    std::swap(order[3], order[9]);
    Strides strides;
    for (const std::int64_t axis : order) strides.push_back(std::int64_t{1} << axis);
    for (std::int64_t& stride : strides)
        stride *= 3;  // nothing can be merged with a target that has its own gaps
    check_same(numbers({3 << 15}, DType::f32), [&](const Tensor& x) {
        const Tensor to_strides = zeros({5 << 15}, {DType::f32, x.device()});
        Strides target_strides;
        for (std::int64_t axis = 0; axis < 15; ++axis)
            target_strides.push_back(5 * (std::int64_t{1} << (axis * 4 % 15)));
        to_strides.alias(shape, target_strides, 0).copy_(x.alias(shape, strides, 0));
        return to_strides;
    });
}

TEST_CASE("cuda copy: conversions between all dtypes round, cut and wrap as on the CPU") {
    if (!has_cuda_device()) return;
    const double infinity = std::numeric_limits<double>::infinity();
    std::vector<double> values{0.0,          -0.0,       1.0,         -1.9,    1.9,      300.0,   -5.0,
                               std::nan(""), infinity,   -infinity,   65504.0, 65519.99, 65520.0, 1e-8,
                               6e-8,         -3e-5,      1e20,        -1e20,   0x1p63,   -0x1p63, 0x1p31,
                               -0x1p31,      0x1p31 - 1, 1e300,       1e-300,  256.5,    257.0,   258.0,
                               2049.0,       2051.0,     1.0009765625};
    // Halfway cases of f16 and bf16, and their neighbours in f64: conversion through f32 would round twice.
    for (const double middle :
         {1.0 + 0x1p-11, 1.0 + 3 * 0x1p-11, 1.0 + 0x1p-8, 1.0 + 3 * 0x1p-8, 1.0 + 0x1p-24})
        for (const double nudge : {0.0, 0x1p-40, -0x1p-40}) values.push_back(middle + nudge);
    const Tensor reals = tensor(values, {static_cast<std::int64_t>(values.size())}, {DType::f64});
    const Tensor integers = tensor(std::vector<std::int64_t>{0,
                                                             1,
                                                             -1,
                                                             255,
                                                             256,
                                                             257,
                                                             1 << 24,
                                                             (1 << 24) + 1,
                                                             (1 << 24) + 3,
                                                             2049,
                                                             2051,
                                                             65519,
                                                             65520,
                                                             (std::int64_t{1} << 40) + 1,
                                                             (std::int64_t{0x101} << 30) + 1,
                                                             (std::int64_t{0x101} << 46) + 1,
                                                             (std::int64_t{0x103} << 46) - 1,
                                                             -(std::int64_t{0x101} << 46) - 1,
                                                             std::numeric_limits<std::int64_t>::max(),
                                                             std::numeric_limits<std::int64_t>::min(),
                                                             (std::int64_t{1} << 53) + 1},
                                   {21});
    for (const DType from : dtypes)
        for (const DType to_dtype : dtypes) {
            INFO(name_of(from) << " to " << name_of(to_dtype));
            for (const Tensor& source : {reals, integers})
                check_same(to(source, from), [&](const Tensor& x) { return to(x, to_dtype); });
        }
}

TEST_CASE("cuda fill: every dtype, straight and with strides") {
    if (!has_cuda_device()) return;
    for (const DType dtype : dtypes) {
        INFO(name_of(dtype));
        const Tensor value = full({}, 1, {dtype});
        check_same(value, [&](const Tensor& x) {
            const Tensor y = full({7, 10}, 1, {dtype, x.device()});
            y.narrow(1, 3, 4).fill_(0);
            y.narrow(0, 1, 1).fill_(is_floating(dtype) ? -2.7 : 3.0);
            return y;
        });
    }
}

TEST_CASE("cuda random: the numbers of the CPU, at any count") {
    if (!has_cuda_device()) return;
    const auto drawn = [](Device device, DType dtype, const Shape& shape, auto draw) {
        Generator generator(99);
        generator.take(12345);
        Tensor y = Tensor::empty(shape, {dtype, device});
        draw(backend(device), generator.take(y.count()), y);
        return y;
    };
    for (const Shape& shape : {Shape{1}, Shape{2}, Shape{3}, Shape{7}, Shape{1001}, Shape{4, 37}}) {
        INFO(to_string(shape));
        const auto both = [&](DType dtype, auto draw) {
            return std::pair(drawn(Device::cuda(), dtype, shape, draw),
                             drawn(Device::cpu(), dtype, shape, draw));
        };
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
            INFO(name_of(dtype));
            const auto [uniform, expected_uniform] = both(
                dtype, [](Backend& device, RandomKey key, Tensor& y) { device.uniform(key, 0.0, 1.0, y); });
            CHECK(same(uniform, expected_uniform));
            const auto [normal, expected_normal] = both(
                dtype, [](Backend& device, RandomKey key, Tensor& y) { device.normal(key, 3.0, 0.5, y); });
            const double step = dtype == DType::f64   ? 1e-15
                                : dtype == DType::f32 ? 5e-7
                                : dtype == DType::f16 ? 2e-3
                                                      : 1.6e-2;
            const std::vector<double> got = normal.to_vector(), expected = expected_normal.to_vector();
            for (std::size_t i = 0; i < got.size(); ++i)
                CHECK(std::fabs(got[i] - expected[i]) <= step * std::max(1.0, std::fabs(expected[i])));
        }
        for (const DType dtype : {DType::i64, DType::i32, DType::u8, DType::boolean}) {
            INFO(name_of(dtype));
            const auto [integers, expected] = both(dtype, [dtype](Backend& device, RandomKey key, Tensor& y) {
                device.random_integers(key, dtype == DType::i64 ? -(std::int64_t{1} << 62) : 0,
                                       dtype == DType::i64 ? (std::int64_t{1} << 62) + 5 : 2, y);
            });
            CHECK(same(integers, expected));
        }
    }
}

TEST_CASE("cuda dropout: the mask of the CPU, whatever the strides of x") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
        for (const Shape& shape : {Shape{5, 64}, Shape{64, 5}, Shape{3, 7}}) {
            INFO(name_of(dtype) << " " << to_string(shape));
            const auto dropped = [&](const Tensor& x) {
                Tensor y = Tensor::empty(x.shape(), {dtype, x.device()});
                backend(x.device()).dropout({3, 4}, {}, 0.3, x, y);
                return y;
            };
            const Tensor x = to(numbers(shape, DType::i64) + 1, dtype);
            check_same(x, dropped);
            check_same(x, [&](const Tensor& y) { return dropped(transpose(y, 0, 1)); });
            check_same(x, [&](const Tensor& y) { return dropped(y.narrow(1, 1, 4)); });
        }
}

TEST_CASE("cuda elementwise: a bad integer operand is named by its first position") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::i64, DType::i32, DType::u8}) {
        INFO(name_of(dtype));
        const auto with_zeros = [&](Device device) {
            Tensor b = to(ones({40, 50}, {DType::i64}), dtype);
            b.narrow(0, 7, 33).narrow(1, 11, 2).fill_(0);
            return b.to(device);
        };
        for (const BinaryOp op : {BinaryOp::divide, BinaryOp::remainder}) {
            const std::string message = same_error([&](Device device) {
                Tensor a = full({40, 50}, 9, {dtype, device});
                try {
                    backend(device).binary(op, a, with_zeros(device), a);
                } catch (const Error&) {  // reported immediately: nothing was written
                    CHECK(a.to_vector() == std::vector<double>(2000, 9.0));
                    throw;
                }
            });
            CHECK(message.find("position 361 ") != std::string::npos);
            // In a transpose the same element has another position.
            same_error([&](Device device) {
                Tensor a = full({50, 40}, 9, {dtype, device});
                backend(device).binary(op, a, transpose(with_zeros(device), 0, 1), a);
            });
        }
        // The device stays usable.
        check_same(full({3}, 9, {dtype}), [](const Tensor& x) {
            return remainder(x, full({3}, 4, {x.dtype(), x.device()}));
        });
    }
    const std::string message = same_error([](Device device) {
        Tensor a = full({3}, 2, {DType::i64, device});
        const Tensor b = tensor(std::vector<std::int64_t>{1, -7, -8}, {3}).to(device);
        backend(device).binary(BinaryOp::power, a, b, a);
    });
    CHECK(message.find("position 1 (row-major) is -7") != std::string::npos);
    same_error([](Device device) {
        Tensor y = full({3}, 2, {DType::i32, device});
        backend(device).unary(UnaryOp::exponential, y, y);
    });
    same_error([](Device device) {
        Tensor y = full({3}, 2, {DType::i32, device});
        backend(device).add_scaled(y, 0.5, y);
    });
    same_error([](Device device) {
        Tensor y = full({3}, 2, {DType::f32, device});
        backend(device).unary_backward(UnaryOp::tanh, y, y, y);
    });
}

TEST_CASE("cuda elementwise: integers wrap around, divide downwards and stay whole") {
    if (!has_cuda_device()) return;
    const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
    const Tensor a = tensor(std::vector<std::int64_t>{lowest, lowest, -7, -7, 7, 7, lowest, 3, -1}, {9});
    const Tensor b = tensor(std::vector<std::int64_t>{-1, 3, 2, -2, -2, 2, 1, 41, 63}, {9});
    for (const DType dtype : {DType::i64, DType::i32, DType::u8, DType::boolean})
        for (const BinaryOp op :
             {BinaryOp::add, BinaryOp::subtract, BinaryOp::multiply, BinaryOp::divide, BinaryOp::maximum,
              BinaryOp::minimum, BinaryOp::remainder, BinaryOp::power}) {
            INFO(name_of(dtype) << " op " << static_cast<int>(op));
            check_same(to(a, dtype), [&](const Tensor& x) {
                Tensor y = Tensor::empty(x.shape(), {dtype, x.device()});
                const Tensor other = op == BinaryOp::power ? abs(b) : b;
                backend(x.device()).binary(op, x, to(other, dtype).to(x.device()), y);
                return y;
            });
        }
    for (const UnaryOp op : {UnaryOp::negate, UnaryOp::absolute, UnaryOp::sign, UnaryOp::square,
                             UnaryOp::relu, UnaryOp::floor, UnaryOp::ceil, UnaryOp::round})
        check_same(a, [&](const Tensor& x) {
            Tensor y = Tensor::empty(x.shape(), {DType::i64, x.device()});
            backend(x.device()).unary(op, x, y);
            return y;
        });
}

TEST_CASE("cuda elementwise: chains of every kind of step, with inputs of any strides, into an input") {
    if (!has_cuda_device()) return;
    using enum ChainStep::Kind;
    const std::vector<ChainStep> steps{{.kind = apply, .function = UnaryOp::square},
                                       {.kind = combine, .op = BinaryOp::add, .input = 1},
                                       {.kind = combine_into, .op = BinaryOp::subtract, .input = 2},
                                       {.kind = derivative, .function = UnaryOp::silu, .input = 0},
                                       {.kind = combine, .op = BinaryOp::maximum, .input = 0},
                                       {.kind = apply, .function = UnaryOp::negate},
                                       {.kind = combine_into, .op = BinaryOp::multiply, .input = 1},
                                       {.kind = apply, .function = UnaryOp::absolute}};
    REQUIRE(steps.size() == most_chain_steps);
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
        for (const bool over : {false, true})
            for (std::size_t count = 1; count <= most_chain_inputs; ++count) {
                INFO(name_of(dtype) << " " << count << " inputs, over an input: " << over);
                std::vector<ChainStep> used;
                for (const ChainStep& step : steps)
                    if (static_cast<std::size_t>(step.input) < count) used.push_back(step);
                const auto result = [&](Device device) {
                    const auto make = [&](const Shape& shape, double scale) {
                        return to(numbers(shape, DType::f64) * scale - 1.0, dtype).to(device);
                    };
                    const std::vector<Tensor> all{make({6, 24}, 0.02), make({24}, 0.1).expand({6, 24}),
                                                  transpose(make({24, 6}, 0.015), 0, 1)};
                    Tensor y = over ? all[0] : Tensor::empty({6, 24}, {dtype, device});
                    backend(device).chain(std::span(all).first(count), used, y);
                    return y;
                };
                const std::vector<double> got = result(Device::cuda()).to_vector();
                const std::vector<double> expected = result(Device::cpu()).to_vector();
                const double step = dtype == DType::f64   ? 1e-14
                                    : dtype == DType::f32 ? 1e-5
                                    : dtype == DType::f16 ? 2e-3
                                                          : 1.6e-2;
                for (std::size_t i = 0; i < got.size(); ++i)
                    CHECK(std::fabs(got[i] - expected[i]) <= step * std::max(1.0, std::fabs(expected[i])));
            }
}

TEST_CASE("cuda elementwise: scaled sums of every pair of dtypes") {
    if (!has_cuda_device()) return;
    for (const DType sum : dtypes)
        for (const DType term : dtypes) {
            if (sum == DType::boolean) continue;
            INFO(name_of(term) << " into " << name_of(sum));
            check_same(numbers({3, 22}, term), [&](const Tensor& x) {
                Tensor y = to(numbers({22, 3}, DType::i64), sum).to(x.device());
                Tensor turned = transpose(y, 0, 1);
                backend(x.device()).add_scaled(x, 2.0, turned);
                return y;
            });
        }
}

}  // namespace potluck::test
