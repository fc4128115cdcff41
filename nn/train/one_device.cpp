#include "nn/train/one_device.h"

#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/random_scope.h"
#include "nn/forgotten_leaves.h"
#include "nn/train/checkpoint.h"
#include "nn/train/clip.h"

namespace potluck {
namespace {

Tensor on(Device device, const Tensor& x) { return x.defined() ? x.to(device) : x; }

/// A layer that members() does not name would get gradients and never be updated, saved or moved.
void warn_of_forgotten_leaves(const Tensor& loss, const nn::Module& module) {
    for (const nn::ForgottenLeaf& leaf : nn::forgotten_leaves(loss, module)) {
        fmt::print(
            stderr,
            "[trainer] warning: {} uses a {} tensor {} that collects gradients and belongs to no member of "
            "{}, so "
            "it is neither saved nor moved, and trained only by an optimizer that was given it. Name it in "
            "members().\n",
            leaf.op, leaf.dtype, pretty(leaf.shape), module.describe());
    }
}

/// The default generators of the CPU and of a module's device, as they are now.
class GeneratorStates {
public:
    explicit GeneratorStates(const nn::Module& module) : states_(generator_states(module)) {}

    void restore() const {
        for (const auto& [device, state] : states_) default_generator(parse_device(device)).set_state(state);
    }

private:
    std::map<std::string, RandomKey> states_;
};

/// Items of the loader's batch that `batch` is a share of; one that no loader made is whole.
std::int64_t items_of(const data::Batch& batch) {
    return batch.global_count == 0 && batch.inputs.defined() ? batch.inputs.size(0) : batch.global_count;
}

}  // namespace

/// What an update may change besides what the optimizer does, as it was before: the module's buffers (running statistics) and
/// the default generators.
class OneDevice::SavedBuffers {
public:
    explicit SavedBuffers(nn::Module& module) : module_(module) {
        const NoGrad guard;
        for (const auto& [name, buffer] : module.named_buffers()) saved_.push_back({buffer, buffer.clone()});
    }

    void restore() {
        const NoGrad guard;
        for (const auto& [buffer, values] : saved_) buffer.copy_(values);
        generators_.restore();
        // A module may also have put another tensor in the place of its buffer.
        std::size_t next = 0;
        module_.replace_tensors([&](const Tensor& tensor, nn::Member::Kind kind) {
            return kind != nn::Member::Kind::parameter && next < saved_.size() ? saved_[next++].buffer
                                                                               : tensor;
        });
    }

private:
    struct Saved {
        Tensor buffer, values;
    };
    nn::Module& module_;
    std::vector<Saved> saved_;
    GeneratorStates generators_{module_};
};

OneDevice::OneDevice(nn::Module& module, optim::Optimizer& optimizer, LossFunction loss)
    : module_(module), optimizer_(optimizer), loss_(loss ? std::move(loss) : LossFunction(module)) {
    if (module_.parameters().empty())
        throw Error("trainer", "the module has no parameters. Name them in members().");
    module_.assign_random_sites();
}

OneDevice::~OneDevice() {
    for (const Tensor& parameter : buffered_) {
        try {
            set_gradient_buffer(parameter, {});
        } catch (const Error&) {  // it is no longer trained, so it has no buffer
        }
    }
}

/// The control of this update, which goes on from the optimizer's steps (a checkpoint may have been loaded meanwhile).
UpdateControl& OneDevice::control() {
    const Device device = module_.parameters().front().device();
    if (!control_ || control_->device() != device || control_->steps() != optimizer_.steps())
        control_.emplace(device, optimizer_.steps());
    return *control_;
}

void OneDevice::set_gradient_buffers() {
    for (const Tensor& parameter : module_.parameters()) {
        const bool is_half = parameter.dtype() == DType::f16 || parameter.dtype() == DType::bf16;
        if (!is_half || !parameter.requires_grad() || parameter.node()->gradient_buffer.defined()) continue;
        set_gradient_buffer(parameter, empty(parameter.shape(), {DType::f32, parameter.device()}));
        buffered_.push_back(parameter);
    }
}

UpdateResult OneDevice::update(std::span<const data::Batch> micro_batches, const UpdateRequest& request) {
    SavedBuffers buffers(module_);
    try {
        set_gradient_buffers();
        PhaseTimer timer(module_.parameters().front().device());
        std::vector<Tensor> losses;
        const std::int64_t targets = add_gradients(micro_batches, request, timer, losses);
        UpdateResult result{.outcome = UpdateResult::Outcome::no_targets};
        if (targets > 0) result = step(request, targets, losses, timer);
        if (result.outcome != UpdateResult::Outcome::applied) buffers.restore();
        drop_gradients();
        return result;
    } catch (...) {
        buffers.restore();
        drop_gradients();
        throw;
    }
}

/// Adds up the gradient of the sum of all losses. Returns how many targets count, and in `losses` the sum over those of
/// each micro-batch. One without any is left out: its mean would be 0 / 0.
std::int64_t OneDevice::add_gradients(std::span<const data::Batch> micro_batches,
                                      const UpdateRequest& request, PhaseTimer& timer,
                                      std::vector<Tensor>& losses) {
    const Device device = module_.parameters().front().device();
    const RandomUpdateScope random_update(request.number);
    std::int64_t targets = 0, items = 0;  // so far
    for (const data::Batch& batch : micro_batches) {
        const std::int64_t first = items + batch.share.first;
        items += items_of(batch);
        if (!batch.inputs.defined()) continue;  // no item of the global batch falls to this process
        const std::int64_t count = count_targets(batch);
        if (count == 0) continue;
        const RandomItemsScope random_items(first, batch.inputs.size(0));
        timer.begin(Phase::copy);
        const Tensor inputs = on(device, batch.inputs), targets_there = on(device, batch.targets);
        timer.begin(Phase::forward);
        const LossSum loss = loss_(inputs, targets_there, count);
        if (!std::exchange(looked_for_forgotten_, true)) warn_of_forgotten_leaves(loss.sum, module_);
        timer.begin(Phase::backward);
        backward(loss.sum);
        targets += loss.count;
        losses.push_back(loss.sum.detach());
    }
    return targets;
}

UpdateResult OneDevice::step(const UpdateRequest& request, std::int64_t targets,
                             std::span<const Tensor> losses, PhaseTimer& timer) {
    timer.begin(Phase::optimizer);
    UpdateControl& numbers = control();
    numbers.write({.learning_rate = request.learning_rate,
                   .targets = static_cast<double>(targets),
                   .max_norm = request.max_norm});
    for (const Tensor& loss : losses) numbers.add_loss(loss);
    numbers.measure(optimizer_.gradients());
    numbers.decide();
    UpdateNumbers came;
    try {
        optimizer_.step(numbers);
        timer.end();
        came = numbers.read();  // the one wait
    } catch (
        ...) {  // the step was refused, or a bad element was met: the control has counted what did not happen
        optimizer_.finish_step(false);
        control_.reset();
        throw;
    }
    optimizer_.finish_step(came.skip == 0.0);
    UpdateResult result{.loss = came.loss_sum / static_cast<double>(targets),
                        .gradient_norm = came.gradient_norm,
                        .targets = targets,
                        .time = timer.seconds()};
    if (came.skip != 0.0) {
        result.outcome = UpdateResult::Outcome::not_finite;
        result.culprit = first_non_finite_gradient(module_);
    }
    return result;
}

void OneDevice::drop_gradients() {
    optimizer_.zero_grad();
    module_.zero_grad();  // the optimizer may have only a part of it
}

LossTotal OneDevice::evaluate(data::Loader& loader) {
    const NoGrad guard;
    const nn::EvalMode evaluating(module_);
    const GeneratorStates generators(module_);  // what a validation draws changes no training
    const Device device = module_.parameters().front().device();
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
    generators.restore();
    total.sum = sum.item();  // the one wait
    return total;
}

}  // namespace potluck
