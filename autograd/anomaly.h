#pragma once

#include <cstddef>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// `AnomalyCheck guard;` makes this thread check the result and the gradients of every differentiable op until the end
/// of the block. The first op that makes a NaN, or an infinity out of finite numbers, throws an Error that names it.
/// An infinity that came in, such as -inf for a masked score, may go on. Behind `where`, the branch that is not taken is
/// checked like any other: a NaN in it is named where it was made (sqrt, log).
/// Every check reads the whole tensor: for searching a fault, not for training. Inside capture() nothing can be read, so
/// there the first op throws an Error that says so (on the CPU at the replay, which runs the work).
class AnomalyCheck {
public:
    /// `on` false suspends the check in an inner block.
    [[nodiscard]] explicit AnomalyCheck(bool on = true) noexcept;
    ~AnomalyCheck();
    AnomalyCheck(const AnomalyCheck&) = delete;
    AnomalyCheck& operator=(const AnomalyCheck&) = delete;

    /// Whether a check is active in this thread.
    static bool is_on() noexcept;

private:
    bool outer_;
};

namespace detail {
/// Throws Error(op, ...) when `output` contains a NaN, or an infinity although all `inputs` are finite.
void check_forward(const char* op, const Tensor& output, const std::vector<Tensor>& inputs);
/// The same for `dx`, the gradient of input `index` that the backward of `op` computed from `dy`.
void check_backward(const char* op, std::size_t index, const Tensor& dx, const Tensor& dy);
}  // namespace detail

}  // namespace potluck
