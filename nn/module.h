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

/// Tensors by name: what a module or an optimizer consists of.
using StateDict = std::map<std::string, Tensor>;

struct NamedTensor {
    std::string name;
    Tensor tensor;
};

/// One thing that a module consists of: a tensor or another module.
struct Member {
    enum class Kind { parameter, buffer, unsaved_buffer, module };

    std::string name;
    Kind kind = Kind::parameter;
    Tensor* tensor = nullptr;  // of a parameter or buffer
    Module* module = nullptr;  // of a module
};

/// Collects the members that Module::members() names: `m("up", up)("down", down).buffer("mean", mean)`.
class Members {
public:
    /// Of a module that is being trained, or not.
    explicit Members(bool training) : training_(training) {}

    /// A tensor that is trained. An undefined one (an absent bias) is left out.
    Members& operator()(const std::string& name, Tensor& parameter);
    Members& operator()(const std::string& name, Module& module);
    /// What is added to a layer, whose mode it takes over when it is new. An empty one is left out.
    Members& operator()(const std::string& name, Branch& branch);
    /// A list: its entries are called name.0, name.1, ...
    template <class T>
    Members& operator()(const std::string& name, std::vector<T>& list) {
        for (std::size_t i = 0; i < list.size(); ++i) (*this)(name + "." + std::to_string(i), list[i]);
        return *this;
    }
    /// A module that lives elsewhere, of any type derived from Module. An empty pointer is left out.
    template <class T>
    Members& operator()(const std::string& name, std::unique_ptr<T>& pointer) {
        if (pointer != nullptr) (*this)(name, *pointer);
        return *this;
    }
    /// A tensor that belongs to the module but is not trained: running statistics, tables. `saved` false keeps it out of
    /// the state dict (what can be computed again). Buffers move with to(device) and keep their dtype in to(dtype).
    Members& buffer(const std::string& name, Tensor& tensor, bool saved = true);

    const std::vector<Member>& list() const { return list_; }

private:
    void add(Member member);  // throws Error for an empty name or one that is taken

    bool training_;
    std::vector<Member> list_;
};

/// How a state fits a module: see Module::load_state_dict().
struct LoadReport {
    std::vector<std::string> missing;     // in the module, not in the state
    std::vector<std::string> unexpected;  // in the state, not in the module
};

/// Whether a module is still where it was: what others hold of it expires when it ends or is moved from.
class Presence {
public:
    Presence() = default;
    Presence(const Presence&) noexcept {}
    Presence(Presence&& other) noexcept { other.token_.reset(); }
    // NOLINTNEXTLINE(bugprone-unhandled-self-assignment): nothing is taken from the other
    Presence& operator=(const Presence&) noexcept { return *this; }
    Presence& operator=(Presence&& other) noexcept {
        other.token_.reset();
        return *this;
    }
    ~Presence() = default;

    std::weak_ptr<const void> token() const {
        if (token_ == nullptr) token_ = std::make_shared<char>();
        return token_;
    }

private:
    mutable std::shared_ptr<char> token_;  // made for the first who asks
};

namespace detail {

/// Signatures that forward() is given by mistake. They would not override Module's, and the mistake would show when the
/// module runs; since these are final, the compiler refuses them.
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

/// The base of everything with parameters. A module is a plain struct: its layers are members, which members() names
/// once, and forward() computes:
///
///     struct Net : nn::Module {
///         nn::Linear up{784, 256}, down{256, 10};
///         void members(nn::Members& m) override { m("up", up)("down", down); }
///         Tensor forward(const Tensor& x) override { return down(relu(up(x))); }
///     };
///
/// Copies share their parameters, as copies of a Tensor do; clone() makes parameters of its own. A tensor that stands
/// at two places (GPT-2's embedding is also its output layer) is tied: it counts once in parameters(), keeps both names
/// in the state dict, and stays tied through to(), clone() and loading.
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
    /// Throws Error when the other is of another type: what a derived type adds would be lost. See Branch.
    Module& operator=(const Module& other);
    Module& operator=(Module&& other);  // NOLINT(performance-noexcept-move-constructor): it throws

    /// Names the members. A module without any (an activation) need not override it.
    virtual void members(Members& m);
    /// Computes. Throws Error unless overridden.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
    virtual Tensor forward(const Tensor& x);
#pragma GCC diagnostic pop
    /// forward(x); an input on the CPU is first moved to where the module's parameters are, so that batches of a loader fit
    /// a model on a GPU.
    Tensor operator()(const Tensor& x) {
        check_copy();
        const RandomSiteScope site(random_site_);
        return forward(at_home(x));
    }
    /// What training makes smaller: a scalar, by default the mean cross-entropy of forward(inputs) over the targets that
    /// are not -100.
    virtual Tensor loss(const Tensor& inputs, const Tensor& targets);
    /// The module in one line, such as "Linear(784, 256)", for printing. By default the name of its type.
    virtual std::string describe() const;

    /// Every trained tensor once, in the order of members().
    std::vector<Tensor> parameters() const;
    /// The same with full names, such as "transformer.h.0.ln_1.weight"; a tied tensor has its first name.
    std::vector<NamedTensor> named_parameters() const;
    /// Further names of tied tensors, and the first name of each.
    std::map<std::string, std::string> tied_names() const;
    /// Every buffer once, saved or not, in the order of members(), with its full name.
    std::vector<NamedTensor> named_buffers() const;
    /// Number of trained numbers (tied tensors count once).
    std::int64_t parameter_count() const;

    /// Parameters and saved buffers by all their names. The tensors themselves, not copies.
    StateDict state_dict() const;
    /// Copies `state` into this module, converting dtypes and devices. Of the names of a tied tensor one is enough; two
    /// that hold different values are an error. With `strict`, missing and unexpected names are errors; without, they
    /// are returned, but a state without any tensor of the module is an error too. The state may hold the module's own
    /// tensors under other names, or views of them. One Error lists everything that does not fit, and then nothing was
    /// changed.
    LoadReport load_state_dict(const StateDict& state, bool strict = true);

    /// Moves parameters, their gradients and buffers to a device. They stay the same tensors: every handle of them, an
    /// optimizer's for instance, goes on meaning them, and tensors that show the same elements go on sharing them. A buffer
    /// that somebody set for a gradient (set_gradient_buffer()) is dropped, also on the way there and back.
    void to(Device device);
    /// Converts parameters (and their gradients) to a floating dtype, in the same way; buffers keep theirs.
    /// A buffer for a gradient is dropped when it does not fit the dtype: an f32 one fits all but f64.
    void to(DType dtype);
    /// Tells this module and all below that they are being trained (dropout works), or used (it does not).
    void train(bool training = true);
    void eval() { train(false); }
    bool is_training() const { return training_; }
    /// Gives this module and all below the site at which their dropout draws its masks in a RandomUpdateScope (see
    /// core/random_scope.h): a number made of its full name, so that it is the same in every process that holds the
    /// layer. operator() opens the site; a forward() that is called by another name opens it itself. Modules without a
    /// site draw at that of their caller.
    void assign_random_sites(const std::string& name = "");
    std::uint64_t random_site() const { return random_site_; }
    /// Drops the gradients of all parameters.
    void zero_grad();
    /// Makes all parameters collect gradients, or none (frozen).
    void set_requires_grad(bool requires_grad);

    /// Replaces every tensor by what `change` makes of it; tied tensors, also those tied by memory, stay tied. What clone()
    /// is made of.
    void replace_tensors(const std::function<Tensor(const Tensor& tensor, Member::Kind kind)>& change);
    /// The members of this module alone, as members() names them.
    std::vector<Member> list_members() const;
    /// Expires when this module ends or is moved from.
    std::weak_ptr<const void> presence() const { return presence_.token(); }

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
    std::uint64_t random_site_ = 0;  // 0: none
    Presence presence_;
    const std::type_info* original_ = nullptr;  // the type of what this was copied or moved from
};

/// Puts a module and all below into evaluation while it lives, then each back to what it was.
class EvalMode {
public:
    [[nodiscard]] explicit EvalMode(Module& module);
    ~EvalMode();
    EvalMode(const EvalMode&) = delete;
    EvalMode& operator=(const EvalMode&) = delete;

private:
    std::vector<std::pair<Module*, bool>> modes_;
};

/// A tensor made into a parameter: a leaf that collects gradients.
Tensor parameter(const Tensor& initial);

/// Throws Error when the module is of a type derived from `type`: a copy as that type would lose what it adds.
void check_type(const Module& module, const std::type_info& type);

/// A copy of a module with parameters and buffers of its own. Throws Error when it is of a type derived from M.
template <std::copyable M>
requires std::derived_from<M, Module> M clone(const M& module) {
    check_type(module, typeid(M));
    M copy = module;
    detach_copies(copy);
    return copy;
}
/// Gives a module its own copies of all tensors that it shares with others. What clone() is made of.
void detach_copies(Module& module);

/// The modules as a tree, one a line with the shapes of its own parameters and buffers, and the number of parameters.
std::string to_string(const Module& module);
std::ostream& operator<<(std::ostream& stream, const Module& module);

}  // namespace potluck::nn
