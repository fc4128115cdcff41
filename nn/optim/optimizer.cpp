#include "nn/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/strides.h"
#include "nn/names.h"
#include "nn/optim/options.h"
#include "nn/optim/same_elements.h"

namespace potluck::optim {
namespace {

/// Moments and master copies: f64 for f64, else f32.
DType state_dtype(const Tensor& parameter) { return accumulation_dtype(parameter.dtype()); }

/// The sum of the gradients of tensors that are the same elements.
Tensor gradient_of(const Tensor& parameter, const std::vector<Tensor>& aliases) {
    Tensor gradient = parameter.grad();
    if (gradient.defined()) gradient = gradient.detach();
    for (const Tensor& alias : aliases) {
        if (!alias.grad().defined()) continue;
        const Tensor more = alias.grad().detach().reshape(parameter.shape());
        gradient = gradient.defined() ? gradient + more : more;
    }
    return gradient;
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
    // A star first stands for nothing; at a mismatch the last one takes in one character more.
    std::size_t p = 0, n = 0, star = std::string_view::npos, taken = 0;
    while (n < name.size()) {
        if (p < pattern.size() && pattern[p] == '*') {
            star = p++;
            taken = n;
        } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
            ++p;
            ++n;
        } else if (star != std::string_view::npos) {
            p = star + 1;
            n = ++taken;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

ParameterSlice::ParameterSlice(const nn::NamedTensor& parameter)
    : name_(parameter.name), elements_(parameter.tensor), whole_(parameter.tensor.shape()), begin_(0) {}

ParameterSlice::ParameterSlice(std::string name, Tensor elements, Shape whole, std::int64_t begin)
    : name_(std::move(name)), elements_(std::move(elements)), whole_(std::move(whole)), begin_(begin) {
    const std::int64_t count = element_count(whole_);
    if (begin_ < 0 || elements_.count() > count || begin_ > count - elements_.count())
        throw Error("optimizer",
                    fmt::format("{} elements from {} on reach outside of parameter {}, which is {}.",
                                elements_.count(), begin_, name_, pretty(whole_)));
}

Optimizer::Optimizer(Kind kind, const std::vector<ParameterSlice>& parameters, const Options& options)
    : kind_(std::move(kind)),
      learning_rate_(options.learning_rate),
      stochastic_rounding_(options.stochastic_rounding) {
    check_learning_rate(kind_.op, learning_rate_);
    if (!(options.weight_decay >= 0.0) || std::isinf(options.weight_decay))
        throw Error(kind_.op, fmt::format("weight_decay is {}. It must be finite and not negative.",
                                          options.weight_decay));
    if (parameters.empty()) throw Error(kind_.op, "there is no parameter to optimize.");
    for (const ParameterSlice& parameter : parameters) add_slot(parameter);
    choose_groups(options);
}

Optimizer::Optimizer(Kind kind, const nn::Module& module, const Options& options)
    : Optimizer(std::move(kind), slices_of(module.named_parameters()), options) {
    module_ = &module;
    module_presence_ = module.presence();
}

void Optimizer::add_slot(const ParameterSlice& parameter) {
    const std::string& name = parameter.name();
    const Tensor& elements = parameter.elements();
    if (!is_floating(elements.dtype()))
        throw Error(kind_.op, fmt::format("parameter {} is {}. Only floating dtypes can be trained.", name,
                                          elements.dtype()));
    if (detail::overlaps_itself(elements))
        throw Error(
            kind_.op,
            fmt::format(
                "parameter {} repeats elements of its memory (it is the result of expand() or of overlapping "
                "windows). Give the tensor that it was made of.",
                name));
    for (Slot& slot : slots_) {
        if (slot.name == name) throw Error(kind_.op, fmt::format("two parameters are called {}.", name));
        const Sharing sharing = sharing_of(slot.parameter, elements);
        if (sharing == Sharing::none) continue;
        if (sharing == Sharing::some)
            throw Error(kind_.op, fmt::format("parameters {} and {} share some of their elements. Give each "
                                              "element once, or the same elements under both names.",
                                              slot.name, name));
        if (!slot.parameter.is_same(elements)) slot.aliases.push_back(elements);
        slot.other_names.push_back(name);
        return;
    }
    slots_.push_back(
        {.name = name, .parameter = elements, .whole = parameter.whole(), .begin = parameter.begin()});
}

void Optimizer::choose_groups(const Options& options) {
    const std::vector<ParameterGroup>& groups = options.groups;
    std::vector<bool> matched(groups.size(), false);
    std::vector<std::string> names;
    for (Slot& slot : slots_) {
        names.push_back(slot.name);
        slot.weight_decay = slot.whole.size() >= 2 ? options.weight_decay : 0.0;
        bool chosen = false;
        for (std::size_t i = 0; i < groups.size(); ++i) {
            const auto fits = [&](const std::string& name) { return matches(groups[i].pattern, name); };
            if (!fits(slot.name) && std::none_of(slot.other_names.begin(), slot.other_names.end(), fits))
                continue;
            matched[i] = true;
            if (std::exchange(chosen, true)) continue;
            slot.learning_rate_factor = groups[i].learning_rate_factor;
            slot.weight_decay = groups[i].weight_decay.value_or(slot.weight_decay);
        }
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const ParameterGroup& group = groups[i];
        const double decay = group.weight_decay.value_or(0.0);
        if (!(group.learning_rate_factor >= 0.0 && std::isfinite(group.learning_rate_factor) &&
              decay >= 0.0 && std::isfinite(decay)))
            throw Error(kind_.op,
                        fmt::format("group \"{}\" has the learning_rate_factor {} and the weight_decay "
                                    "{}. Both must be finite and not negative.",
                                    group.pattern, group.learning_rate_factor, decay));
        if (!matched[i])
            throw Error(kind_.op, fmt::format("group \"{}\" matches no parameter. The first ones are {}.",
                                              group.pattern, nn::list_of(names)));
    }
}

void Optimizer::set_learning_rate(double learning_rate) {
    check_learning_rate(kind_.op, learning_rate);
    learning_rate_ = learning_rate;
}

std::vector<ParameterSlice> Optimizer::slices() const {
    std::vector<ParameterSlice> slices;
    for (const Slot& slot : slots_) slices.emplace_back(slot.name, slot.parameter, slot.whole, slot.begin);
    return slices;
}

std::vector<Tensor> Optimizer::gradients() const {
    const NoGrad guard;
    std::vector<Tensor> gradients;
    for (const Slot& slot : slots_)
        if (Tensor gradient = gradient_of(slot.parameter, slot.aliases); gradient.defined())
            gradients.push_back(std::move(gradient));
    return gradients;
}

/// A layer that was replaced after the optimizer was made would never be trained.
void Optimizer::check_module() const {
    if (module_presence_.expired()) return;
    const std::vector<nn::NamedTensor> now = module_->named_parameters();
    std::vector<std::string> gone, unknown;
    // Both lists have the same order unless something was replaced.
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const auto is_this = [&](const nn::NamedTensor& one) {
            return one.tensor.is_same(slots_[i].parameter);
        };
        if (i < now.size() && is_this(now[i])) continue;
        if (std::none_of(now.begin(), now.end(), is_this)) gone.push_back(slots_[i].name);
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
        const auto is_this = [&](const Slot& slot) {
            return slot.parameter.is_same(now[i].tensor) ||
                   std::any_of(slot.aliases.begin(), slot.aliases.end(),
                               [&](const Tensor& alias) { return alias.is_same(now[i].tensor); });
        };
        if ((i < slots_.size() && is_this(slots_[i])) || !now[i].tensor.requires_grad()) continue;
        if (std::none_of(slots_.begin(), slots_.end(), is_this)) unknown.push_back(now[i].name);
    }
    if (gone.empty() && unknown.empty()) return;
    throw Error(kind_.op,
                fmt::format("the module's parameters were replaced after this optimizer was made.{} Make the "
                            "optimizer again, after the module has its final layers.",
                            nn::faults_of({{"The module no longer has", gone},
                                           {"The optimizer does not know", unknown}})));
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
    for (const std::size_t i : started_) ++slots_[i].steps;
    ++steps_;
}

/// By the numbers of a control on the device, by such numbers on the host, or by the optimizer's own.
void Optimizer::run(const UpdateControl* control, const UpdateNumbers* numbers) {
    check_module();
    started_.clear();
    bool any_element = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        if (control == nullptr && backend(slots_[i].parameter.device()).is_recording())
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
    if (numbers != nullptr && numbers->skip != 0.0) return;
    try {
        for (const Batch& batch : batches(control, numbers)) apply(batch);
    } catch (...) {
        // Moments and masters of a first update that did not happen.
        for (Slot& slot : slots_) {
            if (slot.steps > 0) continue;
            slot.moments.clear();
            slot.master = {};
        }
        started_.clear();
        throw;
    }
}

void Optimizer::apply(const Batch& batch) {
    update(batch);
    for (const Update& one : batch.updates) {
        Slot& slot = *one.slot;
        one.weights.storage()->bump_version();
        if (slot.master.defined()) {
            if (!one.rounded_or_none.defined() || !kind_.writes_rounded)
                backend(batch.device).copy(slot.master, slot.parameter);
            slot.parameter.storage()->bump_version();
        }
        slot.version = slot.parameter.storage()->version();
    }
}

/// What there is to update, with all memory that it takes: when there is too little, nothing has been updated.
std::vector<Optimizer::Batch> Optimizer::batches(const UpdateControl* control, const UpdateNumbers* numbers) {
    std::vector<Batch> batches;
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
                      .weights = slot.master.defined() ? slot.master : parameter,
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
        const auto fits = [&](const Batch& batch) {
            return batch.device == parameter.device() && batch.learning_rate == learning_rate &&
                   batch.weight_decay == slot.weight_decay && batch.step == step;
        };
        auto batch = std::find_if(batches.begin(), batches.end(), fits);
        if (batch == batches.end()) {
            batches.push_back({.device = parameter.device(),
                               .learning_rate = learning_rate,
                               .weight_decay = slot.weight_decay,
                               .step = step,
                               .control_or_none = control != nullptr ? control->values() : Tensor(),
                               .updates = {}});
            batch = batches.end() - 1;
        }
        batch->updates.push_back(std::move(update));
    }
    return batches;
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
