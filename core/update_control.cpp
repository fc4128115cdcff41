#include "core/update_control.h"

#include <array>
#include <cmath>

#include "core/backend.h"
#include "core/capture.h"
#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

// Positions of the numbers in the memory.
constexpr std::int64_t learning_rate_place = offsetof(UpdateNumbers, learning_rate) / sizeof(double);
constexpr std::int64_t loss_sum_place = offsetof(UpdateNumbers, loss_sum) / sizeof(double);
constexpr std::int64_t squares_place = offsetof(UpdateNumbers, sum_of_squares) / sizeof(double);

/// A range of neighbouring numbers as a tensor.
Tensor part_of(const Tensor& values, std::int64_t first, std::int64_t count) {
    return values.alias({count}, {1}, first);
}

void copy_in(const Tensor& to, const void* from) {
    backend(to.device()).copy_from_host(to.raw_data(), from, to.bytes());
    to.storage()->bump_version();
}

}  // namespace

UpdateControl::UpdateControl(Device device, std::int64_t steps)
    : values_(Tensor::empty({static_cast<std::int64_t>(update_number_count)}, {DType::f64, device})),
      steps_(steps) {
    if (steps < 0)
        throw Error("update",
                    fmt::format("steps is {}. It must not be negative: give optimizer.steps().", steps));
    UpdateNumbers numbers;
    numbers.steps = static_cast<double>(steps);
    copy_in(values_, &numbers);
}

void UpdateControl::write(const Inputs& inputs) {
    const OpScope scope("update");
    const auto check = [](const char* name, double value) {
        if (!(value >= 0.0) || std::isinf(value))
            throw Error("update", fmt::format("{} is {}. It must be finite and not negative.", name, value));
    };
    check("learning_rate", inputs.learning_rate);
    check("targets", inputs.targets);
    check("loss_scale", inputs.loss_scale);
    check("max_norm", inputs.max_norm);
    if (inputs.loss_scale == 0.0) throw Error("update", "loss_scale is 0. It must be above 0.");
    const std::array<double, 5> written{inputs.learning_rate, inputs.targets, inputs.loss_scale,
                                        inputs.max_norm, 0.0};
    static_assert(loss_sum_place == learning_rate_place + 4);
    copy_in(part_of(values_, learning_rate_place, 5), written.data());
    is_decided_ = false;
}

void UpdateControl::check_part(const char* what, const Tensor& x) const {
    if (x.device() != device())
        throw Error("update", fmt::format("{} lies on {} and the control of the update on {}. Move it there.",
                                          what, x.device(), device()));
    if (!is_floating(x.dtype()))
        throw Error("update", fmt::format("{} is {}. It must be floating.", what, x.dtype()));
}

void UpdateControl::add_loss(const Tensor& loss, double scale) {
    const OpScope scope("update");
    if (loss.count() != 1)
        throw Error("update",
                    fmt::format("the loss has shape {}. It must be one number.", pretty(loss.shape())));
    check_part("the loss", loss);
    Tensor sum = part_of(values_, loss_sum_place, 1);
    backend(device()).add_scaled(loss.alias({1}, {1}, loss.offset()), scale, sum);
    sum.storage()->bump_version();
}

void UpdateControl::measure(std::span<const Tensor> gradients) {
    const OpScope scope("update");
    for (const Tensor& gradient : gradients) check_part("a gradient", gradient);
    Tensor sums = part_of(values_, squares_place, 3);
    backend(device()).sum_of_squares(gradients, sums);
    sums.storage()->bump_version();
}

void UpdateControl::decide() {
    const OpScope scope("update");
    backend(device()).decide_update(values_);
    values_.storage()->bump_version();
    is_decided_ = true;
}

UpdateNumbers UpdateControl::read() {
    const OpScope scope("update");
    detail::require_readable("update", device());
    UpdateNumbers numbers;
    backend(device()).copy_to_host(&numbers, values_.raw_data(), values_.bytes());
    steps_ = static_cast<std::int64_t>(numbers.steps);
    return numbers;
}

}  // namespace potluck
