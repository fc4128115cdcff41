// Products on the CUDA device against those of the CPU: cases that the op table does not cover.

#include "autograd/ops/matmul.h"

#include <doctest/doctest.h>

#include <cmath>

#include "core/backend.h"
#include "core/factories.h"
#include "cuda/options.h"
#include "tests/cuda/device.h"
#include "tests/cuda/difference.h"

namespace potluck::test {
namespace {

Generator& generator() {
    static Generator fixed(17);
    return fixed;
}

/// The same view of the same numbers, on the CUDA device.
Tensor there(const Tensor& x) {
    const auto elements = x.storage()->bytes() / size_of(x.dtype());
    const Tensor whole = x.alias({elements}, {1}, 0).to(Device::cuda());
    return whole.alias(x.shape(), x.strides(), x.offset());
}

void check_product(const Tensor& a, const Tensor& b, bool accumulate = false, double tolerance = 1e-5) {
    Shape shape(a.shape().begin(), a.shape().end() - 1);
    shape.push_back(b.size(-1));
    Tensor expected = randn(shape, {}, &generator()).to(a.dtype());
    Tensor got = expected.to(Device::cuda());
    backend(Device::cpu()).matmul(a, b, expected, accumulate);
    backend(Device::cuda()).matmul(there(a), there(b), got, accumulate);
    CAPTURE(to_string(a.shape()));
    CAPTURE(to_string(a.strides()));
    CAPTURE(to_string(b.shape()));
    CAPTURE(to_string(b.strides()));
    CHECK(relative_difference(got, expected) <= tolerance);
}

}  // namespace

TEST_CASE("cuda matmul: any strides, broadcast and nested batches, odd offsets") {
    if (!has_cuda_device()) return;
    const Tensor x = randn({6, 10, 20}, {}, &generator());
    const auto view = [&](const Shape& shape, const Strides& strides, std::int64_t offset) {
        return x.alias(shape, strides, offset);
    };
    for (const bool accumulate : {false, true}) {
        CAPTURE(accumulate);
        check_product(view({5, 7}, {20, 1}, 0), view({7, 4}, {20, 1}, 3), accumulate);
        check_product(view({5, 7}, {1, 20}, 1), view({7, 4}, {1, 20}, 0), accumulate);  // both transposed
        check_product(view({5, 7}, {40, 2}, 0), view({7, 4}, {3, 21}, 1), accumulate);  // gaps: copied
        check_product(view({5, 7}, {0, 1}, 5), view({7, 4}, {1, 0}, 0),
                      accumulate);  // repeated rows, columns
        check_product(view({1, 7}, {3, 2}, 0), view({7, 1}, {2, 5}, 0), accumulate);   // a row, a column
        check_product(view({5, 1}, {20, 3}, 0), view({1, 4}, {3, 1}, 0), accumulate);  // an outer product
        check_product(view({3, 5, 7}, {200, 20, 1}, 0), view({3, 7, 4}, {0, 20, 1}, 0),
                      accumulate);  // shared b
        check_product(view({3, 1, 7}, {200, 20, 1}, 0), view({3, 7, 4}, {0, 20, 1}, 0), accumulate);
        check_product(view({3, 5, 7}, {0, 20, 1}, 0), view({3, 7, 4}, {200, 20, 1}, 0),
                      accumulate);  // shared a
        check_product(view({3, 5, 7}, {200, 1, 20}, 0), view({3, 7, 4}, {0, 20, 1}, 0), accumulate);
        check_product(view({2, 3, 2, 5, 4}, {400, 0, 100, 20, 1}, 0),
                      view({2, 3, 2, 4, 3}, {0, 200, 40, 1, 20}, 2),
                      accumulate);  // three axes that cannot be merged
        check_product(view({3, 5, 7}, {0, 40, 2}, 0), view({3, 7, 4}, {200, 20, 1}, 0), accumulate);
        check_product(view({5, 0}, {1, 1}, 0), view({0, 4}, {4, 1}, 0), accumulate);
        check_product(view({0, 7}, {7, 1}, 0), view({7, 4}, {4, 1}, 0), accumulate);
    }
}

TEST_CASE("cuda matmul: every dtype, deep sums, accumulated") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        CAPTURE(name_of(dtype));
        const double tolerance = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 1e-2;
        const Tensor a = randn({33, 3000}, {}, &generator()).to(dtype),
                     b = randn({3000, 40}, {}, &generator()).to(dtype);
        for (const bool accumulate : {false, true}) {
            check_product(a, b, accumulate, tolerance);
            check_product(a.alias({33, 129}, {3000, 1}, 3), b.alias({129, 40}, {40, 1}, 1), accumulate,
                          tolerance);
        }
    }
    for (const DType dtype : {DType::i64, DType::i32, DType::u8}) {
        CAPTURE(name_of(dtype));
        const Tensor a = randint(0, 100, {3, 37, 50}, {dtype}, &generator());
        const Tensor b = randint(0, 100, {3, 50, 21}, {dtype}, &generator());
        for (const bool accumulate : {false, true}) {
            check_product(a, b, accumulate, 0);
            check_product(a.alias({3, 50, 37}, {1850, 1, 50}, 0).alias({3, 9, 37}, {1850, 2, 50}, 1),
                          a.alias({3, 37, 9}, {0, 50, 1}, 0), accumulate, 0);
        }
    }
}

TEST_CASE("cuda matmul: more matrices than the library takes at once") {
    if (!has_cuda_device()) return;
    const Tensor a = randn({70000, 2, 3}, {}, &generator()), b = randn({70000, 3, 1}, {}, &generator());
    check_product(a, b);
}

TEST_CASE("cuda matmul: f32 keeps its bits unless TF32 is allowed") {
    if (!has_cuda_device()) return;
    CHECK_FALSE(cuda::tf32());
    const double value = 1.0 + std::ldexp(1.0, -20);  // TF32 rounds it to 1
    const TensorOptions there{DType::f32, Device::cuda()};
    const auto product = [&] {
        return matmul(full({4, 4}, value, there), ones({4, 4}, there)).to_vector()[0];
    };
    CHECK(product() == 4 * value);
    cuda::set_tf32(true);
    const double rounded = product();
    cuda::set_tf32(false);
    CHECK(rounded == doctest::Approx(4.0).epsilon(1e-3));
    CHECK(product() == 4 * value);
}

TEST_CASE("cuda linear: the bias is added with one rounding, inside the product and before it") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        CAPTURE(name_of(dtype));
        const Tensor x = randn({9, 65}, {}, &generator()).to(dtype),
                     weight = randn({33, 65}, {}, &generator()).to(dtype);
        const Tensor bias = randn({70}, {}, &generator()).to(dtype);
        for (const std::int64_t step : {1, 2}) {
            const Tensor vector = bias.alias({33}, {step}, 1);
            const Tensor expected = linear(x, weight, vector);
            const double tolerance = dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-5 : 1e-2;
            for (const bool epilogue : {true, false}) {
                cuda::set_bias_epilogue(epilogue);
                const Tensor got = linear(there(x), there(weight), there(vector));
                cuda::set_bias_epilogue(true);
                CHECK(relative_difference(got, expected) <= tolerance);
            }
        }
        // 256 + 0.75 + 0.75 would be 257 with two roundings in bf16, whereas 257.5 rounds to 258.
        const TensorOptions half{dtype, Device::cuda()};
        const Tensor sum = linear(full({1, 2}, 0.75, half), ones({1, 2}, half), full({1}, 256.0, half));
        const double rounded = sum.to_vector()[0];
        CHECK(rounded == (dtype == DType::bf16 ? 258.0 : 257.5));
    }
}

TEST_CASE("cuda linear_gelu: the sum and its gelu, by one kernel and by two") {
    if (!has_cuda_device()) return;
    CHECK_FALSE(cuda::gelu_epilogue());
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
        for (const std::int64_t out : {32, 33}) {  // 33 has no such kernel
            CAPTURE(name_of(dtype));
            CAPTURE(out);
            const double tolerance = dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-5 : 1e-2;
            const Tensor x = randn({9, 65}, {}, &generator()).to(dtype);
            const Tensor weight = randn({out, 65}, {}, &generator()).to(dtype);
            const Tensor bias = randn({out}, {}, &generator()).to(dtype);
            const auto compute = [&](Device device) {
                const TensorOptions like{dtype, device};
                std::pair results{Tensor::empty({9, out}, like), Tensor::empty({9, out}, like)};
                backend(device).linear_gelu(x.to(device), weight.to(device), bias.to(device), results.first,
                                            results.second);
                return results;
            };
            const auto expected = compute(Device::cpu());
            for (const bool epilogue : {false, true}) {
                cuda::set_gelu_epilogue(epilogue);
                const auto got = compute(Device::cuda());
                cuda::set_gelu_epilogue(false);
                CHECK(relative_difference(got.first, expected.first) <= tolerance);
                CHECK(relative_difference(got.second, expected.second) <= tolerance);
            }
        }
}

TEST_CASE("cuda matmul: bool is refused as on the CPU") {
    if (!has_cuda_device()) return;
    const auto refusal = [](Device device) {
        const Tensor x = ones({2, 2}, {DType::boolean, device});
        Tensor y = ones({2, 2}, {DType::boolean, device});
        try {
            backend(device).matmul(x, x, y, false);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(refusal(Device::cpu()).starts_with("[matmul]"));
    CHECK(refusal(Device::cuda()) == refusal(Device::cpu()));
}

}  // namespace potluck::test
