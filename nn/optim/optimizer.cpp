#include "nn/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "nn/names.h"

namespace potluck::optim {
namespace {

constexpr const char* learning_rate_name = "learning_rate";
constexpr const char* steps_name = "steps";
constexpr const char* master_name = "master";

void check_learning_rate(const char* op, double learning_rate) {
    if (!(learning_rate >= 0.0) || std::isinf(learning_rate)) {
        throw Error(
            op, fmt::format("the learning rate is {}. It must be finite and not negative.", learning_rate));
    }
}

void check_share(const char* op, const char* name, double value) {
    if (!(value >= 0.0 && value < 1.0)) {
        throw Error(op, fmt::format("{} is {}. It must lie in [0, 1).", name, value));
    }
}

/// Moments and master copies: f64 for f64, else f32.
DType state_dtype(const Tensor& parameter) {
    return parameter.dtype() == DType::f64 ? DType::f64 : DType::f32;
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

Optimizer::Optimizer(const char* op, const std::vector<nn::NamedTensor>& parameters, double learning_rate,
                     double weight_decay, const std::vector<ParameterGroup>& groups,
                     std::vector<std::string> moment_names, bool stochastic_rounding)
    : op_(op),
      moment_names_(std::move(moment_names)),
      learning_rate_(learning_rate),
      stochastic_rounding_(stochastic_rounding) {
    check_learning_rate(op, learning_rate);
    if (!(weight_decay >= 0.0) || std::isinf(weight_decay))
        throw Error(op, fmt::format("weight_decay is {}. It must be finite and not negative.", weight_decay));
    if (parameters.empty()) throw Error(op, "there is no parameter to optimize.");
    std::vector<bool> used(groups.size(), false);
    std::set<std::string> names;
    for (const auto& [name, parameter] : parameters) {
        if (!is_floating(parameter.dtype())) {
            throw Error(op, fmt::format("parameter {} is {}. Only floating dtypes can be trained.", name,
                                        parameter.dtype()));
        }
        if (!names.insert(name).second) throw Error(op, fmt::format("two parameters are called {}.", name));
        Slot slot{.name = name, .parameter = parameter, .master = {}, .moments = {}};
        slot.weight_decay = parameter.ndim() >= 2 ? weight_decay : 0.0;
        for (std::size_t i = 0; i < groups.size(); ++i) {
            if (!matches(groups[i].pattern, name)) continue;
            used[i] = true;
            slot.learning_rate_factor = groups[i].learning_rate_factor;
            slot.weight_decay = groups[i].weight_decay.value_or(slot.weight_decay);
            break;
        }
        slots_.push_back(std::move(slot));
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const ParameterGroup& group = groups[i];
        if (!(group.learning_rate_factor >= 0.0) || !(group.weight_decay.value_or(0.0) >= 0.0)) {
            throw Error(op, fmt::format("group \"{}\" has a negative learning_rate_factor or weight_decay.",
                                        group.pattern));
        }
        const bool matched = used[i] || std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
                                 return matches(group.pattern, slot.name);
                             });
        if (!matched) {
            throw Error(op, fmt::format("group \"{}\" matches no parameter. The first ones are {}.",
                                        group.pattern, nn::list_of({names.begin(), names.end()})));
        }
    }
}

void Optimizer::set_learning_rate(double learning_rate) {
    check_learning_rate(op_, learning_rate);
    learning_rate_ = learning_rate;
}

void Optimizer::step() {
    const OpScope scope(op_);
    const NoGrad guard;
    const bool any_gradient = std::any_of(slots_.begin(), slots_.end(),
                                          [](const Slot& slot) { return slot.parameter.grad().defined(); });
    if (!any_gradient) {
        throw Error(
            op_,
            "no parameter has a gradient. Call backward() first; and make the optimizer after module.to(), "
            "which replaces the parameters.");
    }
    try {
        for (const Batch& batch : batches()) apply(batch);
    } catch (...) {
        // Moments and masters of a first update that did not happen: a device that records work instead of doing it has
        // not written them.
        for (Slot& slot : slots_) {
            if (slot.steps > 0) continue;
            slot.moments.clear();
            slot.master = {};
        }
        throw;
    }
    ++steps_;
}

void Optimizer::apply(const Batch& batch) {
    update(batch);
    for (const Update& one : batch.updates) {
        Slot& slot = *one.slot;
        ++slot.steps;
        one.weights.storage()->bump_version();
        if (one.rounded_or_none.defined())
            one.rounded_or_none.storage()->bump_version();
        else if (slot.master.defined())
            slot.parameter.copy_(slot.master);
        slot.version = slot.parameter.storage()->version();
    }
}

/// What there is to update, with all memory that it takes: when there is too little, nothing has been updated.
std::vector<Optimizer::Batch> Optimizer::batches() {
    std::vector<Batch> batches;
    for (Slot& slot : slots_) {
        const Tensor gradient = slot.parameter.grad();
        if (!gradient.defined()) continue;
        prepare(slot);
        const Tensor parameter = slot.parameter.detach();
        Update update{.slot = &slot,
                      .weights = slot.master.defined() ? slot.master : parameter,
                      .gradient = gradient.detach().contiguous(),
                      .rounded_or_none = {},
                      .rounding_key = {}};
        if (slot.master.defined() && parameter.is_contiguous())
            update.rounded_or_none = parameter;
        else if (update.weights.dtype() == DType::bf16)
            update.rounding_key = default_generator(parameter.device()).take(parameter.count());
        const double learning_rate = learning_rate_ * slot.learning_rate_factor;
        const auto fits = [&](const Batch& batch) {
            return batch.device == parameter.device() && batch.learning_rate == learning_rate &&
                   batch.weight_decay == slot.weight_decay && batch.step == slot.steps + 1;
        };
        auto batch = std::find_if(batches.begin(), batches.end(), fits);
        if (batch == batches.end()) {
            batches.push_back({parameter.device(), learning_rate, slot.weight_decay, slot.steps + 1, {}});
            batch = batches.end() - 1;
        }
        batch->updates.push_back(std::move(update));
    }
    return batches;
}

bool Optimizer::needs_master(const Tensor& parameter) const {
    if (!parameter.is_contiguous()) return true;
    if (stochastic_rounding_ && parameter.dtype() == DType::bf16) return false;
    return state_dtype(parameter) != parameter.dtype();
}

void Optimizer::prepare(Slot& slot) const {
    const TensorOptions options{state_dtype(slot.parameter), slot.parameter.device()};
    if (slot.moments.empty()) {
        for (std::size_t i = 0; i < moment_names_.size(); ++i) {
            slot.moments.push_back(zeros(slot.parameter.shape(), options));
        }
    }
    if (!needs_master(slot.parameter)) return;
    if (!slot.master.defined()) {
        slot.master = empty(slot.parameter.shape(), options);
        slot.master.copy_(slot.parameter.detach());
    } else if (slot.version != slot.parameter.storage()->version()) {
        refresh_master(slot);
    }
}

/// Somebody else wrote to the parameter (loaded weights, for instance): what differs from the rounded master is new.
void Optimizer::refresh_master(Slot& slot) const {
    const Tensor parameter = slot.parameter.detach();
    const Tensor unchanged = slot.master.to(parameter.dtype()) == parameter;
    slot.master.copy_(where(unchanged, slot.master, parameter.to(slot.master.dtype())));
}

void Optimizer::zero_grad() {
    for (Slot& slot : slots_) slot.parameter.set_grad({});
}

/// What belongs to a parameter after `steps` updates.
std::vector<std::string> Optimizer::parts_of(const Slot& slot, std::int64_t steps) const {
    std::vector<std::string> parts;
    if (steps > 0) {
        parts = moment_names_;
        if (needs_master(slot.parameter)) parts.emplace_back(master_name);
    }
    return parts;
}

nn::StateDict Optimizer::state_dict() const {
    nn::StateDict state;
    state[learning_rate_name] = tensor(learning_rate_, {DType::f64});
    state[steps_name] = tensor(std::vector<std::int64_t>{steps_}, {});
    for (const Slot& slot : slots_) {
        state[fmt::format("{}/{}", steps_name, slot.name)] =
            tensor(std::vector<std::int64_t>{slot.steps}, {});
        if (slot.steps == 0) continue;
        for (std::size_t i = 0; i < moment_names_.size(); ++i) {
            state[moment_names_[i] + "/" + slot.name] = slot.moments[i];
        }
        if (slot.master.defined()) state[fmt::format("{}/{}", master_name, slot.name)] = slot.master;
    }
    return state;
}

void Optimizer::load_state_dict(const nn::StateDict& state) {
    std::vector<std::string> missing, unknown, unfit;
    std::set<std::string> known;
    const auto find = [&](const std::string& name, const Shape& shape) -> Tensor {
        known.insert(name);
        const auto found = state.find(name);
        if (found == state.end()) {
            missing.push_back(name);
            return {};
        }
        if (found->second.shape() != shape) {
            unfit.push_back(fmt::format("{} has shape {} here and {} in the state", name, pretty(shape),
                                        pretty(found->second.shape())));
            return {};
        }
        return found->second;
    };
    const Tensor learning_rate = find(learning_rate_name, {});
    const Tensor all_steps = find(steps_name, {});

    struct Loaded {
        std::int64_t steps = 0;
        std::vector<Tensor> parts;
    };
    std::vector<Loaded> loaded;
    for (const Slot& slot : slots_) {
        Loaded& one = loaded.emplace_back();
        const std::string name = fmt::format("{}/{}", steps_name, slot.name);
        const Tensor steps = find(name, {});
        if (!steps.defined()) continue;
        one.steps = steps.item<std::int64_t>();
        if (one.steps < 0) unfit.push_back(fmt::format("{} is {}", name, one.steps));
        for (const std::string& part : parts_of(slot, one.steps)) {
            one.parts.push_back(find(part + "/" + slot.name, slot.parameter.shape()));
        }
    }
    for (const auto& [name, value] : state) {
        if (!known.contains(name)) unknown.push_back(name);
    }
    const std::string faults = nn::faults_of({{"Missing", missing}, {"Unknown", unknown}, {"Unfit", unfit}});
    if (!faults.empty()) {
        throw Error(op_, fmt::format("the state does not fit this optimizer.{} Nothing was loaded.", faults));
    }
    set_learning_rate(learning_rate.item<double>());
    steps_ = all_steps.item<std::int64_t>();
    const NoGrad guard;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        slot.steps = loaded[i].steps;
        slot.moments.clear();
        slot.master = {};
        for (const Tensor& part : loaded[i].parts) {
            // A copy of its own: the state may be another optimizer's, or a mapped file.
            Tensor copy = empty(part.shape(), {state_dtype(slot.parameter), slot.parameter.device()});
            copy.copy_(part.to(slot.parameter.device()));
            if (slot.moments.size() < moment_names_.size()) {
                slot.moments.push_back(copy);
            } else {
                slot.master = copy;
            }
        }
        // Not a version that the parameter ever had: weights loaded before or after this are compared with the master.
        slot.version = ~std::uint64_t{0};
    }
}

SGD::SGD(const std::vector<nn::NamedTensor>& parameters, const SGDOptions& options)
    : Optimizer("sgd", parameters, options.learning_rate, options.weight_decay, options.groups,
                options.momentum == 0.0 ? std::vector<std::string>{} : std::vector<std::string>{"momentum"},
                options.stochastic_rounding),
      options_(options) {
    check_share("sgd", "momentum", options.momentum);
    if (!(options.dampening >= 0.0 && options.dampening <= 1.0)) {
        throw Error("sgd", fmt::format("dampening is {}. It must lie in [0, 1].", options.dampening));
    }
    if (options.nesterov && (options.momentum == 0.0 || options.dampening != 0.0)) {
        throw Error("sgd", "nesterov needs momentum above 0 and no dampening.");
    }
}

void SGD::update(const Batch& batch) {
    const SgdSpec step{.learning_rate = batch.learning_rate,
                       .momentum = options_.momentum,
                       .dampening = options_.dampening,
                       .weight_decay = batch.weight_decay,
                       .nesterov = options_.nesterov,
                       .first = batch.step == 1,
                       .stochastic_rounding = options_.stochastic_rounding};
    std::vector<SgdTensors> tensors;
    for (const Update& one : batch.updates) {
        const std::vector<Tensor>& moments = one.slot->moments;
        tensors.push_back({one.weights, one.gradient, moments.empty() ? Tensor() : moments[0],
                           one.rounded_or_none, one.rounding_key});
    }
    backend(batch.device).sgd(step, tensors);
}

AdamW::AdamW(const std::vector<nn::NamedTensor>& parameters, const AdamWOptions& options)
    : Optimizer("adamw", parameters, options.learning_rate, options.weight_decay, options.groups,
                {"first_moment", "second_moment"}, options.stochastic_rounding),
      options_(options) {
    check_share("adamw", "beta1", options.beta1);
    check_share("adamw", "beta2", options.beta2);
    if (!(options.epsilon >= 0.0)) {
        throw Error("adamw", fmt::format("epsilon is {}. It must not be negative.", options.epsilon));
    }
}

void AdamW::update(const Batch& batch) {
    const AdamWSpec step{.learning_rate = batch.learning_rate,
                         .beta1 = options_.beta1,
                         .beta2 = options_.beta2,
                         .epsilon = options_.epsilon,
                         .weight_decay = batch.weight_decay,
                         .step = batch.step,
                         .decoupled = options_.decoupled,
                         .stochastic_rounding = options_.stochastic_rounding};
    std::vector<AdamWTensors> tensors;
    for (const Update& one : batch.updates)
        tensors.push_back({one.weights, one.gradient, one.slot->moments[0], one.slot->moments[1],
                           one.rounded_or_none, one.rounding_key});
    backend(batch.device).adamw(step, tensors);
}

}  // namespace potluck::optim
