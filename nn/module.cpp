#include "nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <typeinfo>

#include "autograd/grad_mode.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/cross_entropy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/format.h"
#include "nn/names.h"
#include "nn/walk.h"

namespace potluck::nn {
namespace {

using Kind = Member::Kind;

/// A tensor somewhere in the tree, by its full name.
struct Place {
    std::string name;
    Kind kind;
    Tensor* tensor;
};

std::vector<Place> places_of(const Module& module) {
    std::vector<Place> places;
    walk(module, [&](const Member& member, const std::string& name, std::size_t) {
        if (member.kind != Kind::module) places.push_back({name, member.kind, member.tensor});
    });
    std::set<std::string> names;
    for (const Place& place : places) {
        if (!names.insert(place.name).second) {
            throw Error("module",
                        fmt::format("two tensors are called \"{}\". Name each member once.", place.name));
        }
    }
    return places;
}

/// A tensor with all of its names, the first one first.
struct Tied {
    Tensor tensor;
    std::vector<std::string> names;
    Kind kind;
};

template <class Keep>
std::vector<Tied> tensors_of(const Module& module, Keep keep) {
    std::vector<Tied> tensors;
    for (const Place& place : places_of(module)) {
        if (!keep(place.kind)) continue;
        const auto known = std::find_if(tensors.begin(), tensors.end(),
                                        [&](const Tied& tied) { return tied.tensor.is_same(*place.tensor); });
        if (known != tensors.end()) {
            known->names.push_back(place.name);
        } else {
            tensors.push_back({*place.tensor, {place.name}, place.kind});
        }
    }
    return tensors;
}

std::vector<Tied> parameters_of(const Module& module) {
    return tensors_of(module, [](Kind kind) { return kind == Kind::parameter; });
}

std::vector<Tied> saved_tensors_of(const Module& module) {
    return tensors_of(module, [](Kind kind) { return kind != Kind::unsaved_buffer; });
}

bool same_values(const Tensor& a, const Tensor& b) {
    if (a.is_same(b)) return true;
    return a.dtype() == b.dtype() && all(a.to(Device::cpu()) == b.to(Device::cpu())).item<bool>();
}

/// "Linear" of nn::Linear.
std::string type_name(const std::type_info& type) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> readable(
        abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
    const std::string name = status == 0 ? readable.get() : type.name();
    const std::size_t colon = name.rfind("::");
    return colon == std::string::npos ? name : name.substr(colon + 2);
}

}  // namespace

Members& Members::operator()(const std::string& name, Tensor& parameter) {
    if (parameter.defined()) add({name, Kind::parameter, &parameter, nullptr});
    return *this;
}

Members& Members::operator()(const std::string& name, Module& module) {
    add({name, Kind::module, nullptr, &module});
    return *this;
}

Members& Members::buffer(const std::string& name, Tensor& tensor, bool saved) {
    if (tensor.defined()) add({name, saved ? Kind::buffer : Kind::unsaved_buffer, &tensor, nullptr});
    return *this;
}

void Members::add(Member member) {
    if (member.name.empty()) throw Error("module", "a member has an empty name. Give it one in members().");
    for (const Member& other : list_) {
        if (other.name == member.name) {
            throw Error("module",
                        fmt::format("two members are called \"{}\". Name each member once.", member.name));
        }
    }
    list_.push_back(std::move(member));
}

void Module::members(Members&) {}

Tensor Module::forward(const Tensor&) {
    throw Error("module",
                fmt::format("{} has no forward(const Tensor&). Write one, or call the function that it has.",
                            describe()));
}

Tensor Module::at_home(const Tensor& x) const {
    // Looking for a parameter takes longer than a small layer, so it is done only where there is a choice.
    if (!x.defined() || x.device() != Device::cpu() || device_count() == 1) return x;
    const std::vector<Tensor> own = parameters();
    return own.empty() ? x : x.to(own.front().device());
}

Tensor Module::loss(const Tensor& inputs, const Tensor& targets) {
    return cross_entropy((*this)(inputs), targets);
}

std::string Module::describe() const { return type_name(typeid(*this)); }

void Module::check_assignment(const Module& other) const {
    if (typeid(*this) == typeid(other)) return;
    throw Error("module",
                fmt::format("a {} is assigned to a {}, which would lose what its type adds. Give a Linear "
                            "or Conv1D the new module as its branch, or write a model that has it.",
                            other.describe(), describe()));
}

namespace {

/// Whether `derived` is a type derived from `base`, or that.
bool derives(const Module& derived, const std::type_info& base) {
    // Types that only a module names are known by their objects alone: the language has no such question about two types.
    const auto* const base_class = dynamic_cast<const abi::__class_type_info*>(&base);
    void* object = dynamic_cast<void*>(const_cast<Module*>(&derived));
    return typeid(derived) == base ||
           (base_class != nullptr && typeid(derived).__do_upcast(base_class, &object));
}

}  // namespace

const std::type_info& Module::copied_type() const noexcept {
    return original_ != nullptr && !derives(*this, *original_) ? *original_ : typeid(*this);
}

void Module::check_original() const {
    if (derives(*this, *original_)) return;  // a Linear that became part of a LoraLinear
    throw Error(
        "module",
        fmt::format("this {} is a copy of a {}, which lost what that type adds. Keep it as what it "
                    "is (a pointer in a list), or give a Linear or Conv1D the new module as its branch.",
                    type_name(typeid(*this)), type_name(*original_)));
}

Module::Module(const Module& other)
    : detail::WrongForward(other),
      training_(other.training_),
      random_site_(other.random_site_),
      presence_(other.presence_),
      original_(&other.copied_type()) {}

Module::Module(Module&& other) noexcept
    : detail::WrongForward(other),
      training_(other.training_),
      random_site_(other.random_site_),
      presence_(std::move(other.presence_)),
      original_(&other.copied_type()) {}

Module& Module::operator=(const Module& other) {
    check_assignment(other);
    training_ = other.training_;
    random_site_ = other.random_site_;
    presence_ = other.presence_;
    original_ = &other.copied_type();
    return *this;
}

// NOLINTNEXTLINE(performance-noexcept-move-constructor): it throws
Module& Module::operator=(Module&& other) {
    check_assignment(other);
    training_ = other.training_;
    random_site_ = other.random_site_;
    presence_ = std::move(other.presence_);
    original_ = &other.copied_type();
    return *this;
}

std::vector<Member> Module::list_members() const {
    check_copy();
    Members m(training_);
    // members() only names what is there. It is not const so that a member can be changed through what it names.
    const_cast<Module*>(this)->members(m);
    return m.list();
}

std::vector<Tensor> Module::parameters() const {
    std::vector<Tensor> parameters;
    for (const Tied& tied : parameters_of(*this)) parameters.push_back(tied.tensor);
    return parameters;
}

void Module::assign_random_sites(const std::string& name) {
    const auto site_of = [](const std::string& full_name) {
        std::uint64_t site = 0xcbf29ce484222325U;  // Fowler, Noll, Vo: FNV-1a
        for (const char letter : full_name) {
            site ^= static_cast<unsigned char>(letter);
            site *= 0x100000001b3U;
        }
        return site;
    };
    random_site_ = site_of(name);
    walk(*this, [&](const Member& member, const std::string& below, std::size_t) {
        if (member.kind != Kind::module) return;
        member.module->random_site_ = site_of(name.empty() ? below : name + "." + below);
    });
}

std::vector<NamedTensor> Module::named_parameters() const {
    std::vector<NamedTensor> parameters;
    for (const Tied& tied : parameters_of(*this)) parameters.push_back({tied.names[0], tied.tensor});
    return parameters;
}

std::vector<NamedTensor> Module::named_buffers() const {
    std::vector<NamedTensor> buffers;
    for (const Tied& tied : tensors_of(*this, [](Kind kind) { return kind != Kind::parameter; }))
        buffers.push_back({tied.names[0], tied.tensor});
    return buffers;
}

std::map<std::string, std::string> Module::tied_names() const {
    std::map<std::string, std::string> names;
    for (const Tied& tied : saved_tensors_of(*this)) {
        for (std::size_t i = 1; i < tied.names.size(); ++i) names[tied.names[i]] = tied.names[0];
    }
    return names;
}

std::int64_t Module::parameter_count() const {
    std::int64_t count = 0;
    for (const Tensor& parameter : parameters()) count += parameter.count();
    return count;
}

StateDict Module::state_dict() const {
    StateDict state;
    for (const Tied& tied : saved_tensors_of(*this)) {
        for (const std::string& name : tied.names) state[name] = tied.tensor;
    }
    return state;
}

LoadReport Module::load_state_dict(const StateDict& state, bool strict) {
    struct Copy {
        Tensor to, from;
    };
    std::vector<Copy> copies;
    std::vector<std::string> unfit;
    LoadReport report;
    std::set<std::string> known;
    const std::vector<Tied> saved = saved_tensors_of(*this);
    for (const Tied& tied : saved) {
        std::string given_name;
        Tensor given;
        for (const std::string& name : tied.names) {
            known.insert(name);
            const auto found = state.find(name);
            if (found == state.end()) continue;
            const Tensor& value = found->second;
            if (value.shape() != tied.tensor.shape()) {
                unfit.push_back(fmt::format("{} has shape {} here and {} in the state", name,
                                            pretty(tied.tensor.shape()), pretty(value.shape())));
            } else if (is_floating(value.dtype()) != is_floating(tied.tensor.dtype())) {
                unfit.push_back(fmt::format("{} is {} here and {} in the state", name, tied.tensor.dtype(),
                                            value.dtype()));
            } else if (given.defined() && !same_values(given, value)) {
                unfit.push_back(
                    fmt::format("{} and {} are one tensor here and differ in the state", given_name, name));
            } else {
                given_name = name;
                given = value;
            }
        }
        if (given.defined()) {
            copies.push_back({tied.tensor, given});
        } else if (std::none_of(tied.names.begin(), tied.names.end(),
                                [&](const std::string& name) { return state.contains(name); })) {
            report.missing.push_back(fmt::format("{}", fmt::join(tied.names, " or ")));
        }
    }
    for (const auto& [name, value] : state) {
        if (!known.contains(name)) report.unexpected.push_back(name);
    }
    const std::string faults =
        faults_of({{"Missing", strict ? report.missing : std::vector<std::string>()},
                   {"Unexpected", strict ? report.unexpected : std::vector<std::string>()},
                   {"Unfit", unfit}});
    if (!faults.empty()) {
        throw Error("load_state_dict",
                    fmt::format("the state does not fit {}.{} Nothing was loaded.", describe(), faults));
    }
    if (copies.empty() && !saved.empty()) {
        throw Error(
            "load_state_dict",
            fmt::format("the state has no tensor of {}: it has {}, and the module {}. Nothing was loaded.",
                        describe(), state.empty() ? "none" : state.begin()->first + " ...",
                        saved.front().names.front() + " ..."));
    }
    const NoGrad guard;
    // A state may lie in the module's own memory, swapped or overlapping: it is read before that is written.
    for (Copy& copy : copies) {
        const bool aliases = std::any_of(copies.begin(), copies.end(), [&](const Copy& other) {
            return copy.from.storage() == other.to.storage();
        });
        if (aliases && !copy.from.is_same(copy.to)) copy.from = copy.from.clone();
    }
    for (const Copy& copy : copies) copy.to.copy_(copy.from.to(copy.to.device()));
    return report;
}

namespace {

/// Whether two tensors show the same elements, in the same order: tied by their memory.
bool show_same_elements(const Tensor& a, const Tensor& b) {
    return a.storage() == b.storage() && a.offset() == b.offset() && a.dtype() == b.dtype() &&
           a.count() == b.count() && a.is_contiguous() && b.is_contiguous();
}

}  // namespace

void Module::replace_tensors(const std::function<Tensor(const Tensor&, Kind)>& change) {
    std::vector<std::pair<Tensor, Tensor>> replaced;
    for (const Place& place : places_of(*this)) {
        const auto known = std::find_if(replaced.begin(), replaced.end(),
                                        [&](const auto& pair) { return pair.first.is_same(*place.tensor); });
        if (known != replaced.end()) {
            *place.tensor = known->second;
            continue;
        }
        const Tensor old = *place.tensor;
        Tensor fresh = change(old, place.kind);
        const auto tied = std::find_if(replaced.begin(), replaced.end(), [&](const auto& pair) {
            return show_same_elements(pair.first, old) && pair.second.dtype() == fresh.dtype() &&
                   pair.second.device() == fresh.device();
        });
        if (tied != replaced.end() && !fresh.is_same(old))
            fresh.set_elements(tied->second.detach().reshape(fresh.shape()));
        *place.tensor = fresh;
        replaced.emplace_back(old, fresh);
    }
}

namespace {

/// `fresh(tensor)` as a leaf like `tensor`, its gradient treated the same way.
template <class Fresh>
Tensor leaf_like(const Tensor& tensor, Fresh fresh) {
    const NoGrad guard;
    Tensor leaf = fresh(tensor.detach());
    if (tensor.requires_grad()) leaf.set_requires_grad();
    if (tensor.grad().defined()) leaf.set_grad(fresh(tensor.grad().detach()));
    return leaf;
}

}  // namespace

namespace {

/// Makes every tensor of the module what `convert` makes of its elements, where that is another tensor. Nothing has changed
/// when `convert` throws.
void convert_tensors(const Module& module,
                     const std::function<Tensor(const Tensor& elements, Kind kind)>& convert) {
    const NoGrad guard;
    struct Converted {
        Tensor tensor, elements, gradient;
    };
    std::vector<Converted> all;
    std::vector<Tied> tensors = tensors_of(module, [](Kind) { return true; });
    // Parameters first, so that a buffer that shows the memory of one goes with it.
    std::stable_partition(tensors.begin(), tensors.end(),
                          [](const Tied& tied) { return tied.kind == Kind::parameter; });
    for (const Tied& tied : tensors) {
        const Tensor before = tied.tensor.detach();
        const auto known = std::find_if(all.begin(), all.end(), [&](const Converted& other) {
            return show_same_elements(other.tensor, before);
        });
        Converted one{
            tied.tensor,
            known == all.end() ? convert(before, tied.kind) : known->elements.reshape(before.shape()),
            {}};
        if (one.elements.is_same(before)) continue;
        if (const Tensor gradient = tied.tensor.grad(); gradient.defined()) {
            // An f32 gradient of a half type is not rounded on its way to another, nor in a buffer that stays.
            const bool stays =
                gradient.dtype() == DType::f32 && potluck::detail::is_half(one.elements.dtype()) &&
                gradient.device() == one.elements.device() &&
                (potluck::detail::is_half(before.dtype()) || tied.tensor.node()->gradient_buffer.defined());
            one.gradient = stays ? gradient.detach() : convert(gradient.detach(), tied.kind);
        }
        all.push_back(std::move(one));
    }
    for (Converted& one : all) {
        const bool collects = one.tensor.requires_grad();
        one.tensor.set_grad({});
        one.tensor.set_elements(one.elements);
        if (collects && one.gradient.defined()) one.tensor.set_grad(one.gradient);
    }
}

}  // namespace

void Module::to(Device device) {
    convert_tensors(*this, [&](const Tensor& x, Kind) { return x.device() == device ? x : x.to(device); });
}

void Module::to(DType dtype) {
    if (!is_floating(dtype)) {
        throw Error("module.to",
                    fmt::format("parameters cannot be {}. Choose f64, f32, f16 or bf16.", dtype));
    }
    convert_tensors(*this, [&](const Tensor& x, Kind kind) {
        return kind != Kind::parameter || x.dtype() == dtype || !is_floating(x.dtype()) ? x : x.to(dtype);
    });
}

void Module::train(bool training) {
    training_ = training;
    walk(*this, [&](const Member& member, const std::string&, std::size_t) {
        if (member.kind == Kind::module) member.module->training_ = training;
    });
}

void Module::zero_grad() {
    for (const Tensor& parameter : parameters()) {
        Tensor handle = parameter;
        handle.set_grad({});
    }
}

void Module::set_requires_grad(bool requires_grad) {
    for (const Tensor& parameter : parameters()) {
        Tensor handle = parameter;
        handle.set_requires_grad(requires_grad);
    }
}

EvalMode::EvalMode(Module& module) {
    modes_.emplace_back(&module, module.training_);
    walk(module, [&](const Member& member, const std::string&, std::size_t) {
        if (member.kind == Kind::module) modes_.emplace_back(member.module, member.module->training_);
    });
    for (const auto& [one, training] : modes_) one->training_ = false;
}

EvalMode::~EvalMode() {
    // In reverse, so that a module met twice ends with the mode it had first.
    for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) mode->first->training_ = mode->second;
}

Tensor parameter(const Tensor& initial) {
    Tensor leaf = initial.detach();
    leaf.set_requires_grad();
    return leaf;
}

void check_type(const Module& module, const std::type_info& type) {
    if (typeid(module) == type) return;
    throw Error("module",
                fmt::format("{} is copied as a {}, which would lose what its type adds. Copy it as what "
                            "it is.",
                            module.describe(), type_name(type)));
}

void detach_copies(Module& module) {
    module.replace_tensors([](const Tensor& tensor, Kind) {
        return leaf_like(tensor, [](const Tensor& x) { return x.clone(); });
    });
}

}  // namespace potluck::nn
