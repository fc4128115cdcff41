#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/random_scope.h"
#include "core/tensor.h"

namespace potluck::nn {

class Branch;
class Module;

/// Tensors by name: the state of a module or an optimizer.
using StateDict = std::map<std::string, Tensor>;

struct NamedTensor {
    std::string name;
    Tensor tensor;
};

/// One member of a module: a tensor or another module.
struct Member {
    enum class Kind { parameter, buffer, unsaved_buffer, module };

    std::string name;
    Kind kind = Kind::parameter;
    Tensor* tensor = nullptr;  // for a parameter or buffer
    Module* module = nullptr;  // for a module
};

/// Collects the members that Module::members() lists: `m("up", up)("down", down).buffer("mean", mean)`.
class Members {
public:
    /// `training`: the mode of the module whose members are listed.
    explicit Members(bool training) : training_(training) {}

    /// A trainable tensor. An undefined one (an absent bias) is skipped.
    Members& operator()(const std::string& name, Tensor& parameter);
    Members& operator()(const std::string& name, Module& module);
    /// The branch of a layer; a newly assigned one gets the layer's mode. An empty one is skipped.
    Members& operator()(const std::string& name, Branch& branch);
    /// A list, whose entries are named name.0, name.1, ...
    template <class T>
    Members& operator()(const std::string& name, std::vector<T>& list) {
        for (std::size_t i = 0; i < list.size(); ++i) (*this)(name + "." + std::to_string(i), list[i]);
        return *this;
    }
    /// A module that is stored elsewhere, of any type derived from Module. A null pointer is skipped.
    template <class T>
    Members& operator()(const std::string& name, std::unique_ptr<T>& pointer) {
        if (pointer != nullptr) (*this)(name, *pointer);
        return *this;
    }
    /// A tensor of the module that is not trained: running statistics, tables. `saved` false excludes it from the state
    /// dict (because it can be recomputed). Buffers move with to(device) and keep their dtype in to(dtype).
    Members& buffer(const std::string& name, Tensor& tensor, bool saved = true);

    const std::vector<Member>& list() const { return list_; }

private:
    void add(Member member);  // throws Error for a name that is empty or already used

    bool training_;
    std::vector<Member> list_;
};

/// How a state matches a module: see Module::load_state_dict().
struct LoadReport {
    std::vector<std::string> missing;     // in the module, not in the state
    std::vector<std::string> unexpected;  // in the state, not in the module
};

/// Whether a module still exists at its address: tokens expire when it is destroyed or moved from.
class LifetimeToken {
public:
    LifetimeToken() = default;
    LifetimeToken(const LifetimeToken&) noexcept {}
    LifetimeToken(LifetimeToken&& other) noexcept { other.token_.reset(); }
    // NOLINTNEXTLINE(bugprone-unhandled-self-assignment): nothing is taken from the other
    LifetimeToken& operator=(const LifetimeToken&) noexcept { return *this; }
    LifetimeToken& operator=(LifetimeToken&& other) noexcept {
        other.token_.reset();
        return *this;
    }
    ~LifetimeToken() = default;

    std::weak_ptr<const void> token() const {
        if (token_ == nullptr) token_ = std::make_shared<char>();
        return token_;
    }

private:
    mutable std::shared_ptr<char> token_;  // created on first request
};

namespace detail {

/// Overloads of forward() that users declare by mistake. They would not override Module's, and the mistake would only
/// show at run time; since these are final, the compiler refuses them.
class WrongForward {
protected:
    WrongForward() = default;
    WrongForward(const WrongForward&) = default;
    WrongForward& operator=(const WrongForward&) = default;
    ~WrongForward() = default;

private:
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
    virtual void forward(Tensor) final {}               // write Tensor forward(const Tensor& x) override
    virtual void forward(Tensor&) final {}              // write Tensor forward(const Tensor& x) override
    virtual void forward(Tensor&&) final {}             // write Tensor forward(const Tensor& x) override
    virtual void forward(Tensor) const final {}         // write Tensor forward(const Tensor& x) override
    virtual void forward(const Tensor&) const final {}  // write Tensor forward(const Tensor& x) override
#pragma GCC diagnostic pop
};

}  // namespace detail

/// The base class of everything with parameters. A module is a plain struct: its layers are members, which members()
/// lists once, and forward() computes:
///
///     struct Net : nn::Module {
///         nn::Linear up{784, 256}, down{256, 10};
///         void members(nn::Members& m) override { m("up", up)("down", down); }
///         Tensor forward(const Tensor& x) override { return down(relu(up(x))); }
///     };
///
/// Copies share their parameters, like copies of a Tensor; clone() creates separate parameters. A tensor with two names
/// (GPT-2's embedding is also its output layer) is tied: it is listed once in parameters(), has both names in the state
/// dict, and stays tied in to(), clone() and loading.
class Module : private detail::WrongForward {
public:
    Module() = default;
    virtual ~Module() = default;
    /// A copy of a LoraLinear as a Linear (`Linear x = lora`, `linears.push_back(lora)`) lacks what the derived type adds.
    /// No constructor can see that; the copy throws Error when it is used: when it computes, and when anybody asks for its
    /// members (parameters, state, an optimizer, printing). A forward() that is called by its name looks only where it
    /// calls other modules. See Branch for what adds to a layer.
    Module(const Module& other);
    Module(Module&& other) noexcept;
    /// Throws Error when the other has another type: the members of a derived type would be lost. See Branch.
    Module& operator=(const Module& other);
    Module& operator=(Module&& other);  // NOLINT(performance-noexcept-move-constructor): it throws

    /// Lists the members. A module without any (an activation) need not override it.
    virtual void members(Members& m);
    /// Computes the output. Throws Error unless overridden.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
    virtual Tensor forward(const Tensor& x);
#pragma GCC diagnostic pop
    /// forward(x); an input on the CPU is first moved to the device of the module's parameters, so that a loader's
    /// batches can be passed directly to a model on a GPU.
    Tensor operator()(const Tensor& x) {
        check_copy();
        const RandomSiteScope site(random_site_);
        return forward(at_home(x));
    }
    /// The quantity that training minimises: a scalar, by default the mean cross-entropy of forward(inputs) over the
    /// targets that are not -100.
    virtual Tensor loss(const Tensor& inputs, const Tensor& targets);
    /// A one-line description for printing, such as "Linear(784, 256)". By default the name of the type.
    virtual std::string describe() const;

    /// Every trainable tensor once, in the order of members().
    std::vector<Tensor> parameters() const;
    /// The same with full names, such as "transformer.h.0.ln_1.weight"; a tied tensor has its first name.
    std::vector<NamedTensor> named_parameters() const;
    /// The other names of tied tensors, each with the tensor's first name.
    std::map<std::string, std::string> tied_names() const;
    /// Every buffer once, saved or not, in the order of members(), with its full name.
    std::vector<NamedTensor> named_buffers() const;
    /// Number of trainable numbers (tied tensors count once).
    std::int64_t parameter_count() const;

    /// Parameters and saved buffers under all their names. The tensors themselves, not copies.
    StateDict state_dict() const;
    /// Copies `state` into this module, converting dtypes and devices. One of the names of a tied tensor suffices; two
    /// that have different values are an Error. With `strict`, missing and unexpected names are an Error; without, they
    /// are returned, but a state without any tensor of the module is still an Error. The state may contain the module's
    /// own tensors under other names, or views of them. One Error lists everything that does not fit; then nothing is
    /// changed.
    LoadReport load_state_dict(const StateDict& state, bool strict = true);

    /// Moves parameters, their gradients and buffers to a device. They remain the same tensors: every handle, for
    /// instance an optimizer's, stays valid, and tensors that share elements continue to share them. A gradient buffer
    /// (set_gradient_buffer()) is removed, even if the module is moved back.
    void to(Device device);
    /// Converts parameters (and their gradients) to a floating dtype in the same way; buffers keep their dtypes. A
    /// gradient buffer is removed when it does not fit the dtype: an f32 one fits all but f64.
    void to(DType dtype);
    /// Switches this module and all below to training mode (dropout is active) or evaluation mode (it is not).
    void train(bool training = true);
    void eval() { train(false); }
    bool is_training() const { return training_; }
    /// Assigns this module and all below the random site at which their dropout draws masks in a RandomUpdateScope (see
    /// core/random_scope.h): a hash of the full name, so that it is the same in every process that has the layer.
    /// operator() opens the site; a function with another name than forward() must open it itself. Modules without a
    /// site draw at that of their caller.
    void assign_random_sites(const std::string& name = "");
    std::uint64_t random_site() const { return random_site_; }
    /// Drops the gradients of all parameters.
    void zero_grad();
    /// Makes all parameters require gradients, or none (frozen).
    void set_requires_grad(bool requires_grad);

    /// Replaces every tensor by the result of `change`; tied tensors, including those that share memory, stay tied.
    /// Used by clone().
    void replace_tensors(const std::function<Tensor(const Tensor& tensor, Member::Kind kind)>& change);
    /// The direct members of this module, as members() lists them.
    std::vector<Member> list_members() const;
    /// Expires when this module is destroyed or moved from.
    std::weak_ptr<const void> presence() const { return lifetime_.token(); }

private:
    friend class EvalMode;

    Tensor at_home(const Tensor& x) const;
    void check_assignment(const Module& other) const;
    /// What a copy of this one is a copy of.
    const std::type_info& copied_type() const noexcept;
    /// Throws Error when this is a copy of a derived type's module.
    void check_copy() const {
        if (original_ != nullptr && *original_ != typeid(*this)) check_original();
    }
    void check_original() const;

    bool training_ = true;
    std::uint64_t random_site_ = 0;  // 0: no site
    LifetimeToken lifetime_;
    const std::type_info* original_ = nullptr;  // the type of what this was copied or moved from
};

/// Switches a module and all below to evaluation mode while it lives, then restores the mode of each.
class EvalMode {
public:
    [[nodiscard]] explicit EvalMode(Module& module);
    ~EvalMode();
    EvalMode(const EvalMode&) = delete;
    EvalMode& operator=(const EvalMode&) = delete;

private:
    std::vector<std::pair<Module*, bool>> modes_;
};

/// Makes a tensor a parameter: a leaf that accumulates gradients.
Tensor parameter(const Tensor& initial);

/// Throws Error when the module has a type derived from `type`: copying it as `type` would lose members.
void check_type(const Module& module, const std::type_info& type);

/// A copy of a module with its own parameters and buffers. Throws Error when its type is derived from M.
template <std::copyable M>
requires std::derived_from<M, Module> M clone(const M& module) {
    check_type(module, typeid(M));
    M copy = module;
    detach_copies(copy);
    return copy;
}
/// Gives a module its own copies of all tensors that it shares with others. Used by clone().
void detach_copies(Module& module);

/// The modules as a tree, one per line with the shapes of its own parameters and buffers and the number of parameters.
std::string to_string(const Module& module);
std::ostream& operator<<(std::ostream& stream, const Module& module);

}  // namespace potluck::nn
