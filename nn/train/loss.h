#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>

#include "core/tensor.h"
#include "data/loader.h"
#include "nn/module.h"

namespace potluck {

/// A loss that can be summed: over micro-batches, accumulation steps and devices. The mean is taken once, at the end,
/// over all valid targets.
struct LossSum {
    Tensor sum;              // a scalar: over the valid targets
    std::int64_t count = 0;  // number of valid targets
};

/// How many targets of a batch count: of an integer dtype all that are not -100, of another one the rows; without targets,
/// the rows of the inputs. Reads the targets where they are, or batch.host_targets where that is there, so that a batch of a
/// Loader makes the host wait for no device.
std::int64_t count_targets(const data::Batch& batch);

/// The quantity to minimise, as a function of (inputs, targets). Constructed from a function that returns the mean over
/// the valid targets (a Tensor), or the LossSum itself.
class LossFunction {
public:
    LossFunction() = default;
    template <class Function>
    requires std::same_as<std::invoke_result_t<Function&, const Tensor&, const Tensor&>, Tensor> LossFunction(
        Function mean)
        : mean_(std::move(mean)) {}
    template <class Function>
    requires std::same_as<std::invoke_result_t<Function&, const Tensor&, const Tensor&>, LossSum>
    LossFunction(Function sum) : sum_(std::move(sum)) {}
    /// Uses the module's own loss(). The module must outlive this object.
    explicit LossFunction(nn::Module& module);

    explicit operator bool() const { return mean_ != nullptr || sum_ != nullptr; }
    /// The loss of a batch that is on the module's device and has `count` valid targets (by count_targets()). Throws
    /// Error when the function returns more than one number.
    LossSum operator()(const Tensor& inputs, const Tensor& targets, std::int64_t count) const;

private:
    std::function<Tensor(const Tensor& inputs, const Tensor& targets)> mean_;
    std::function<LossSum(const Tensor& inputs, const Tensor& targets)> sum_;
};

/// The total of a loss over many batches, on the host.
struct LossTotal {
    double sum = 0.0;
    std::int64_t count = 0;

    /// None if there were no valid targets.
    std::optional<double> mean() const {
        return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
    }
};

}  // namespace potluck
