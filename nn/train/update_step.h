#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "core/update_control.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/execution.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/phase.h"
#include "nn/train/precision.h"

namespace potluck {

/// The options of the scaler that a precision needs; none where the loss is not scaled.
inline std::optional<LossScalerOptions> scaler_options(Precision precision,
                                                       const LossScalerOptions& options) {
    return precision == Precision::f16 ? std::optional(options) : std::nullopt;
}

/// What comes after the gradients of a global batch, the same for every execution on one device: the norm, clipping, whether
/// the update is skipped, the optimizer's step, and the one wait for the device that tells how it went.
class UpdateStep {
public:
    /// `scaler`: none where the loss is not scaled. Keeps references.
    UpdateStep(nn::Module& module, optim::Optimizer& optimizer,
               const std::optional<LossScalerOptions>& scaler);

    /// Begins an update over about `targets` losses. Returns what their sum is multiplied by before backward(): 1 without a
    /// scaler, else its scale over the next power of 2, so that gradients have the size of those of the mean.
    double begin(std::int64_t targets);
    /// One step of the optimizer by the gradients that are there: those of the sum over `targets` losses, times what begin()
    /// returned. `losses` are the parts of that sum, on `device`, where the parameters are. Its time is that of `timer`.
    UpdateResult finish(const UpdateRequest& request, Device device, std::int64_t targets,
                        std::span<const Tensor> losses, PhaseTimer& timer);

    std::optional<LossScalerState> scaler_state() const;
    void set_scaler_state(const LossScalerState& state);

private:
    UpdateControl& control(Device device);

    nn::Module& module_;
    optim::Optimizer& optimizer_;
    std::optional<LossScaler> scaler_;
    double loss_scale_ = 1.0;
    std::optional<UpdateControl> control_;
};

}  // namespace potluck
