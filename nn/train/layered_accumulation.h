#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/device.h"
#include "core/tensor.h"
#include "nn/models/language_model.h"
#include "nn/optim/optimizer.h"
#include "nn/train/execution.h"
#include "nn/train/loss.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/precision.h"
#include "nn/train/state_before.h"
#include "nn/train/update_step.h"

namespace potluck {

struct LayeredOptions {
    Precision precision = Precision::f32;
    LossScalerOptions loss_scaler = {};  // with Precision::f16
    /// Where it is computed; none: where the model is.
    std::optional<Device> device = {};
    /// What flows between the blocks is kept in the memory of `host` instead of the device's.
    bool offload_inputs = false;
    /// The blocks' parameters, their gradients and the optimizer's state live in the memory of `host`, where the optimizer
    /// updates them; a block is on the device only while it computes. The model must be on `host` when this is made.
    bool offload_parameters = false;
    Device host = Device::cpu();
};

/// An update in which all micro-batches go through one block before the next: forward without keeping anything but the
/// blocks' inputs, then back from the last block to the first, where each block is computed once more with recording. So a
/// block's parameters are needed twice an update, however many micro-batches there are, and with `offload_inputs` the
/// device's memory does not grow with their number (Pudipeddi et al., "Training Large Neural Networks with Constant Memory
/// using a New Execution Algorithm", 2020). With `offload_parameters` a model that is larger than the device's memory trains.
/// What comes next is read ahead on the copy stream.
///
/// The gradients are those of OneDevice, dropout of modules included, up to the order in which micro-batches are added. (A
/// function dropout() in a block draws as if each block were the first.) With `offload_parameters` a block's parameters are
/// used by that block alone.
class LayeredAccumulation final : public Execution {
public:
    /// `loss` is a function of (logits, targets) as for a Trainer; none: the mean cross-entropy over the targets that are not
    /// -100. Keeps references: model and optimizer must outlive it. Throws Error when parameters are to be offloaded and the
    /// model is not on `host`, or two blocks share one.
    LayeredAccumulation(nn::LanguageModel& model, optim::Optimizer& optimizer, LossFunction loss = {},
                        const LayeredOptions& options = {});
    ~LayeredAccumulation() override;
    LayeredAccumulation(const LayeredAccumulation&) = delete;
    LayeredAccumulation& operator=(const LayeredAccumulation&) = delete;

    UpdateResult update(std::span<const data::Batch> micro_batches, const UpdateRequest& request) override;
    LossTotal evaluate(data::Loader& loader) override;
    std::optional<LossScalerState> loss_scaler_state() const override { return step_.scaler_state(); }
    void set_loss_scaler_state(const LossScalerState& state) override { step_.set_scaler_state(state); }
    DType compute_dtype() const override { return dtype_of(options_.precision); }

private:
    class Pass;

    Device device() const;
    std::vector<std::vector<Tensor>> parameters_of_stages() const;

    nn::LanguageModel& model_;
    optim::Optimizer& optimizer_;
    LossFunction loss_;
    LayeredOptions options_;
    UpdateStep step_;
    std::vector<StateBefore::BufferCopy> buffer_copies_;  // of the last update
};

}  // namespace potluck
