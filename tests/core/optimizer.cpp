// The optimizer kernels. The optimizers that use them are tested in tests/nn/.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "core/backend.h"
#include "core/factories.h"

using namespace potluck;

namespace {

Backend& cpu() { return backend(Device::cpu()); }

double sum_of_squares(const Tensor& x) { return cpu().sum_of_squares(std::span(&x, 1)); }
double largest_magnitude(const Tensor& x) { return cpu().largest_magnitude(std::span(&x, 1)); }

struct Adam {
    Tensor parameter, first, second;

    explicit Adam(const Tensor& start)
        : parameter(start),
          first(zeros(start.shape(), {start.dtype() == DType::f64 ? DType::f64 : DType::f32})),
          second(zeros_like(first)) {}
    void step(std::int64_t number, const Tensor& gradient, bool decoupled, double scale = 1.0) {
        AdamWTensors tensors{parameter, gradient, first, second, {}};
        cpu().adamw({.learning_rate = 0.01,
                     .beta1 = 0.9,
                     .beta2 = 0.999,
                     .epsilon = 1e-8,
                     .weight_decay = 0.1,
                     .step = number,
                     .decoupled = decoupled,
                     .gradient_scale = scale},
                    std::span(&tensors, 1));
    }
};

constexpr double gradients[] = {0.5, -0.25, 0.125};

}  // namespace

TEST_CASE("adamw: three steps of decoupled decay and of Adam with L2 give the known numbers") {
    for (const DType dtype : {DType::f64, DType::f32}) {
        for (const std::int64_t count : {1, 17, 50000}) {
            Adam decoupled(ones({count}, {dtype}));
            Adam l2(ones({count}, {dtype}));
            for (std::int64_t step = 1; step <= 3; ++step) {
                const Tensor gradient = full({count}, gradients[step - 1], {dtype});
                decoupled.step(step, gradient, true);
                l2.step(step, gradient, false);
                if (step > 1) continue;
                CHECK(decoupled.parameter.to_vector().back() == doctest::Approx(0.9890000).epsilon(1e-6));
                CHECK(l2.parameter.to_vector().back() == doctest::Approx(0.9900000).epsilon(1e-6));
            }
            CHECK(decoupled.parameter.to_vector().back() == doctest::Approx(0.9809580).epsilon(1e-6));
            CHECK(decoupled.first.to_vector().back() == doctest::Approx(0.0305).epsilon(1e-6));
            CHECK(decoupled.second.to_vector().back() == doctest::Approx(3.275628e-4).epsilon(1e-6));
            CHECK(l2.parameter.to_vector().back() == doctest::Approx(0.9797441).epsilon(1e-6));
            CHECK(l2.first.to_vector().back() == doctest::Approx(0.05736319).epsilon(1e-6));
            CHECK(l2.second.to_vector().back() == doctest::Approx(4.320250e-4).epsilon(1e-6));
        }
    }
}

TEST_CASE("adamw: the gradient scale multiplies the gradient, whatever its dtype") {
    Adam plain(ones({100}));
    Adam scaled(ones({100}));
    plain.step(1, full({100}, 0.5), true);
    scaled.step(1, full({100}, 1024.0, {DType::bf16}), true, 0.5 / 1024.0);
    CHECK(plain.parameter.to_vector() == scaled.parameter.to_vector());
    CHECK(plain.second.to_vector() == scaled.second.to_vector());
}

TEST_CASE("adamw: parameters in half types have moments in f32") {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        Adam half(ones({3000}, {dtype}));
        Adam full_precision(ones({3000}));
        half.step(1, full({3000}, 0.5, {dtype}), true);
        full_precision.step(1, full({3000}, 0.5), true);
        CHECK(half.parameter.to_vector() == full_precision.parameter.to(dtype).to_vector());
        CHECK(half.first.to_vector() == full_precision.first.to_vector());
    }
}

TEST_CASE("adamw: one thread and two give the same bits") {
    Generator generator(1);
    const Tensor start = randn({70001}, {}, &generator);
    const Tensor gradient = randn({70001}, {}, &generator);
    std::vector<double> results[2];
    for (int count = 1; count <= 2; ++count) {
        set_threads(count);
        Tensor parameter = empty_like(start);
        cpu().copy(start, parameter);
        Adam adam(parameter);
        adam.step(1, gradient, true);
        results[count - 1] = adam.parameter.to_vector();
    }
    set_threads(0);
    CHECK(results[0] == results[1]);
}

TEST_CASE("sgd: plain, momentum, dampening, Nesterov and decay follow their formulas") {
    struct Case {
        double momentum, dampening, decay;
        bool nesterov;
    };
    for (const Case& c : {Case{0.0, 0.0, 0.0, false}, Case{0.0, 0.0, 0.1, false}, Case{0.9, 0.0, 0.1, false},
                          Case{0.9, 0.5, 0.0, false}, Case{0.9, 0.0, 0.1, true}}) {
        Tensor parameter = ones({2000});
        Tensor momentum = c.momentum > 0.0 ? zeros({2000}) : Tensor();
        double p = 1.0;
        double m = 0.0;
        for (int step = 0; step < 3; ++step) {
            const double g = gradients[step] * 2.0 + c.decay * p;
            SgdTensors tensors{parameter, full({2000}, gradients[step]), momentum, {}};
            cpu().sgd({0.1, c.momentum, c.dampening, c.decay, c.nesterov, step == 0, 2.0},
                      std::span(&tensors, 1));
            m = step == 0 ? g : c.momentum * m + (1.0 - c.dampening) * g;
            p -= 0.1 * (c.momentum == 0.0 ? g : (c.nesterov ? g + c.momentum * m : m));
        }
        CHECK(parameter.to_vector().front() == doctest::Approx(p).epsilon(1e-6));
        CHECK(parameter.to_vector().back() == doctest::Approx(p).epsilon(1e-6));
    }
}

TEST_CASE("sum_of_squares does not overflow, and takes any strides and dtype") {
    CHECK(sum_of_squares(full({100}, 1e20)) == doctest::Approx(1e42));
    CHECK(sum_of_squares(full({70000}, 2.0, {DType::bf16})) == 280000.0);
    CHECK(sum_of_squares(full({100000000 / 8}, 256.0, {DType::f16})) == 65536.0 * 12500000.0);
    CHECK(sum_of_squares(arange(0, 12, 1, {DType::f32}).alias({3, 2}, {1, 6}, 0)) ==
          0 + 36 + 1 + 49 + 4 + 64);
    CHECK(sum_of_squares(empty({0})) == 0.0);
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(sum_of_squares(tensor({1.0, infinity})) == infinity);
    CHECK(std::isnan(sum_of_squares(tensor({1.0, std::nan("")}))));
}

TEST_CASE("largest_magnitude finds the largest of either sign; NaN wins") {
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(largest_magnitude(tensor({1.0, -3.0, 2.0})) == 3.0);
    CHECK(largest_magnitude(tensor({1.0, -infinity})) == infinity);
    CHECK(largest_magnitude(empty({0})) == 0.0);
    Tensor x = zeros({100001});
    x.data<float>()[77777] = -5.0F;
    CHECK(largest_magnitude(x) == 5.0);
    x.data<float>()[99999] = std::nanf("");
    CHECK(std::isnan(largest_magnitude(x)));
    CHECK(std::isnan(largest_magnitude(tensor({std::nan(""), 1.0}))));
}
