#include "nn/train/one_device.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "autograd/autocast.h"
#include "autograd/grad_mode.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/memory_limit.h"
#include "core/random.h"
#include "core/random_scope.h"
#include "nn/train/gradient_buffers.h"
#include "nn/train/memory_budget.h"
#include "nn/train/micro_batches.h"
#include "nn/train/state_before.h"
#include "nn/unregistered_leaves.h"

namespace potluck {
namespace {

Tensor on(Device device, const Tensor& x) { return x.defined() ? x.to(device) : x; }

/// A layer that members() does not list would get gradients but never be updated, saved or moved.
void warn_of_unregistered_leaves(const Tensor& loss, const nn::Module& module) {
    for (const nn::UnregisteredLeaf& leaf : nn::unregistered_leaves(loss, module)) {
        fmt::print(
            stderr,
            "[trainer] warning: {} uses a {} tensor {} that collects gradients and belongs to no member of "
            "{}, so "
            "it is neither saved nor moved, and trained only by an optimizer that was given it. Name it in "
            "members().\n",
            leaf.op, leaf.dtype, pretty(leaf.shape), module.describe());
    }
}

}  // namespace

OneDevice::OneDevice(nn::Module& module, optim::Optimizer& optimizer, LossFunction loss,
                     const OneDeviceOptions& options)
    : module_(module),
      optimizer_(optimizer),
      loss_(loss ? std::move(loss) : LossFunction(module)),
      precision_(options.precision),
      step_(module, optimizer, scaler_options(options.precision, options.loss_scaler)) {
    if (module_.parameters().empty())
        throw Error("trainer", "the module has no parameters. Name them in members().");
    module_.assign_random_sites();
}

OneDevice::~OneDevice() {
    for (const Tensor& parameter : buffered_) {
        try {
            set_gradient_buffer(parameter, {});
        } catch (const Error&) {  // it is no longer trained, so it has no gradient buffer
        }
    }
}

UpdateResult OneDevice::update(std::span<const data::Batch> micro_batches, const UpdateRequest& request) {
    const std::vector<Tensor> parameters =
        module_.parameters();  // looked up anew: they may be others than before
    const Device device = parameters.front().device();
    StateBefore before(module_, parameters, buffer_copies_);
    try {
        const std::vector<Tensor> given = add_gradient_buffers(parameters);
        buffered_.insert(buffered_.end(), given.begin(), given.end());
        PhaseTimer timer(device);
        std::vector<Tensor> losses;
        const std::int64_t targets = add_gradients(micro_batches, request, device, timer, losses);
        UpdateResult result{.outcome = UpdateResult::Outcome::no_targets};
        if (targets > 0) result = step_.finish(request, device, targets, losses, timer);
        if (result.outcome != UpdateResult::Outcome::applied) before.restore();
        optimizer_.zero_grad();
        for (Tensor parameter : parameters)
            parameter.set_grad({});  // the optimizer may have only a part of them
        return result;
    } catch (...) {
        before.restore();
        optimizer_.zero_grad();
        module_.zero_grad();  // the loss function may have made parameters
        throw;
    }
}

/// Adds up the gradient of the sum of all losses. Returns how many targets count, and in `losses` the sum over those of
/// each micro-batch.
std::int64_t OneDevice::add_gradients(std::span<const data::Batch> micro_batches,
                                      const UpdateRequest& request, Device device, PhaseTimer& timer,
                                      std::vector<Tensor>& losses) {
    const RandomUpdateScope random_update(request.number);
    const Autocast precision(dtype_of(precision_));
    const std::vector<MicroBatch> batches = counted_micro_batches(micro_batches);
    const double loss_scale = step_.begin(counted_targets(batches));
    std::int64_t targets = 0;
    for (const MicroBatch& batch : batches) {
        const RandomItemsScope random_items(batch.first_item, batch.inputs.size(0));
        timer.begin(Phase::copy);
        const Tensor inputs = on(device, batch.inputs), there = on(device, batch.targets);
        timer.begin(Phase::forward);
        const LossSum loss = loss_(inputs, there, batch.counted);
        if (!std::exchange(looked_for_unregistered_, true)) warn_of_unregistered_leaves(loss.sum, module_);
        timer.begin(Phase::backward);
        backward(loss.sum, {.gradient = scaled_gradient(loss.sum, loss_scale)});
        targets += loss.count;
        losses.push_back(loss.sum.detach());
    }
    return targets;
}

std::optional<std::int64_t> OneDevice::largest_micro_batch(const data::Batch& sample,
                                                           std::int64_t micro_batches) {
    const Device device = module_.parameters().front().device();
    buffer_copies_.clear();  // the next update makes them again
    try {
        const MemoryBudget budget(module_, optimizer_, sample,
                                  {.loss = loss_, .precision = precision_, .accumulate = micro_batches});
        return budget.largest_batch(memory_limit(device), std::max<std::int64_t>(sample.inputs.size(0), 1));
    } catch (const OutOfMemory&) {  // the smallest does not fit
        return 0;
    }
}

std::optional<LossScalerState> OneDevice::loss_scaler_state() const { return step_.scaler_state(); }
void OneDevice::set_loss_scaler_state(const LossScalerState& state) { step_.set_scaler_state(state); }

LossTotal OneDevice::evaluate(data::Loader& loader) {
    const NoGrad guard;
    const Autocast precision(dtype_of(precision_));
    const nn::EvalMode evaluating(module_);
    const std::vector<Tensor> parameters = module_.parameters();
    const GeneratorStates generators =
        generator_states(parameters);  // what a validation draws changes no training
    const Device device = parameters.front().device();
    const Tensor sum = zeros({}, {DType::f64, device});
    LossTotal total;
    for (const data::Batch& batch : loader.pass()) {
        if (!batch.inputs.defined()) continue;
        const std::int64_t count = count_targets(batch);
        if (count == 0) continue;
        const LossSum loss = loss_(on(device, batch.inputs), on(device, batch.targets), count);
        sum.add_(loss.sum);
        total.count += loss.count;
    }
    set_generator_states(generators);
    total.sum = sum.item();  // the only wait
    return total;
}

}  // namespace potluck
