#pragma once

#include <cstddef>
#include <cstdint>

#include "autograd/autocast.h"
#include "autograd/tape.h"
#include "core/options.h"
#include "core/tensor.h"
#include "nn/optim/optimizer.h"

namespace potluck {

struct LossScalerOptions {
    double initial = 65536.0;
    double growth = 2.0;   // the factor after `growth_interval` updates without an overflow
    double backoff = 0.5;  // the factor after an overflow
    std::int64_t growth_interval = 2000;
    double smallest = 1.0;             // the scale stays between these two
    double largest = 16777216.0;       // 2^24
    std::int64_t give_up_after = 100;  // updates skipped in a row, then there is an Error
};

/// Where a scaler stands: what a checkpoint keeps of it.
struct LossScalerState {
    double scale = 0.0;             // of the next gradients
    std::int64_t good_updates = 0;  // without an overflow since the scale last changed
    std::int64_t skipped_in_a_row = 0;
};

/// The gradient that backward() starts with for `scale` times a loss: of its shape, in f32 or wider.
Tensor scaled_gradient(const Tensor& loss, double scale);

/// Keeps the gradients of f16 within its range: the loss is multiplied by a scale before backward(), the optimizer divides
/// it out again, and an update whose gradients overflowed is skipped and lowers the scale (Micikevicius et al., "Mixed
/// Precision Training", 2018).
///
///     LossScaler scaler;
///     for (auto [x, y] : loader) {
///         Tensor loss;
///         {
///             const Autocast guard(DType::f16);
///             loss = cross_entropy(model(x), y);
///         }
///         scaler.backward(loss);
///         scaler.step(optimizer, {.max_norm = 1.0});
///         optimizer.zero_grad();
///     }
///
/// backward() may be called several times before step() (accumulation): they have one scale, and an overflow in any of them
/// skips the whole window. With several optimizers each steps by its own gradients; the scale changes once, at the next
/// backward(), so let all of them step before that: it is lowered when one of them was skipped. Until then grad() holds the gradients times scale().
class LossScaler {
public:
    /// Throws Error for options out of range.
    explicit LossScaler(LossScalerOptions options = {});
    template <std::size_t N>
    explicit LossScaler(MistypedOptions<N>) = delete;  // no such option: see LossScalerOptions

    /// What the next backward() multiplies the loss by.
    double scale() const { return state().scale; }
    /// backward() of scale() * loss, which has one element. Compute it in f32, as under Autocast: in f16 large scales
    /// overflow.
    void backward(const Tensor& loss);

    struct StepOptions {
        double max_norm = 0.0;  // the gradient, without the scale, is reduced to this norm; 0: never
    };
    /// An update with the gradients divided by the scale, or none when they are not finite: then parameters and optimizer
    /// stay as they are. Returns whether it took place. Drop the gradients afterwards as ever. Throws Error when
    /// `give_up_after` updates in a row were skipped, and when there was no backward() of this scaler yet.
    bool step(optim::Optimizer& optimizer, const StepOptions& options);
    bool step(optim::Optimizer& optimizer) { return step(optimizer, {}); }
    /// The norm of all gradients of an optimizer, without the scale. Not finite after an overflow.
    double gradient_norm(const optim::Optimizer& optimizer) const;

    LossScalerState state() const;
    /// Goes on from a state. Throws Error for one that no scaler with these options has; a scale beyond the limits of the
    /// options is moved to them.
    void set_state(const LossScalerState& state);

    // ---- for who decides on an update himself (nn/train/one_device.h, several ranks together) ----

    /// Before the gradients of an update: takes in how the last one went. Returns their scale.
    double begin_update();
    /// How the update went. Throws Error when too many were skipped in a row.
    void end_update(bool applied);

private:
    /// The scale that the gradients have which are there now.
    double scale_of_gradients() const { return state_.scale; }

    LossScalerOptions options_;
    LossScalerState state_;
    bool scaled_ = false;                     // gradients were made with this scale
    bool stepped_ = false, skipped_ = false;  // since the last backward()
    detail::LossIsScaled is_scaled_;
};

}  // namespace potluck
