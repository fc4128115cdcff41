// How the device decides an update.

#include "core/update_control.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/backend.h"
#include "core/factories.h"
#include "core/measure.h"
#include "tests/expect_error.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

UpdateNumbers decided(UpdateControl& control, const UpdateControl::Inputs& inputs, double loss,
                      const std::vector<Tensor>& gradients) {
    control.write(inputs);
    control.add_loss(tensor(loss, {DType::f64}));
    control.measure(gradients);
    control.decide();
    return control.read();
}

}  // namespace

TEST_CASE("update: norm, scale and count of steps are those of the mean loss") {
    on_each_device([] {
        UpdateControl control(test_device(), 7);
        // The gradient of the sum over 10 targets, with loss scale 64.
        const std::vector<Tensor> gradients{full({2}, 3.0 * 640, {DType::f16}), full({1, 1}, 4.0 * 640),
                                            zeros({0}), full({1}, 2.0 * 640, {DType::f64})};
        UpdateNumbers numbers =
            decided(control, {.learning_rate = 0.5, .targets = 10, .loss_scale = 64}, 25.0, gradients);
        CHECK(numbers.learning_rate == 0.5);
        CHECK(numbers.loss_sum == 25.0);
        CHECK(numbers.gradient_norm == doctest::Approx(std::sqrt(38.0)));
        CHECK(numbers.gradient_scale == doctest::Approx(1.0 / 640));
        CHECK(numbers.skip == 0.0);
        CHECK(numbers.steps == 8.0);
        CHECK(control.steps() == 8);
        numbers = decided(control, {.targets = 10, .loss_scale = 64, .max_norm = 0.5}, 1.0, gradients);
        CHECK(numbers.loss_sum == 1.0);
        CHECK(numbers.gradient_scale == doctest::Approx(0.5 / std::sqrt(38.0) / 640));
        CHECK(numbers.steps == 9.0);
        numbers = decided(control, {.targets = 640, .max_norm = 100.0}, 1.0, gradients);
        CHECK(numbers.gradient_scale == doctest::Approx(1.0 / 640));
    });
}

TEST_CASE("update: what is not finite and what has no targets is skipped, and not counted") {
    on_each_device([] {
        UpdateControl control(test_device());
        const auto skips = [&](double targets, double loss, const Tensor& gradient) {
            const UpdateNumbers numbers = decided(control, {.targets = targets}, loss, {gradient});
            CHECK(numbers.steps == 0.0);
            return numbers.skip != 0.0;
        };
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
            CHECK(skips(1, 1.0, full({3}, infinity, {dtype})));
            CHECK(skips(1, 1.0, full({3}, -infinity, {dtype})));
            CHECK(skips(1, 1.0, full({3}, std::nan(""), {dtype})));
            CHECK(skips(1, infinity, ones({3}, {dtype})));
            CHECK(skips(1, std::nan(""), ones({3}, {dtype})));
            CHECK(skips(0, 0.0, ones({3}, {dtype})));
        }
        CHECK(decided(control, {}, 0.0, {ones({3})}).steps == 1.0);
        CHECK(decided(control, {}, 0.0, {}).gradient_norm == 0.0);
    });
}

TEST_CASE("update: f64 gradients whose squares f64 does not hold") {
    on_each_device([] {
        UpdateControl control(test_device());
        for (const double size : {1e200, 1e-200, 1e155, 1e-155}) {
            const UpdateNumbers numbers =
                decided(control, {.max_norm = size}, 0.0, {full({100}, size, {DType::f64})});
            CHECK(numbers.gradient_norm / size == doctest::Approx(10.0));
            CHECK(numbers.gradient_scale == doctest::Approx(0.1));
            CHECK(numbers.skip == 0.0);
        }
    });
}

TEST_CASE("update: the kernels follow the control, and a skipped update writes nothing") {
    on_each_device([] {
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
            for (const bool adamw : {true, false}) {
                const DType state = dtype == DType::f64 ? DType::f64 : DType::f32;
                const auto run = [&](bool controlled, bool skip) {
                    Tensor p = full({5000}, 0.5, {state}), half = full({5000}, 0.5, {DType::bf16});
                    Tensor m = zeros({5000}, {state}), v = zeros({5000}, {state});
                    const Tensor g = full({5000}, 3.0, {dtype});
                    UpdateControl control(test_device(), 4);
                    control.write({.learning_rate = 0.25, .targets = skip ? 0.0 : 8.0});
                    control.measure(std::vector<Tensor>{g});
                    control.decide();
                    const Tensor values = controlled ? control.values() : Tensor();
                    const double rate = controlled ? 0.5 : 0.125, scale = controlled ? 1.0 : 0.125;
                    if (adamw) {
                        UpdateTensors tensors{p, g, m, v, half};
                        backend(test_device())
                            .adamw({.learning_rate = rate,
                                    .beta1 = 0.9,
                                    .beta2 = 0.99,
                                    .epsilon = 1e-8,
                                    .weight_decay = 0.1,
                                    .step = controlled ? -2 : 3,
                                    .gradient_scale = scale},
                                   std::span(&tensors, 1), values);
                    } else {
                        UpdateTensors tensors{p, g, m, {}, half};
                        backend(test_device())
                            .sgd({.learning_rate = rate,
                                  .momentum = 0.9,
                                  .dampening = 0.5,
                                  .weight_decay = 0.1,
                                  .nesterov = false,
                                  .step = controlled ? -4 : 1,
                                  .gradient_scale = scale},
                                 std::span(&tensors, 1), values);
                    }
                    std::vector<double> all;
                    for (const Tensor& x : {p, half, m, v})
                        for (const double value : x.to_vector()) all.push_back(value);
                    return all;
                };
                CHECK(run(true, false) == run(false, false));
                const std::vector<double> untouched = run(true, true);
                CHECK(untouched[0] == 0.5);
                CHECK(untouched[4999] == 0.5);
                CHECK(untouched[5000] == 0.5);
                CHECK(untouched[10000] == 0.0);
                CHECK(untouched[19999] == 0.0);
            }
        }
    });
}

TEST_CASE("update: bad input is refused") {
    UpdateControl control;
    CHECK(contains(error_of([&] { control.write({.learning_rate = -1.0}); }), "learning_rate is -1"));
    CHECK(contains(error_of([&] { control.write({.targets = infinity}); }), "targets is inf"));
    CHECK(contains(error_of([&] { control.write({.loss_scale = 0.0}); }), "loss_scale is 0"));
    CHECK(contains(error_of([&] { control.write({.max_norm = std::nan("")}); }), "max_norm is nan"));
    CHECK(contains(error_of([&] { control.add_loss(ones({2})); }), "shape (2)"));
    CHECK(contains(error_of([] { UpdateControl(Device::cpu(), -3); }), "[update] steps is -3"));
}

}  // namespace potluck::test
