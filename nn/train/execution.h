#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "data/loader.h"
#include "nn/train/loss.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/phase.h"

namespace potluck {

/// The parameters of one update.
struct UpdateRequest {
    std::int64_t number = 0;  // of this update in the run, from 0; its random numbers depend on it
    double learning_rate = 0.0;
    double max_norm = 0.0;  // the gradient is scaled down to this norm; 0: no clipping
};

/// The outcome of an update.
struct UpdateResult {
    enum class Outcome : std::uint8_t {
        applied,
        no_targets,  // the global batch has no valid targets
        not_finite,  // the loss or the gradient contains an infinity or NaN
        overflow,    // the same, with a scaled loss: the next scale is smaller
    };

    Outcome outcome = Outcome::applied;
    double loss = 0.0;           // mean over the targets of the global batch, before the update
    double gradient_norm = 0.0;  // before clipping
    std::int64_t targets = 0;    // valid targets of the global batch
    std::string culprit =
        {};  // not_finite: the first parameter with a non-finite gradient; empty if only the loss is
    PhaseSeconds time = {};  // copy, forward, backward, optimizer: by the clock of the device, see PhaseTimer
};

/// How the gradients of a global batch are computed and applied to the parameters, and what several devices must agree
/// on. The Trainer decides what surrounds an update (schedule, metrics, validation, stopping, saving); it never sees a
/// gradient. OneDevice (nn/train/one_device.h) is the implementation for a single device.
class Execution {
public:
    virtual ~Execution() = default;

    /// Computes the gradient of the mean loss over all targets of the micro-batches (those of one global batch, on the
    /// CPU, or where a loader's `device` has put them) and takes one step of the optimizer. When the outcome is not
    /// `applied`, or when it throws (an op refused its input, the memory did not suffice), parameters, optimizer state and
    /// the module's buffers are as they were before. Leaves no gradients.
    virtual UpdateResult update(std::span<const data::Batch> micro_batches, const UpdateRequest& request) = 0;
    /// The loss over the batches of one evaluation pass, without gradients; the module is in evaluation mode meanwhile.
    virtual LossTotal evaluate(data::Loader& loader) = 0;
    /// What a checkpoint has to keep of the loss scaler; none where the loss is not scaled.
    virtual std::optional<LossScalerState> loss_scaler_state() const { return std::nullopt; }
    /// Goes on from it; without a scaler it is left alone.
    virtual void set_loss_scaler_state(const LossScalerState&) {}
    /// The most items of a micro-batch like `sample` with which an update of `micro_batches` of them fits into the memory that
    /// there is; 0 when 1 is too many, none when this way of computing cannot tell. What it tries changes nothing.
    virtual std::optional<std::int64_t> largest_micro_batch(const data::Batch& /*sample*/,
                                                            std::int64_t /*micro_batches*/) {
        return std::nullopt;
    }
    /// The dtype in which products of f32 operands are computed: f16 or bf16 under Autocast. MFU is a share of its rate.
    virtual DType compute_dtype() const { return DType::f32; }
    /// Logical or over all devices: true everywhere if `mine` is true anywhere. Used to decide when to stop.
    virtual bool any(bool mine) { return mine; }
    /// Whether this process writes files and shows progress.
    virtual bool is_root() const { return true; }
};

}  // namespace potluck
