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

/// A loss as something that adds up: over micro-batches, accumulation windows and devices. The mean is taken once, at the
/// end, over all targets that took part.
struct LossSum {
    Tensor sum;              // a scalar: over the targets that count
    std::int64_t count = 0;  // how many they are
};

/// How many targets of a batch count: of an integer dtype all that are not -100, of another one the rows; without targets,
/// the rows of the inputs. Reads the targets where they are, or batch.host_targets where that is there, so that a batch of a
/// Loader makes the host wait for no device.
std::int64_t count_targets(const data::Batch& batch);

/// What training makes smaller, of (inputs, targets). Made from a function that returns the mean over the targets that
/// count (a Tensor), or the LossSum itself.
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
    /// The module's own loss(). The module must outlive this.
    explicit LossFunction(nn::Module& module);

    explicit operator bool() const { return mean_ != nullptr || sum_ != nullptr; }
    /// The loss of a batch that is on the module's device, of which `count` targets count (by count_targets()). Throws
    /// Error when the function returns more than one number.
    LossSum operator()(const Tensor& inputs, const Tensor& targets, std::int64_t count) const;

private:
    std::function<Tensor(const Tensor& inputs, const Tensor& targets)> mean_;
    std::function<LossSum(const Tensor& inputs, const Tensor& targets)> sum_;
};

/// Total of a loss over many batches, on the host.
struct LossTotal {
    double sum = 0.0;
    std::int64_t count = 0;

    /// None when no target counted.
    std::optional<double> mean() const {
        return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
    }
};

}  // namespace potluck
