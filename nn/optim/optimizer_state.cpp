// Saving and loading the state of an optimizer.

#include <cmath>
#include <set>
#include <span>

#include "autograd/grad_mode.h"
#include "autograd/ops/reduce.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/measure.h"
#include "nn/names.h"
#include "nn/optim/optimizer.h"

namespace potluck::optim {
namespace {

constexpr const char* learning_rate_name = "learning_rate";
constexpr const char* steps_name = "steps";
constexpr const char* master_name = "master";

}  // namespace

/// The names of a parameter's state after `steps` updates.
std::vector<std::string> Optimizer::parts_of(const Slot& slot, std::int64_t steps) const {
    std::vector<std::string> parts;
    if (steps > 0) {
        parts = kind_.moment_names;
        if (needs_master(slot.parameter)) parts.emplace_back(master_name);
    }
    return parts;
}

std::int64_t Optimizer::state_bytes() const {
    std::int64_t bytes = 0;
    for (const Slot& slot : slots_) {
        if (slot.steps == 0 && !slot.parameter.requires_grad()) continue;
        const auto parts = static_cast<std::int64_t>(parts_of(slot, 1).size());
        bytes += parts * slot.parameter.count() * size_of(accumulation_dtype(slot.parameter.dtype()));
    }
    return bytes;
}

nn::StateDict Optimizer::state_dict() const {
    nn::StateDict state;
    state[learning_rate_name] = tensor(learning_rate_, {DType::f64});
    state[steps_name] = tensor(std::vector<std::int64_t>{steps_}, {});
    for (const Slot& slot : slots_) {
        state[fmt::format("{}/{}", steps_name, slot.name)] =
            tensor(std::vector<std::int64_t>{slot.steps}, {});
        if (slot.steps == 0) continue;
        const Slot fit = is_fit(slot) ? slot : fitted(slot);
        for (std::size_t i = 0; i < kind_.moment_names.size(); ++i)
            state[kind_.moment_names[i] + "/" + slot.name] = fit.moments[i];
        if (fit.master.defined()) state[fmt::format("{}/{}", master_name, slot.name)] = fit.master;
    }
    return state;
}

/// A sentence when the moments in the state are not those that this kind of optimizer keeps, else an empty text.
std::string Optimizer::other_kind(const nn::StateDict& state) const {
    std::set<std::string> slot_names, moments;
    for (const Slot& slot : slots_) slot_names.insert(slot.name);
    bool is_used = false;
    for (const auto& [name, value] : state) {
        const std::size_t slash = name.find('/');
        if (slash == std::string::npos || !slot_names.contains(name.substr(slash + 1))) continue;
        const std::string part = name.substr(0, slash);
        if (part == steps_name)
            is_used = is_used || (value.defined() && value.count() == 1 && value.item() > 0.0);
        else if (part != master_name)
            moments.insert(part);
    }
    const std::set<std::string> own(kind_.moment_names.begin(), kind_.moment_names.end());
    if (!is_used || moments == own) return "";
    const auto listed = [](const std::set<std::string>& names) {
        return names.empty() ? std::string("no moments") : fmt::format("{}", fmt::join(names, " and "));
    };
    return fmt::format(
        " It is that of another kind of optimizer: it holds {} of each parameter, and this one keeps {}. "
        "Take "
        "the kind that saved it, or load the weights alone and let this one begin anew.",
        listed(moments), listed(own));
}

/// The parts of a state for each slot if the state fits; else throws Error.
std::vector<Optimizer::Loaded> Optimizer::fitting_parts(const nn::StateDict& state) const {
    std::vector<std::string> missing, unknown, unfit;
    std::set<std::string> known;
    const auto find = [&](const std::string& name, const Shape& shape) -> Tensor {
        known.insert(name);
        const auto found = state.find(name);
        if (found == state.end()) {
            missing.push_back(name);
            return {};
        }
        if (!found->second.defined()) {
            unfit.push_back(fmt::format("{} is an undefined tensor", name));
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
    /// An update count, which the kernels also use as an f64; 0 if it is invalid.
    const auto steps_of = [&](const std::string& name, const Tensor& steps) -> std::int64_t {
        constexpr std::int64_t most = std::int64_t{1} << 53;
        const bool fits = is_integer(steps.dtype()) && steps.item<std::int64_t>() >= 0 &&
                          steps.item<std::int64_t>() <= most;
        if (!fits) unfit.push_back(fmt::format("{} is {}", name, to_string(steps)));
        return fits ? steps.item<std::int64_t>() : 0;
    };
    if (learning_rate.defined() && !(learning_rate.item() >= 0.0 && std::isfinite(learning_rate.item())))
        unfit.push_back(fmt::format("{} is {}", learning_rate_name, learning_rate.item()));
    if (all_steps.defined()) steps_of(steps_name, all_steps);

    std::vector<Loaded> loaded;
    for (const Slot& slot : slots_) {
        Loaded& one = loaded.emplace_back();
        const std::string name = fmt::format("{}/{}", steps_name, slot.name);
        const Tensor steps = find(name, {});
        if (!steps.defined()) continue;
        one.steps = steps_of(name, steps);
        for (const std::string& part : parts_of(slot, one.steps)) {
            one.parts.push_back(find(part + "/" + slot.name, slot.parameter.shape()));
            if (!one.parts.back().defined()) continue;
            const Tensor value = one.parts.back().detach().to(accumulation_dtype(slot.parameter.dtype()));
            if (!std::isfinite(largest_magnitude(std::span(&value, 1))))
                unfit.push_back(fmt::format("{}/{} holds a number that is not finite", part, slot.name));
            else if (part == "second_moment" && value.count() > 0 && min(value).item() < 0.0)
                unfit.push_back(fmt::format("{}/{} holds a negative number", part, slot.name));
        }
    }
    for (const auto& [name, value] : state) {
        if (!known.contains(name)) unknown.push_back(name);
    }
    const std::string faults = nn::faults_of({{"Missing", missing}, {"Unknown", unknown}, {"Unfit", unfit}});
    if (!faults.empty()) {
        throw Error(kind_.op, fmt::format("the state does not fit this optimizer.{}{} Nothing was loaded.",
                                          other_kind(state), faults));
    }
    return loaded;
}

void Optimizer::exchange_masters(nn::StateDict& state, nn::StateDict& weights) const {
    const NoGrad guard;
    for (const Slot& slot : slots_) {
        const std::string name = fmt::format("{}/{}", master_name, slot.name);
        const auto weight = weights.find(slot.name);
        const auto master = state.find(name);
        const bool has_master = master != state.end();
        if (weight == weights.end() || (!needs_master(slot.parameter) && !has_master)) continue;
        if (!has_master) {
            // Without an update there are no moments either.
            const auto steps = state.find(fmt::format("{}/{}", steps_name, slot.name));
            if (steps != state.end() && steps->second.count() == 1 && steps->second.item() > 0.0)
                state[name] = weight->second;
        } else if (master->second.shape() == weight->second.shape()) {
            // The weights are rounded from the master, here perhaps to another dtype than where they were saved.
            weight->second = newest(master->second, weight->second);
            if (!needs_master(slot.parameter)) state.erase(master);
        }
    }
}

void Optimizer::check_state_dict(const nn::StateDict& state) const { fitting_parts(state); }

void Optimizer::load_state_dict(const nn::StateDict& state) {
    const std::vector<Loaded> loaded = fitting_parts(state);
    set_learning_rate(state.at(learning_rate_name).item<double>());
    started_.clear();
    steps_ = state.at(steps_name).item<std::int64_t>();
    const NoGrad guard;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        slot.steps = loaded[i].steps;
        slot.moments.clear();
        slot.master = {};
        for (const Tensor& part : loaded[i].parts) {
            // A separate copy: the state may belong to another optimizer or a mapped file.
            const DType dtype = accumulation_dtype(slot.parameter.dtype());
            Tensor copy = empty(part.shape(), {dtype, slot.parameter.device()});
            copy.copy_(part.to(slot.parameter.device()));
            if (slot.moments.size() < kind_.moment_names.size()) {
                slot.moments.push_back(copy);
            } else {
                slot.master = copy;
            }
        }
        // A version that the parameter never had: weights that are loaded before or after this are compared with the
        // master.
        slot.version = ~std::uint64_t{0};
    }
}

}  // namespace potluck::optim
