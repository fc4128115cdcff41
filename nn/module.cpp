#include "nn/module.h"

#include <cxxabi.h>

#include <cstdlib>
#include <typeinfo>

#include "autograd/ops/cross_entropy.h"
#include "core/format.h"
#include "nn/module_tree.h"
#include "nn/tied.h"

namespace potluck::nn {

using detail::saved_tensors_of;
using detail::tensors_of;
using detail::Tied;
using Kind = Member::Kind;

namespace {

std::vector<Tied> parameters_of(const Module& module) {
    return tensors_of(module, [](Kind kind) { return kind == Kind::parameter; });
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
    // Looking for a parameter takes longer than a small layer, so it is done only if there is more than one device.
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
      lifetime_(other.lifetime_),
      original_(&other.copied_type()) {}

Module::Module(Module&& other) noexcept
    : detail::WrongForward(other),
      training_(other.training_),
      random_site_(other.random_site_),
      lifetime_(std::move(other.lifetime_)),
      original_(&other.copied_type()) {}

// NOLINTNEXTLINE(bugprone-unhandled-self-assignment): to itself it changes nothing
Module& Module::operator=(const Module& other) {
    check_assignment(other);
    training_ = other.training_;
    random_site_ = other.random_site_;
    lifetime_ = other.lifetime_;
    original_ = &other.copied_type();
    return *this;
}

// NOLINTNEXTLINE(performance-noexcept-move-constructor): it throws
Module& Module::operator=(Module&& other) {
    check_assignment(other);
    training_ = other.training_;
    random_site_ = other.random_site_;
    lifetime_ = std::move(other.lifetime_);
    original_ = &other.copied_type();
    return *this;
}

std::vector<Member> Module::list_members() const {
    check_copy();
    Members m(training_);
    // members() only lists references. It is not const so that members can be changed through them.
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
    for_each_member(*this, [&](const Member& member, const std::string& below, std::size_t) {
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

void Module::train(bool training) {
    training_ = training;
    for_each_member(*this, [&](const Member& member, const std::string&, std::size_t) {
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
    for_each_member(module, [&](const Member& member, const std::string&, std::size_t) {
        if (member.kind == Kind::module) modes_.emplace_back(member.module, member.module->training_);
    });
    for (const auto& [one, training] : modes_) one->training_ = false;
}

EvalMode::~EvalMode() {
    // In reverse, so that a module that occurs twice gets the mode that it had first.
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

}  // namespace potluck::nn
