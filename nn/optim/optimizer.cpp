#include "nn/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/format.h"
#include "core/strides.h"
#include "nn/names.h"
#include "nn/optim/options.h"
#include "nn/optim/same_elements.h"

namespace potluck::optim {

bool matches(std::string_view pattern, std::string_view name) {
    // A star first matches nothing; at a mismatch the last star takes one more character.
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

/// Detects layers that were replaced after the optimizer was created: they would never be trained.
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

}  // namespace potluck::optim
