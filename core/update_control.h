#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tensor.h"

namespace potluck {

/// The numbers of one update, in the order in which they lie in the memory of UpdateControl::values().
struct UpdateNumbers {
    // set by the host before an update
    double learning_rate = 0.0;
    double targets = 0.0;     // number of targets that the loss is summed over
    double loss_scale = 1.0;  // the factor of the loss before backward()
    double max_norm = 0.0;    // of the gradient; 0: no clipping
    // accumulated during the update
    double loss_sum = 0.0;        // over all targets, unscaled
    double sum_of_squares = 0.0;  // of the gradients: three numbers, see SquareSums in core/square_sums.h
    double large_squares = 0.0;
    double small_squares = 0.0;
    // computed by decide()
    double steps = 0.0;           // updates applied so far, including this one unless it is skipped
    double gradient_norm = 0.0;   // of the gradient of the mean loss, before clipping
    double gradient_scale = 0.0;  // the factor that the optimizer applies to the gradients
    double skip = 0.0;            // not 0: the optimizer writes nothing
};
inline constexpr std::size_t update_number_count = sizeof(UpdateNumbers) / sizeof(double);

/// The numbers of an update, on the device of the parameters, so that a whole update runs without the host waiting for
/// any of them: learning rate, clipping and the decision to skip the update reach the optimizer's kernels there.
///
///     UpdateControl control(device, optimizer.steps());
///     control.write({.learning_rate = 1e-3, .targets = 64, .max_norm = 1.0});
///     ... backward() of the sum of the losses; control.add_loss(sum);
///     control.measure(gradients);
///     control.decide();
///     optimizer.step(control);
///     const UpdateNumbers numbers = control.read();  // the only wait
///     optimizer.finish_step(numbers.skip == 0.0);
///
/// All but write() and read() may be captured (core/capture.h): each replay is then an update with the numbers that
/// were written before it.
class UpdateControl {
public:
    /// `steps`: how many updates the optimizer has made before. Throws Error when it is negative.
    explicit UpdateControl(Device device = Device::cpu(), std::int64_t steps = 0);

    struct Inputs {
        double learning_rate = 0.0;
        double targets = 1.0;
        double loss_scale = 1.0;
        double max_norm = 0.0;
    };
    /// Sets the host's numbers, and the sum of the losses to 0. Does not wait. Throws Error for targets, a loss scale
    /// or a norm that are negative or not finite, and for a loss scale of 0.
    void write(const Inputs& inputs);
    /// Adds `scale` times `loss`, a floating tensor with one element on this device, to the sum of the losses.
    void add_loss(const Tensor& loss, double scale = 1.0);
    /// Sums the squares of all gradients (any floating dtypes and strides).
    void measure(std::span<const Tensor> gradients);
    /// Computes the norm and the scale of the gradients from these sums. Skips the update when the loss or the norm is
    /// not finite, when there are no targets, or when an op met an invalid element (an id or label out of range) that
    /// has not been reported yet; otherwise increments the step count.
    void decide();
    /// Reads all numbers, with one wait. Throws the Error of an invalid element that was met since the last wait.
    UpdateNumbers read();

    Device device() const { return values_.device(); }
    /// Whether decide() was called since the last write(), which an optimizer's step requires.
    bool is_decided() const { return is_decided_; }
    /// Updates applied, as of the last read().
    std::int64_t steps() const { return steps_; }
    /// The memory of the numbers, (12) f64: the sums of another process can be added to them.
    const Tensor& values() const { return values_; }

private:
    void check_part(const char* what, const Tensor& x) const;

    Tensor values_;
    std::int64_t steps_;
    bool is_decided_ = false;
};

}  // namespace potluck
