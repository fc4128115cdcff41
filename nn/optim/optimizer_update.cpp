// The updates of an optimizer.

#include <algorithm>
#include <span>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "core/backend.h"
#include "core/capture.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "nn/optim/optimizer.h"
#include "nn/optim/same_elements.h"

namespace potluck::optim {
namespace {

/// Moments and master copies: f64 for f64, else f32.
DType state_dtype(const Tensor& parameter) { return accumulation_dtype(parameter.dtype()); }

}  // namespace

std::vector<Tensor> Optimizer::gradients() const {
    const NoGrad guard;
    std::vector<Tensor> gradients;
    for (const Slot& slot : slots_)
        if (Tensor gradient = gradient_of(slot.parameter, slot.aliases); gradient.defined())
            gradients.push_back(std::move(gradient));
    return gradients;
}

void Optimizer::step() {
    const OpScope scope(kind_.op);
    const NoGrad guard;
    run(nullptr, nullptr);
    finish_step(true);
}

void Optimizer::step(const UpdateControl& control) {
    const OpScope scope(kind_.op);
    const NoGrad guard;
    if (control.steps() != steps_)
        throw Error(kind_.op,
                    fmt::format("the control of the update counts {} updates and the optimizer {}. Make "
                                "it with UpdateControl(device, optimizer.steps()), and call finish_step() "
                                "after read().",
                                control.steps(), steps_));
    if (!control.is_decided())
        throw Error(kind_.op,
                    "the control of the update has not decided yet. Call decide() before the step.");
    for (const Slot& slot : slots_)
        if (slot.parameter.device() != control.device())
            throw Error(kind_.op, fmt::format("parameter {} lies on {} and the control of the update on {}.",
                                              slot.name, slot.parameter.device(), control.device()));
    if (kind_.takes_control) {
        run(&control, nullptr);
        return;
    }
    UpdateControl copy = control;
    const UpdateNumbers numbers = copy.read();
    run(nullptr, &numbers);
}

void Optimizer::finish_step(bool applied) {
    if (!applied) return;
    if (!is_started_)
        throw Error(kind_.op,
                    "finish_step(true) counts an update, but none was started. Call step(control) "
                    "before it, and finish_step(false) after one that failed.");
    for (const std::size_t i : started_) ++slots_[i].steps;
    ++steps_;
}

/// By the numbers of a control on the device, by such numbers on the host, or by the optimizer's own.
void Optimizer::run(const UpdateControl* control, const UpdateNumbers* numbers) {
    check_module();
    started_.clear();
    is_started_ = false;
    bool any_element = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const Device device = slots_[i].parameter.device();
        if (control == nullptr && (detail::is_recording(device) || detail::is_replaying(device)))
            throw Error(
                kind_.op,
                "a step cannot be recorded, because learning rate and step number would stay the same in "
                "each replay. Call it after replay(), or record step(UpdateControl), which reads them on "
                "the device.");
        any_element = any_element || slots_[i].parameter.count() > 0;
        if (gradient_of(slots_[i].parameter, slots_[i].aliases).defined()) started_.push_back(i);
    }
    if (any_element && started_.empty())
        throw Error(kind_.op, "no parameter has a gradient. Call backward() first.");
    is_started_ = true;
    if (numbers != nullptr && numbers->skip != 0.0) return;
    try {
        for (const UpdateGroup& group : update_groups(control, numbers)) apply(group);
    } catch (...) {
        // Moments and masters of a first update that did not happen.
        for (Slot& slot : slots_) {
            if (slot.steps > 0) continue;
            slot.moments.clear();
            slot.master = {};
        }
        started_.clear();
        is_started_ = false;
        throw;
    }
}

std::vector<UpdateTensors> Optimizer::tensors_of(const UpdateGroup& group) {
    std::vector<UpdateTensors> tensors;
    for (const Update& one : group.updates) {
        const std::vector<Tensor>& moments = one.slot->moments;
        tensors.push_back({one.weights, one.gradient, moments.empty() ? Tensor() : moments[0],
                           moments.size() < 2 ? Tensor() : moments[1], one.rounded_or_none, one.rounding_key,
                           one.slot->begin});
    }
    return tensors;
}

/// Whether update() works on a copy of the parameter in f32, which the base class then rounds at random.
bool Optimizer::rounds_afterwards(const Tensor& parameter) const {
    return stochastic_rounding_ && !kind_.writes_rounded && parameter.dtype() == DType::bf16 &&
           parameter.is_contiguous();
}

/// parameter = weights, rounded at random, as every device does it: in a step of SGD by what is to be taken away.
void Optimizer::round_at_random(const Update& update) const {
    const Tensor parameter = update.slot->parameter.detach();
    const SgdSpec step{.learning_rate = 1.0,
                       .momentum = 0.0,
                       .dampening = 0.0,
                       .weight_decay = 0.0,
                       .nesterov = false,
                       .step = 1,
                       .stochastic_rounding = true};
    UpdateTensors tensors{.parameter = parameter,
                          .gradient = parameter.to(DType::f32) - update.weights,
                          .rounding_key = update.rounding_key,
                          .rounding_first = update.slot->begin};
    backend(parameter.device()).sgd(step, std::span(&tensors, 1), {});
    parameter.storage()->bump_version();
}

void Optimizer::apply(const UpdateGroup& group) {
    update(group);
    for (const Update& one : group.updates) {
        Slot& slot = *one.slot;
        one.weights.storage()->bump_version();
        if (rounds_afterwards(slot.parameter)) round_at_random(one);
        if (slot.master.defined()) {
            if (!one.rounded_or_none.defined() || !kind_.writes_rounded)
                backend(group.device).copy(slot.master, slot.parameter);
            slot.parameter.storage()->bump_version();
        }
        slot.version = slot.parameter.storage()->version();
    }
}

/// What there is to update, with all memory that it takes: when there is too little, nothing has been updated.
std::vector<Optimizer::UpdateGroup> Optimizer::update_groups(const UpdateControl* control,
                                                             const UpdateNumbers* numbers) {
    std::vector<UpdateGroup> groups;
    const std::vector<RandomKey> keys = rounding_keys();
    for (const std::size_t i : started_) {
        Slot& slot = slots_[i];
        prepare(slot);
        const Tensor parameter = slot.parameter.detach();
        Tensor gradient = gradient_of(slot.parameter, slot.aliases);
        if (gradient.device() != parameter.device())
            throw Error(kind_.op,
                        fmt::format("parameter {} lies on {} and its gradient on {}. Drop the gradient by "
                                    "zero_grad().",
                                    slot.name, parameter.device(), gradient.device()));
        if (numbers != nullptr) gradient = gradient.to(state_dtype(gradient)) * numbers->gradient_scale;
        Update update{.slot = &slot,
                      .weights = slot.master.defined()          ? slot.master
                                 : rounds_afterwards(parameter) ? parameter.to(DType::f32)
                                                                : parameter,
                      .gradient = gradient.contiguous(),
                      .rounded_or_none = {},
                      .rounding_key = keys[i]};
        if (slot.master.defined() && parameter.is_contiguous()) update.rounded_or_none = parameter;
        const double rate = control != nullptr   ? 1.0
                            : numbers != nullptr ? numbers->learning_rate
                                                 : learning_rate_;
        const double learning_rate = rate * slot.learning_rate_factor;
        // The control has counted this update already.
        const std::int64_t step = control != nullptr ? slot.steps - steps_ : slot.steps + 1;
        const auto fits = [&](const UpdateGroup& group) {
            return group.device == parameter.device() && group.learning_rate == learning_rate &&
                   group.weight_decay == slot.weight_decay && group.step == step;
        };
        auto group = std::find_if(groups.begin(), groups.end(), fits);
        if (group == groups.end()) {
            groups.push_back({.device = parameter.device(),
                              .learning_rate = learning_rate,
                              .weight_decay = slot.weight_decay,
                              .step = step,
                              .control_or_none = control != nullptr ? control->values() : Tensor(),
                              .updates = {}});
            group = groups.end() - 1;
        }
        group->updates.push_back(std::move(update));
    }
    return groups;
}

/// Where each parameter's random numbers for rounding begin: behind those of the parameters before it, whichever of them
/// have gradients or elements here, so that they do not depend on how parameters were cut.
std::vector<RandomKey> Optimizer::rounding_keys() const {
    std::vector<RandomKey> keys(slots_.size());
    if (!stochastic_rounding_) return keys;
    for (std::size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].parameter.dtype() == DType::bf16)
            keys[i] = default_generator(slots_[i].parameter.device()).take(element_count(slots_[i].whole));
    return keys;
}

bool Optimizer::needs_master(const Tensor& parameter) const {
    if (!parameter.is_contiguous()) return true;
    if (stochastic_rounding_ && parameter.dtype() == DType::bf16) return false;
    return state_dtype(parameter) != parameter.dtype();
}

/// Whether moments and master are those that the parameter needs, where and as it is now.
bool Optimizer::is_fit(const Slot& slot) const {
    const auto fits = [&](const Tensor& x) {
        return x.defined() && x.device() == slot.parameter.device() &&
               x.dtype() == state_dtype(slot.parameter);
    };
    return slot.moments.size() == kind_.moment_names.size() &&
           std::all_of(slot.moments.begin(), slot.moments.end(), fits) &&
           (needs_master(slot.parameter) ? fits(slot.master) : !slot.master.defined());
}

/// The slot with moments and master that fit: fresh ones, or the old ones moved and converted as the parameter was.
Optimizer::Slot Optimizer::fitted(const Slot& slot) const {
    Slot fit = slot;
    const TensorOptions options{state_dtype(slot.parameter), slot.parameter.device()};
    const auto converted = [&](const Tensor& x) { return x.to(options.device).to(options.dtype); };
    if (slot.moments.empty())
        for (std::size_t i = 0; i < kind_.moment_names.size(); ++i)
            fit.moments.push_back(zeros(slot.parameter.shape(), options));
    for (Tensor& moment : fit.moments) moment = converted(moment);
    if (!needs_master(slot.parameter)) {
        fit.master = {};
    } else if (slot.master.defined()) {
        fit.master = converted(slot.master);
    } else {
        fit.master = empty(slot.parameter.shape(), options);
        fit.master.copy_(slot.parameter.detach());
        fit.version = slot.parameter.storage()->version();
    }
    return fit;
}

void Optimizer::prepare(Slot& slot) const {
    const bool fit = is_fit(slot);
    const bool fresh = !slot.master.defined() || slot.version == slot.parameter.storage()->version();
    if (fit && fresh) return;
    if (backend(slot.parameter.device()).is_recording())
        throw Error(kind_.op,
                    fmt::format("the state of parameter {} is not ready, and would be made again by each "
                                "replay. Run one update before recording one.",
                                slot.name));
    if (!fit) slot = fitted(slot);
    if (slot.master.defined() && slot.version != slot.parameter.storage()->version()) refresh_master(slot);
}

/// The master of weights that somebody else may have written to since: what differs from the rounded master is new.
Tensor Optimizer::newest(const Tensor& master, const Tensor& weights) {
    const Tensor unchanged = master.to(weights.dtype()) == weights;
    return where(unchanged, master, weights.to(master.dtype()));
}

/// Somebody else wrote to the parameter (loaded weights, for instance).
void Optimizer::refresh_master(Slot& slot) const {
    slot.master.copy_(newest(slot.master, slot.parameter.detach()));
    slot.version = slot.parameter.storage()->version();
}

void Optimizer::zero_grad() {
    for (Slot& slot : slots_) {
        slot.parameter.set_grad({});
        for (Tensor& alias : slot.aliases) alias.set_grad({});
    }
}

}  // namespace potluck::optim
