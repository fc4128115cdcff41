// The optimizer kernels of every device. The optimizers that use them are tested in tests/nn/.

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "core/backend.h"
#include "core/factories.h"
#include "core/half.h"
#include "core/measure.h"
#include "core/stochastic_rounding.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

Backend& here() { return backend(test_device()); }

double squares_of(std::span<const Tensor> tensors) {
    const SquareSums sums = potluck::sum_of_squares(tensors);
    CHECK(sums.large == 0.0);
    return sums.middle;
}
double sum_of_squares(const Tensor& x) { return squares_of(std::span(&x, 1)); }
double largest_magnitude(const Tensor& x) { return potluck::largest_magnitude(std::span(&x, 1)); }

/// A copy on the device under test, with the same offset from the start of its memory as x.
Tensor copy_of(const Tensor& x) {
    const Tensor whole = empty({x.offset() + x.count()}, {x.dtype(), test_device()});
    const Tensor part = whole.narrow(0, x.offset(), x.count());
    part.copy_(x.to(test_device()));
    return part;
}

struct Adam {
    Tensor parameter, first, second;

    explicit Adam(const Tensor& start)
        : parameter(start),
          first(zeros(start.shape(), {start.dtype() == DType::f64 ? DType::f64 : DType::f32})),
          second(zeros(start.shape(), {first.dtype()})) {}
    void step(std::int64_t number, const Tensor& gradient, bool decoupled, double scale = 1.0) {
        UpdateTensors tensors{parameter, gradient, first, second, {}};
        here().adamw({.learning_rate = 0.01,
                      .beta1 = 0.9,
                      .beta2 = 0.999,
                      .epsilon = 1e-8,
                      .weight_decay = 0.1,
                      .step = number,
                      .decoupled = decoupled,
                      .gradient_scale = scale},
                     std::span(&tensors, 1), {});
    }
};

constexpr double gradients[] = {0.5, -0.25, 0.125};

}  // namespace

TEST_CASE("adamw: three steps of decoupled decay and of Adam with L2 give the known numbers") {
    on_each_device([] {
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
    });
}

TEST_CASE("adamw: the gradient scale multiplies the gradient, whatever its dtype") {
    on_each_device([] {
        Adam plain(ones({100}));
        Adam scaled(ones({100}));
        plain.step(1, full({100}, 0.5), true);
        scaled.step(1, full({100}, 1024.0, {DType::bf16}), true, 0.5 / 1024.0);
        CHECK(plain.parameter.to_vector() == scaled.parameter.to_vector());
        CHECK(plain.second.to_vector() == scaled.second.to_vector());
    });
}

TEST_CASE("adamw: parameters in half types have moments in f32") {
    on_each_device([] {
        for (const DType dtype : {DType::f16, DType::bf16}) {
            Adam half(ones({3000}, {dtype}));
            Adam full_precision(ones({3000}));
            half.step(1, full({3000}, 0.5, {dtype}), true);
            full_precision.step(1, full({3000}, 0.5), true);
            CHECK(half.parameter.to_vector() == full_precision.parameter.to(dtype).to_vector());
            CHECK(half.first.to_vector() == full_precision.first.to_vector());
        }
    });
}

TEST_CASE("adamw: one thread and two give the same bits") {
    Generator generator(1);
    const Tensor start = randn({70001}, {}, &generator);
    const Tensor gradient = randn({70001}, {}, &generator);
    std::vector<double> results[2];
    for (int count = 1; count <= 2; ++count) {
        set_threads(count);
        Adam adam(copy_of(start));
        adam.step(1, gradient, true);
        results[count - 1] = adam.parameter.to_vector();
    }
    set_threads(0);
    CHECK(results[0] == results[1]);
}

TEST_CASE("sgd: plain, momentum, dampening, Nesterov and decay follow their formulas") {
    on_each_device([] {
        struct Case {
            double momentum, dampening, decay;
            bool nesterov;
        };
        for (const Case& c :
             {Case{0.0, 0.0, 0.0, false}, Case{0.0, 0.0, 0.1, false}, Case{0.9, 0.0, 0.1, false},
              Case{0.9, 0.5, 0.0, false}, Case{0.9, 0.0, 0.1, true}}) {
            Tensor parameter = ones({2000});
            Tensor momentum = c.momentum > 0.0 ? zeros({2000}) : Tensor();
            double p = 1.0;
            double m = 0.0;
            for (int step = 0; step < 3; ++step) {
                const double g = gradients[step] * 2.0 + c.decay * p;
                UpdateTensors tensors{parameter, full({2000}, gradients[step]), momentum, {}, {}};
                here().sgd({0.1, c.momentum, c.dampening, c.decay, c.nesterov, step + 1, 2.0},
                           std::span(&tensors, 1), {});
                m = step == 0 ? g : c.momentum * m + (1.0 - c.dampening) * g;
                p -= 0.1 * (c.momentum == 0.0 ? g : (c.nesterov ? g + c.momentum * m : m));
            }
            CHECK(parameter.to_vector().front() == doctest::Approx(p).epsilon(1e-6));
            CHECK(parameter.to_vector().back() == doctest::Approx(p).epsilon(1e-6));
        }
    });
}

TEST_CASE("sum_of_squares does not overflow, and takes any strides and dtype") {
    on_each_device([] {
        CHECK(sum_of_squares(full({100}, 1e20)) == doctest::Approx(1e42));
        CHECK(sum_of_squares(full({70000}, 2.0, {DType::bf16})) == 280000.0);
        CHECK(sum_of_squares(full({100000000 / 8}, 256.0, {DType::f16})) == 65536.0 * 12500000.0);
        CHECK(sum_of_squares(arange(0, 12, 1, {DType::f32}).alias({3, 2}, {1, 6}, 0)) ==
              0 + 36 + 1 + 49 + 4 + 64);
        CHECK(sum_of_squares(empty({0})) == 0.0);
        const double infinity = std::numeric_limits<double>::infinity();
        CHECK(sum_of_squares(tensor({1.0, infinity})) == infinity);
        CHECK(std::isnan(sum_of_squares(tensor({1.0, std::nan("")}))));
    });
}

TEST_CASE("largest_magnitude finds the largest of either sign; NaN wins") {
    on_each_device([] {
        const double infinity = std::numeric_limits<double>::infinity();
        CHECK(largest_magnitude(tensor({1.0, -3.0, 2.0})) == 3.0);
        CHECK(largest_magnitude(tensor({1.0, -infinity})) == infinity);
        CHECK(largest_magnitude(empty({0})) == 0.0);
        std::vector<double> values(100001);
        values[77777] = -5.0;
        CHECK(largest_magnitude(tensor(values, {100001})) == 5.0);
        values[99999] = std::nan("");
        CHECK(std::isnan(largest_magnitude(tensor(values, {100001}))));
        CHECK(std::isnan(largest_magnitude(tensor({std::nan(""), 1.0}))));
    });
}

namespace {

const AdamWSpec adamw_step{
    .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1, .step = 2};
const SgdSpec sgd_step{.learning_rate = 0.1,
                       .momentum = 0.9,
                       .dampening = 0.25,
                       .weight_decay = 0.01,
                       .nesterov = false,
                       .step = 2};

/// Parameters with their gradients on the CPU: more than one GPU launch can take, of all dtypes, with sizes around the
/// packs, blocks and chunks of its kernels, and every seventh with an offset of one element in its memory.
struct Many {
    std::vector<Tensor> parameters, gradients;

    Many() {
        Generator generator(3);
        constexpr std::array dtypes{DType::f32, DType::bf16, DType::f16, DType::f64};
        for (std::size_t i = 0; i < 130; ++i) {
            const auto number = static_cast<std::int64_t>(i);
            const std::int64_t count = i % 26 == 25 ? 16320 + number
                                       : i % 5 == 4 ? 1020 + number
                                                    : number % 9;
            const std::int64_t skip = i % 7 == 6 ? 1 : 0;
            const auto random = [&](DType dtype) {
                return randn({count + skip}, {}, &generator).to(dtype).narrow(0, skip, count);
            };
            parameters.push_back(random(dtypes[i % 4]));
            gradients.push_back(random(i % 3 == 0 ? DType::f32 : dtypes[i % 4]));
        }
    }
};

struct ManyTensors {
    std::vector<UpdateTensors> adamw;
    std::vector<UpdateTensors> sgd;
    std::vector<Tensor> gradients;

    explicit ManyTensors(const Many& many) {
        for (std::size_t i = 0; i < many.parameters.size(); ++i) {
            const Tensor& start = many.parameters[i];
            const auto moment = [&] {
                return full(start.shape(), 0.25, {start.dtype() == DType::f64 ? DType::f64 : DType::f32});
            };
            gradients.push_back(copy_of(many.gradients[i]));
            adamw.push_back({copy_of(start), gradients[i], moment(), moment(), {}});
            sgd.push_back({copy_of(start), gradients[i], i % 2 == 0 ? moment() : Tensor(), {}, {}});
        }
    }
};

/// The largest difference, relative to 1 and the value, in units of the dtype's rounding.
double difference_in_roundings(const Tensor& a, const Tensor& b) {
    const double rounding = a.dtype() == DType::bf16  ? 0x1p-8
                            : a.dtype() == DType::f16 ? 0x1p-11
                            : a.dtype() == DType::f32 ? 0x1p-24
                                                      : 0x1p-53;
    const std::vector<double> left = a.to_vector(), right = b.to_vector();
    REQUIRE(left.size() == right.size());
    double largest = 0.0;
    for (std::size_t i = 0; i < left.size(); ++i) {
        const double difference = std::fabs(left[i] - right[i]) / (1.0 + std::fabs(right[i])) / rounding;
        if (!(difference <= largest)) largest = difference;
    }
    return largest;
}

}  // namespace

TEST_CASE("optimizer: many tensors of any size, dtype and alignment in one call, as on the CPU one by one") {
    const Many many;
    ManyTensors expected(many);
    double squares = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < many.parameters.size(); ++i) {
        here().adamw(adamw_step, std::span(&expected.adamw[i], 1), {});
        here().sgd(sgd_step, std::span(&expected.sgd[i], 1), {});
        squares += sum_of_squares(expected.gradients[i]);
        largest = std::max(largest, largest_magnitude(expected.gradients[i]));
    }
    on_each_device([&] {
        ManyTensors actual(many);
        here().adamw(adamw_step, actual.adamw, {});
        here().sgd(sgd_step, actual.sgd, {});
        for (std::size_t i = 0; i < many.parameters.size(); ++i) {
            INFO("tensor " << i);
            const auto agree = [](const Tensor& a, const Tensor& b) {
                CHECK(difference_in_roundings(a, b) <= 4.0);
            };
            agree(actual.adamw[i].parameter, expected.adamw[i].parameter);
            agree(actual.adamw[i].first_moment_or_none, expected.adamw[i].first_moment_or_none);
            agree(actual.adamw[i].second_moment_or_none, expected.adamw[i].second_moment_or_none);
            agree(actual.sgd[i].parameter, expected.sgd[i].parameter);
            if (i % 2 == 0) agree(actual.sgd[i].first_moment_or_none, expected.sgd[i].first_moment_or_none);
        }
        CHECK(squares_of(actual.gradients) == doctest::Approx(squares).epsilon(1e-12));
        CHECK(potluck::largest_magnitude(actual.gradients) == largest);
        CHECK(potluck::largest_magnitude(std::span<const Tensor>()) == 0.0);
        CHECK(squares_of(std::span<const Tensor>()) == 0.0);
        actual.gradients.push_back(tensor({1.0, std::nan("")}));
        actual.gradients.push_back(ones({3}));
        CHECK(std::isnan(potluck::largest_magnitude(actual.gradients)));
        CHECK(std::isnan(squares_of(actual.gradients)));
    });
}

TEST_CASE(
    "optimizer: on the CPU one call of many tensors gives the bits of one call each, with any threads") {
    const Many many;
    ManyTensors expected(many);
    double squares = 0.0;
    for (std::size_t i = 0; i < many.parameters.size(); ++i) {
        here().adamw(adamw_step, std::span(&expected.adamw[i], 1), {});
        here().sgd(sgd_step, std::span(&expected.sgd[i], 1), {});
        squares += sum_of_squares(expected.gradients[i]);
    }
    for (const int count : {1, 2, 5}) {
        set_threads(count);
        CAPTURE(count);
        ManyTensors actual(many);
        here().adamw(adamw_step, actual.adamw, {});
        here().sgd(sgd_step, actual.sgd, {});
        for (std::size_t i = 0; i < many.parameters.size(); ++i) {
            CAPTURE(i);
            CHECK(actual.adamw[i].parameter.to_vector() == expected.adamw[i].parameter.to_vector());
            CHECK(actual.adamw[i].second_moment_or_none.to_vector() ==
                  expected.adamw[i].second_moment_or_none.to_vector());
            CHECK(actual.sgd[i].parameter.to_vector() == expected.sgd[i].parameter.to_vector());
        }
        CHECK(squares_of(actual.gradients) == squares);
    }
    set_threads(0);
}

TEST_CASE("optimizer: the rounded copy of a master is written in the same call") {
    Generator generator(4);
    const Tensor start = randn({3001}, {}, &generator);
    const Tensor gradient = randn({3001}, {}, &generator);
    on_each_device([&] {
        for (const DType dtype : {DType::bf16, DType::f16}) {
            const Tensor rounded = zeros({3001}, {dtype});
            Adam adam(copy_of(start));
            UpdateTensors tensors{adam.parameter, copy_of(gradient), adam.first, adam.second, rounded};
            here().adamw(adamw_step, std::span(&tensors, 1), {});
            CHECK(rounded.to_vector() == adam.parameter.to(dtype).to_vector());
            CHECK(rounded.to_vector() != start.to(dtype).to_vector());
            UpdateTensors plain{copy_of(start), copy_of(gradient), {}, {}, rounded};
            here().sgd(sgd_step, std::span(&plain, 1), {});
            CHECK(rounded.to_vector() == plain.parameter.to(dtype).to_vector());
        }
    });
}

TEST_CASE("stochastic rounding: up for as many random numbers as the value is of the way; inf and NaN stay") {
    const auto rounded = [](float value, std::uint32_t random) {
        return float(bfloat16::from_bits(round_stochastically(std::bit_cast<std::uint32_t>(value), random)));
    };
    const float above = 1.0F + 0x1p-7F;  // the neighbour of 1 in bf16
    for (const float value : {0.0F, -0.0F, 1.0F, above, -3.5F, 0x1p-133F})
        for (const std::uint32_t random : {0U, 0x80000000U, 0xffffffffU})
            CHECK(std::bit_cast<std::uint32_t>(rounded(value, random)) ==
                  std::bit_cast<std::uint32_t>(value));
    const float quarter = 1.0F + 0x1p-9F;  // a quarter of the way
    CHECK(rounded(quarter, 0xbfffffffU) == 1.0F);
    CHECK(rounded(quarter, 0xc0000000U) == above);
    CHECK(rounded(-quarter, 0xbfffffffU) == -1.0F);
    CHECK(rounded(-quarter, 0xc0000000U) == -above);
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(rounded(infinity, 0xffffffffU) == infinity);
    CHECK(rounded(-infinity, 0xffffffffU) == -infinity);
    CHECK(std::isnan(rounded(std::nanf(""), 0xffffffffU)));
    CHECK(std::isnan(rounded(std::bit_cast<float>(0x7f800001U), 0)));  // its fraction is all cut off
    CHECK(rounded(std::numeric_limits<float>::max(), 0xffffffffU) == infinity);
}

TEST_CASE("stochastic rounding: every device gives the same bits, and the mean of many is the value") {
    constexpr std::int64_t count = 50003;
    // All exact in f32, so that devices could differ in the rounding only: 1 - 0.75 * 2^-9 lies 0.375 of bf16's step
    // below 1.
    const SgdSpec step{.learning_rate = 0x1p-9,
                       .momentum = 0.0,
                       .dampening = 0.0,
                       .weight_decay = 0.0,
                       .nesterov = false,
                       .step = 2,
                       .stochastic_rounding = true};
    std::vector<std::vector<double>> results;
    on_each_device([&] {
        UpdateTensors tensors{
            ones({count}, {DType::bf16}), full({count}, 0.75, {DType::bf16}), {}, {}, {}, {77, 5}};
        here().sgd(step, std::span(&tensors, 1), {});
        results.push_back(tensors.parameter.to_vector());
        double moved = 0.0, neither = 0.0;
        for (const double value : results.back()) {
            moved += value == 1.0 - 0x1p-8 ? 1.0 : 0.0;
            neither += value != 1.0 && value != 1.0 - 0x1p-8 ? 1.0 : 0.0;
        }
        CHECK(neither == 0.0);
        // Five standard deviations: sqrt(n p (1 - p)).
        CHECK(std::fabs(moved - 0.375 * count) < 5.0 * std::sqrt(0.375 * 0.625 * count));

        const double infinity = std::numeric_limits<double>::infinity();
        UpdateTensors special{
            ones({3}, {DType::bf16}), tensor({-infinity, infinity, std::nan("")}), {}, {}, {}, {1, 0}};
        here().sgd(step, std::span(&special, 1), {});
        const std::vector<double> values = special.parameter.to_vector();
        CHECK(values[0] == infinity);
        CHECK(values[1] == -infinity);
        CHECK(std::isnan(values[2]));
        // Another dtype is rounded to nearest.
        UpdateTensors half{ones({5}, {DType::f16}), full({5}, 0.75), {}, {}, {}, {1, 0}};
        here().sgd(step, std::span(&half, 1), {});
        CHECK(half.parameter.to_vector() == std::vector<double>(5, 1.0 - 0x1p-9 * 0.75));
    });
    for (const auto& result : results) CHECK(result == results.front());
    // The random numbers do not depend on where an update begins: the same elements from the middle on, one by one.
    UpdateTensors one{ones({1}, {DType::bf16}), full({1}, 0.75, {DType::bf16}), {}, {}, {}, {77, 5 + 10000}};
    here().sgd(step, std::span(&one, 1), {});
    CHECK(one.parameter.to_vector()[0] == results.front()[40000]);
}

}  // namespace potluck::test
