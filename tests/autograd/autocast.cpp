// Which op computes in which dtype under Autocast, and that gradients of f32 tensors are never rounded.

#include "autograd/autocast.h"

#include <cmath>
#include <functional>
#include <memory>

#include "autograd/recompute.h"
#include "core/capture.h"
#include "core/memory.h"
#include "tests/autograd/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::contains, test::devices, test::error_of, test::on_each_device, test::test_device;

namespace {

Tensor numbers(const Shape& shape, std::uint64_t seed) {
    Generator generator(seed);
    return randn(shape, {DType::f32}, &generator).to(test_device());
}
Tensor parameter(const Shape& shape, std::uint64_t seed) { return numbers(shape, seed).set_requires_grad(); }

/// `x` rounded to a half type and back.
Tensor rounded(const Tensor& x, DType half) { return x.detach().to(half).to(DType::f32); }

}  // namespace

TEST_CASE("autocast: each class of op gives the dtype of the table") {
    on_each_device([] {
        for (const DType half : {DType::bf16, DType::f16}) {
            CAPTURE(half);
            const Autocast guard(half);
            const Tensor x = numbers({4, 6}, 1), w = parameter({5, 6}, 2), b = parameter({5}, 3);
            const Tensor y = linear(x, w, b);  // (4, 5)
            CHECK(y.dtype() == half);
            CHECK(matmul(x, transpose(w, 0, 1)).dtype() == half);
            CHECK(linear_gelu(x, w, b).dtype() == half);
            const Tensor image = numbers({2, 3, 5, 5}, 4), filters = parameter({4, 3, 3, 3}, 5);
            CHECK(conv2d(image, filters).dtype() == half);
            CHECK(conv1d(numbers({2, 3, 9}, 6), parameter({4, 3, 3}, 7)).dtype() == half);
            const Tensor q = numbers({1, 2, 3, 4}, 8);
            CHECK(scaled_dot_product_attention(q, q, q).dtype() == half);
            CHECK(embedding(w, arange(0, 3).to(test_device())).dtype() == half);

            const Tensor scale = parameter({5}, 9);
            CHECK(layer_norm(y, scale, b).dtype() == half);
            CHECK(rms_norm(y, scale).dtype() == half);
            CHECK(add_layer_norm(y, y, scale, b).second.dtype() == half);
            CHECK(layer_norm(x, parameter({6}, 10), {}).dtype() == DType::f32);
            const Tensor four = parameter({4}, 11);
            CHECK(batch_norm(conv2d(image, filters), four, four, {}, {}, {.training = true}).dtype() == half);

            for (const Tensor& wide :
                 {softmax(y), log_softmax(y), logsumexp(y, {1}), y.sum(), y.mean(), var(y, {1}),
                  stddev(y, {1}), norm(y), norm(y, 1.0), exp(y), log(exp(y)), square(y), power(y, 2.0),
                  power(y, 3.0), rsqrt(exp(y)), reciprocal(exp(y)), mse_loss(y, y),
                  cross_entropy(y, arange(0, 4).to(test_device()))})
                CHECK(wide.dtype() == DType::f32);

            for (const Tensor& same : {relu(y), gelu(y), y + y, y * 2.0, transpose(y, 0, 1), dropout(y, 0.5)})
                CHECK(same.dtype() == half);
            CHECK((y + b).dtype() == DType::f32);  // promotion, as without
            CHECK(autocast(x).dtype() == half);
            CHECK(autocast(arange(0, 3)).dtype() == DType::i64);

            {
                const Autocast off(DType::f32);
                CHECK(matmul(x, transpose(w, 0, 1)).dtype() == DType::f32);
                CHECK(softmax(y).dtype() == half);
                CHECK(autocast(x).is_same(x));
            }
            CHECK(matmul(x, transpose(w, 0, 1)).dtype() == half);
        }
        CHECK(Autocast::dtype() == DType::f32);
    });
}

TEST_CASE("autocast: operands of f64 and integers are left alone") {
    const Autocast guard(DType::bf16);
    const Tensor x = ones({2, 3}, {DType::f64}), w = ones({4, 3});
    CHECK(linear(x, w).dtype() == DType::f64);
    CHECK(matmul(ones({2, 2}, {DType::i64}), ones({2, 2}, {DType::i64})).dtype() == DType::i64);
    CHECK(contains(error_of([] { const Autocast bad(DType::f64); }), "[autocast] the dtype is f64"));
    CHECK(contains(error_of([] { const Autocast bad(DType::i32); }), "bf16 or f16"));
}

TEST_CASE("autocast: a product is that of the rounded operands, and gradients are f32 and not rounded") {
    on_each_device([] {
        for (const DType half : {DType::bf16, DType::f16}) {
            CAPTURE(half);
            const Tensor x = parameter({7, 9}, 1), w = parameter({5, 9}, 2), b = parameter({5}, 3);
            const Tensor dy = rounded(numbers({7, 5}, 4), half);
            Tensor y;
            {
                const Autocast guard(half);
                y = linear(x, w, b);
            }
            backward(y, {.gradient = dy.to(half)});

            const Tensor xr = rounded(x, half).set_requires_grad(), wr = rounded(w, half).set_requires_grad(),
                         br = rounded(b, half).set_requires_grad();
            const Tensor wide = linear(xr, wr, br);
            backward(wide, {.gradient = dy});
            CHECK(test::near(y.to(DType::f32), rounded(wide, half).to_vector(),
                             half == DType::bf16 ? 8e-3 : 1e-3));
            for (const auto& [found, expected] : {std::pair{x, xr}, {w, wr}, {b, br}}) {
                REQUIRE(found.grad().defined());
                CHECK(found.grad().dtype() == DType::f32);
                CHECK(test::near(found.grad(), expected.grad().to_vector(), 2e-6));
            }
        }
    });
}

TEST_CASE("autocast: gradients of 4096 micro-batches add up in f32") {
    on_each_device([] {
        const Tensor w = ones({1, 1}).to(test_device()).set_requires_grad();
        const Tensor x = full({1, 1}, 2.0).to(test_device());
        for (int i = 0; i < 4096; ++i) {
            const Autocast guard(DType::bf16);
            backward(linear(x, w).sum() * (1.0 / 4096));
        }
        CHECK(w.grad().item() == doctest::Approx(2.0).epsilon(1e-6));
    });
}

TEST_CASE("autocast: backward computes in the dtypes of forward, whatever block it runs in") {
    const Tensor x = parameter({3, 4}, 1), w = parameter({4, 4}, 2);
    const auto run = [&](const std::function<void(const Tensor&)>& go_back) {
        x.node();
        Tensor loss;
        {
            const Autocast guard(DType::bf16);
            loss = square(linear(gelu(linear(x, w)), w)).sum();
        }
        go_back(loss);
        const test::Values gradient = w.grad().to_vector();
        Tensor(w).set_grad({});
        Tensor(x).set_grad({});
        return gradient;
    };
    const test::Values outside = run([](const Tensor& loss) { loss.backward(); });
    CHECK(run([](const Tensor& loss) {
              const Autocast inside(DType::bf16);
              loss.backward();
          }) == outside);
    CHECK(run([](const Tensor& loss) {
              const Autocast other(DType::f32);
              loss.backward();
          }) == outside);
}

TEST_CASE(
    "autocast: a parameter that was changed is rounded anew within one block, also as a transposed view") {
    on_each_device([] {
        const Autocast guard(DType::bf16);
        Tensor w = ones({2, 2}).to(test_device()).set_requires_grad();
        const Tensor x = ones({1, 2}).to(test_device());
        for (const double value : {1.0, 3.0, 0.5}) {
            {
                const NoGrad no_grad;
                w.fill_(value);
            }
            CHECK(linear(x, w).to_vector() == test::Values{2 * value, 2 * value});
            CHECK(linear(x, transpose(w, 0, 1)).to_vector() == test::Values{2 * value, 2 * value});
        }
        // Other elements of the same tensor.
        w.set_elements(full({2, 2}, 7.0).to(test_device()));
        CHECK(linear(x, w).to_vector() == test::Values{14, 14});
    });
}

TEST_CASE("autocast: a second derivative goes through what was rounded") {
    const Tensor x = tensor({2.0, 3.0}, {1, 2}).set_requires_grad(),
                 w = tensor({1.0, 0.5}, {1, 2}).set_requires_grad();
    Tensor y;
    {
        const Autocast guard(DType::bf16);
        y = power(linear(x, w), 3.0).sum();  // (2 + 1.5)^3
    }
    const Tensor slope = gradients(y, {x}, {.create_graph = true})[0];  // 3 u^2 w
    CHECK(test::near(slope, {36.75, 18.375}, 1e-2));
    const Tensor second = gradients(slope.sum(), {w})[0];  // d/dw sum(3 u^2 w) = 6 u x (w0 + w1) + 3 u^2
    CHECK(test::near(second, {6 * 3.5 * 2 * 1.5 + 36.75, 6 * 3.5 * 3 * 1.5 + 36.75}, 1e-2));
}

TEST_CASE("autocast: what is kept of parameters goes at the end of the block") {
    const Tensor w = ones({100, 100}).set_requires_grad();
    const std::int64_t before = memory_statistics(Device::cpu()).current;
    {
        const Autocast guard(DType::bf16);
        const NoGrad no_grad;
        for (int i = 0; i < 3; ++i) {
            const Autocast inner(DType::bf16);
            (void)linear(ones({1, 100}), w);
        }
        CHECK(memory_statistics(Device::cpu()).current - before == 20000);  // once
    }
    CHECK(memory_statistics(Device::cpu()).current == before);
}

TEST_CASE("autocast: what somebody does to a rounded parameter does not reach the ops") {
    const Autocast guard(DType::bf16);
    const NoGrad no_grad;
    const Tensor w = ones({2, 2}).set_requires_grad();
    const Tensor rounded_w = autocast(w);
    rounded_w.mul_(0.0);
    CHECK(matmul(ones({1, 2}), w).to_vector() == test::Values{2, 2});
}

TEST_CASE("autocast: guards on the heap may end in any order") {
    auto first = std::make_unique<Autocast>(DType::bf16);
    auto second = std::make_unique<Autocast>(DType::f32);
    first.reset();
    CHECK(Autocast::dtype() == DType::f32);
    second.reset();
    CHECK(Autocast::dtype() == DType::f32);
    const Autocast third(DType::bf16);
    CHECK(autocast(ones({1})).dtype() == DType::bf16);
}

TEST_CASE("autocast: each replay of recorded work rounds what the parameters are by then") {
    on_each_device([] {
        const Autocast guard(DType::bf16);
        const NoGrad no_grad;
        const Tensor x = ones({1, 4}).to(test_device()),
                     w = ones({4, 4}).to(test_device()).set_requires_grad();
        Tensor y = matmul(x, w);  // kept by the block
        const auto work = capture(test_device(), [&] { y = matmul(x, w); });
        w.fill_(2.0);
        work->replay();
        CHECK(y.to_vector() == test::Values{8, 8, 8, 8});
        CHECK(matmul(x, w).to_vector() == test::Values{8, 8, 8, 8});
        work->replay();
        CHECK(y.to_vector() == test::Values{8, 8, 8, 8});
    });
}
