#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/execution.h"
#include "nn/train/loss.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/phase.h"
#include "nn/train/precision.h"
#include "nn/train/state_before.h"
#include "nn/train/update_step.h"

namespace potluck {

struct OneDeviceOptions {
    Precision precision = Precision::f32;
    LossScalerOptions loss_scaler = {};  // with Precision::f16
};

/// An update on the one device that the module is on: the micro-batches go through forward and backward one after the
/// other, then the optimizer takes its step.
///
/// The host waits for the device once an update, at its end: the scale of the gradients, clipping and whether the update
/// is to be skipped are decided on the device. Gradients of f16 and bf16 parameters are added up in f32 (4 bytes a
/// parameter more), so that any number of micro-batches gives the sum of one large batch. In f16 the loss is scaled, and an
/// update whose gradients overflow has the outcome `overflow`. The first update warns of tensors that collect gradients and
/// belong to no member of the module.
class OneDevice final : public Execution {
public:
    /// `loss`: none means the module's own. Keeps references: module and optimizer must outlive it. Throws Error for a
    /// module without parameters.
    OneDevice(nn::Module& module, optim::Optimizer& optimizer, LossFunction loss = {},
              const OneDeviceOptions& options = {});
    /// Gradients are then accumulated in the parameters' dtypes again.
    ~OneDevice() override;
    OneDevice(const OneDevice&) = delete;
    OneDevice& operator=(const OneDevice&) = delete;

    UpdateResult update(std::span<const data::Batch> micro_batches, const UpdateRequest& request) override;
    LossTotal evaluate(data::Loader& loader) override;
    std::optional<std::int64_t> largest_micro_batch(const data::Batch& sample,
                                                    std::int64_t micro_batches) override;
    std::optional<LossScalerState> loss_scaler_state() const override;
    void set_loss_scaler_state(const LossScalerState& state) override;
    DType compute_dtype() const override { return dtype_of(precision_); }

private:
    std::int64_t add_gradients(std::span<const data::Batch> micro_batches, const UpdateRequest& request,
                               Device device, PhaseTimer& timer, std::vector<Tensor>& losses);

    nn::Module& module_;
    optim::Optimizer& optimizer_;
    LossFunction loss_;
    Precision precision_;  // of forward and backward
    UpdateStep step_;
    bool looked_for_unregistered_ = false;
    std::vector<StateBefore::BufferCopy> buffer_copies_;  // of the last update
    std::vector<Tensor> buffered_;                        // parameters whose gradients have a buffer in f32
};

}  // namespace potluck
