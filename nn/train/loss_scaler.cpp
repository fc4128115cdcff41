#include "nn/train/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/update_control.h"

namespace potluck {

Tensor scaled_gradient(const Tensor& loss, double scale) {
    return full(loss.shape(), scale, {accumulation_dtype(loss.dtype()), loss.device()});
}

LossScaler::LossScaler(LossScalerOptions options) : options_(options), state_{.scale = options.initial} {
    const auto refuse = [](const std::string& message) { throw Error("loss_scaler", message); };
    if (!(options.smallest > 0.0 && options.smallest <= options.initial &&
          options.initial <= options.largest && std::isfinite(options.largest)))
        refuse(fmt::format(
            "initial is {}, smallest {} and largest {}. They must be finite, above 0 and in order.",
            options.initial, options.smallest, options.largest));
    if (!(options.growth > 1.0) || std::isinf(options.growth) ||
        !(options.backoff > 0.0 && options.backoff < 1.0))
        refuse(fmt::format("growth is {} and backoff {}. The first is above 1, the second between 0 and 1.",
                           options.growth, options.backoff));
    if (options.growth_interval < 1 || options.give_up_after < 1)
        refuse(fmt::format("growth_interval is {} and give_up_after {}. They must be at least 1.",
                           options.growth_interval, options.give_up_after));
}

LossScalerState LossScaler::state() const {
    LossScalerState next = state_;
    if (!stepped_) return next;
    if (skipped_) {
        next.scale = std::max(options_.smallest, next.scale * options_.backoff);
        next.good_updates = 0;
        ++next.skipped_in_a_row;
        return next;
    }
    next.skipped_in_a_row = 0;
    if (++next.good_updates < options_.growth_interval) return next;
    next.good_updates = 0;
    next.scale = std::min(options_.largest, next.scale * options_.growth);
    return next;
}

void LossScaler::set_state(const LossScalerState& state) {
    if (!(state.scale > 0.0) || std::isinf(state.scale) || state.good_updates < 0 ||
        state.skipped_in_a_row < 0)
        throw Error(
            "loss_scaler",
            fmt::format("a state of scale {}, {} good updates and {} skipped ones is none. The scale is "
                        "finite and above 0, the numbers are not negative.",
                        state.scale, state.good_updates, state.skipped_in_a_row));
    state_ = state;
    state_.scale = std::clamp(state.scale, options_.smallest, options_.largest);
    scaled_ = stepped_ = skipped_ = false;
}

double LossScaler::begin_update() {
    state_ = state();
    stepped_ = skipped_ = false;
    scaled_ = true;
    return state_.scale;
}

void LossScaler::end_update(bool applied) {
    stepped_ = true;
    skipped_ = skipped_ || !applied;
    const std::int64_t in_a_row = state().skipped_in_a_row;
    if (applied || in_a_row < options_.give_up_after) return;
    throw Error(
        "loss_scaler",
        fmt::format(
            "{} updates in a row had gradients that are not finite, the last with a loss scale of {}. "
            "Look for the op that makes them (AnomalyCheck names it), lower the learning rate, or use "
            "bf16. The parameters are those before.",
            in_a_row, scale_of_gradients()));
}

void LossScaler::backward(const Tensor& loss) {
    if (!loss.defined() || loss.count() != 1 || !is_floating(loss.dtype()))
        throw Error(
            "loss_scaler",
            !loss.defined()
                ? "the loss is an undefined tensor."
                : fmt::format("the loss is {} {}. It must be floating and have one element: reduce it with "
                              "sum() or mean().",
                              loss.dtype(), pretty(loss.shape())));
    const double scale = begin_update();
    potluck::backward(loss, {.gradient = scaled_gradient(loss, scale)});
}

bool LossScaler::step(optim::Optimizer& optimizer, const StepOptions& options) {
    if (!scaled_)
        throw Error("loss_scaler",
                    "step() divides the gradients by the loss scale, but this scaler has made none. Call "
                    "scaler.backward(loss) instead of loss.backward().");
    const std::vector<Tensor> gradients = optimizer.gradients();
    const Device device = gradients.empty() ? Device::cpu() : gradients.front().device();
    UpdateControl control(device, optimizer.steps());
    control.write({.learning_rate = optimizer.learning_rate(),
                   .loss_scale = scale_of_gradients(),
                   .max_norm = options.max_norm});
    control.measure(gradients);
    control.decide();
    bool applied = false;
    try {
        optimizer.step(control);
        applied = control.read().skip == 0.0;
    } catch (...) {
        optimizer.finish_step(false);
        throw;
    }
    optimizer.finish_step(applied);
    end_update(applied);
    return applied;
}

double LossScaler::gradient_norm(const optim::Optimizer& optimizer) const {
    const std::vector<Tensor> gradients = optimizer.gradients();
    if (gradients.empty()) return 0.0;
    UpdateControl control(gradients.front().device(), optimizer.steps());
    control.write({.loss_scale = scale_of_gradients()});
    control.measure(gradients);
    control.decide();
    return control.read().gradient_norm;
}

}  // namespace potluck
