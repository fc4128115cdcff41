#include "nn/train/update_step.h"

#include <algorithm>
#include <cmath>

#include "nn/train/clip.h"

namespace potluck {

UpdateStep::UpdateStep(nn::Module& module, optim::Optimizer& optimizer,
                       const std::optional<LossScalerOptions>& scaler)
    : module_(module), optimizer_(optimizer) {
    if (scaler) scaler_.emplace(*scaler);
}

double UpdateStep::begin(std::int64_t targets) {
    loss_scale_ = 1.0;
    if (scaler_) {
        const double whole =
            std::exp2(std::ceil(std::log2(static_cast<double>(std::max<std::int64_t>(1, targets)))));
        loss_scale_ = scaler_->begin_update() / whole;
    }
    return loss_scale_;
}

/// The control of this update, which goes on from the optimizer's steps (a checkpoint may have been loaded meanwhile).
UpdateControl& UpdateStep::control(Device device) {
    if (!control_ || control_->device() != device || control_->steps() != optimizer_.steps())
        control_.emplace(device, optimizer_.steps());
    return *control_;
}

UpdateResult UpdateStep::finish(const UpdateRequest& request, Device device, std::int64_t targets,
                                std::span<const Tensor> losses, PhaseTimer& timer) {
    timer.begin(Phase::optimizer);
    UpdateControl& numbers = control(device);
    numbers.write({.learning_rate = request.learning_rate,
                   .targets = static_cast<double>(targets),
                   .loss_scale = loss_scale_,
                   .max_norm = request.max_norm});
    for (const Tensor& loss : losses) numbers.add_loss(loss);
    numbers.measure(optimizer_.gradients());
    numbers.decide();
    UpdateNumbers came;
    try {
        optimizer_.step(numbers);
        timer.end();
        came = numbers.read();  // the one wait
    } catch (
        ...) {  // the step was refused, or a bad element was met: the control has counted what did not happen
        optimizer_.finish_step(false);
        control_.reset();
        throw;
    }
    const bool applied = came.skip == 0.0;
    optimizer_.finish_step(applied);
    if (scaler_) scaler_->end_update(applied);
    UpdateResult result{.loss = came.loss_sum / static_cast<double>(targets),
                        .gradient_norm = came.gradient_norm,
                        .targets = targets,
                        .time = timer.seconds()};
    if (!applied && scaler_) {
        result.outcome = UpdateResult::Outcome::overflow;
    } else if (!applied) {
        result.outcome = UpdateResult::Outcome::not_finite;
        result.culprit = first_non_finite_gradient(module_);
    }
    return result;
}

std::optional<LossScalerState> UpdateStep::scaler_state() const {
    return scaler_ ? std::optional(scaler_->state()) : std::nullopt;
}

void UpdateStep::set_scaler_state(const LossScalerState& state) {
    if (scaler_) scaler_->set_state(state);
}

}  // namespace potluck
