#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel_specs.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/update_control.h"
#include "nn/module.h"

namespace potluck::optim {

/// Parameters with their own settings, selected by their full names.
struct ParameterGroup {
    std::string pattern;                      // * matches any text, ? one character: "*.bias", "h.0.*"
    double learning_rate_factor = 1.0;        // multiplies the optimizer's learning rate; 0 freezes
    std::optional<double> weight_decay = {};  // replaces the optimizer's, for parameters of any rank
};

/// The part of a parameter that this process updates: all of its elements, some, or none. Whatever depends on the whole
/// parameter (weight decay, stochastic rounding, names) does not depend on how it is divided.
class ParameterSlice {
public:
    /// The whole parameter.
    explicit ParameterSlice(const nn::NamedTensor& parameter);
    /// Elements begin, begin + 1, ... (row-major) of a parameter of shape `whole`: as many as `elements` has. Throws
    /// Error when they exceed it.
    ParameterSlice(std::string name, Tensor elements, Shape whole, std::int64_t begin);

    const std::string& name() const { return name_; }
    const Tensor& elements() const { return elements_; }
    const Shape& whole() const { return whole_; }
    std::int64_t begin() const { return begin_; }

private:
    std::string name_;
    Tensor elements_;
    Shape whole_;
    std::int64_t begin_;
};

/// The base of optimizers: changes parameters by their gradients.
///
/// Weight decay is applied to parameters with two axes or more; biases and the weights of norms are left alone, unless a
/// group says otherwise. A parameter that matches several groups belongs to the first of them.
///
/// The same elements given twice (two names of one tensor, a view of it) are one parameter, with the first of the names
/// and the sum of their gradients. Views that share only some elements are an Error.
///
/// Parameters of f16 and bf16 (and those whose elements are not contiguous) keep a master copy in f32, which is what is
/// updated: steps too small for the half type still add up. With `stochastic_rounding` contiguous bf16 parameters have no
/// master (4 bytes a parameter less): they are rounded up or down at random, so that small steps add up in the mean. The
/// random numbers are those of the device's default generator, whose state belongs to a checkpoint. State belongs to
/// names, never to positions, and follows the parameters when their module is moved or converted by to().
///
/// An optimizer that was made from a module looks, at every step, whether these are still the module's parameters, and
/// throws Error with the names of those that are not: a layer that was replaced since would never be trained. (Not once the
/// module itself was moved from or has ended; and not when it was made from a list, which may be a part on purpose.) It
/// cannot see what members() of the module forgot: see nn::unregistered_leaves().
class Optimizer {
public:
    virtual ~Optimizer() = default;
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// Updates every parameter that has a gradient. Throws Error when there are elements to update but no gradients.
    void step();
    /// Starts an update with the numbers of `control` (its learning rate, gradient scale, and whether to skip), without
    /// waiting for them. When they have been read, report the outcome to finish_step().
    ///
    /// Such an update may be recorded (core/capture.h) once the optimizer state exists: run one update before.
    /// Throws Error when control and optimizer have different update counts.
    void step(const UpdateControl& control);
    /// Counts the last update that step(control) started, or that the replay of a recording of it made, when it was
    /// applied (UpdateNumbers::skip was 0). Throws Error when none was started that could have been applied.
    void finish_step(bool applied);
    /// Drops the gradients.
    void zero_grad();
    /// The existing gradients, that of each parameter once: those that the gradient norm is computed from.
    std::vector<Tensor> gradients() const;

    double learning_rate() const { return learning_rate_; }
    /// Throws Error when it is negative or not finite.
    void set_learning_rate(double learning_rate);
    /// Number of updates so far.
    std::int64_t steps() const { return steps_; }
    /// Bytes of moments and master copies once every parameter that collects gradients had an update, whether it had one yet
    /// or not.
    std::int64_t state_bytes() const;
    /// What is updated in this process: each parameter once.
    std::vector<ParameterSlice> slices() const;

    /// Everything that the next update depends on besides parameters, gradients and options: for each parameter its
    /// update count, moments and master copy, called "first_moment/name" and so on, each with the shape of the elements
    /// in this process; and the learning rate. The tensors themselves, not copies.
    nn::StateDict state_dict() const;
    /// Continues from a state. One Error lists all names that are missing or unknown, all shapes that differ and all
    /// invalid numbers (negative counts, moments that are not finite); then nothing is changed.
    void load_state_dict(const nn::StateDict& state);
    /// Throws the Error that load_state_dict() would, and changes nothing.
    void check_state_dict(const nn::StateDict& state) const;
    /// Makes the state of a training in other dtypes fit the dtypes here. `weights` are the parameters that were saved with
    /// it, by name. A master that is needed here and was not then becomes the weights as they were saved, before anybody
    /// rounds them. One that is not needed here takes the place of the weights that were rounded from it. What fits already
    /// stays as it is, and so does what cannot be made to fit, which load_state_dict() will refuse.
    void exchange_masters(nn::StateDict& state, nn::StateDict& weights) const;

protected:
    /// A parameter with its optimizer state.
    struct Slot {
        std::string name;
        std::vector<std::string> other_names = {};
        Tensor parameter;
        std::vector<Tensor> aliases = {};  // other tensors with the same elements
        Shape whole;
        std::int64_t begin = 0;            // position of the first of these elements in the whole
        Tensor master = {};                // undefined when the parameter itself is updated
        std::vector<Tensor> moments = {};  // in the order of moment_names; created at the first update
        double learning_rate_factor = 1.0;
        double weight_decay = 0.0;
        std::int64_t steps = 0;     // updates so far
        std::uint64_t version = 0;  // of the parameter's storage, after the last update
    };

    /// The tensors of one parameter's update, all contiguous.
    struct Update {
        Slot* slot;
        Tensor weights;          // the parameter or its master copy; see Kind::writes_rounded
        Tensor gradient;         // of any floating dtype
        Tensor rounded_or_none;  // the half-type parameter that gets the rounded master
        RandomKey
            rounding_key;  // when a bf16 parameter itself is updated: number slot->begin + i of the sequence
                           // decides element i
    };
    /// Updates that differ only in their tensors: one kernel call on the device.
    struct UpdateGroup {
        Device device;
        double learning_rate,
            weight_decay;  // with a control, the learning rate is a factor of the control's
        std::int64_t
            step;  // 1 for the first update of these parameters; with a control, to be added to its steps
        Tensor control_or_none;
        std::vector<Update> updates;
    };

    /// The properties of a kind of optimizer.
    struct Kind {
        const char* op;                              // its name in errors: a string literal
        std::vector<std::string> moment_names = {};  // a tensor of zeros for each at the first update
        /// update() does all rounding: it writes rounded_or_none, and rounds bf16 weights at random by rounding_key. Else
        /// the base class does it afterwards, and with stochastic rounding `weights` is a copy in f32.
        bool writes_rounded = false;
        bool takes_control =
            false;  // update() passes control_or_none to the kernels; else step(control) waits for
                    // the numbers and gives update() a scaled gradient and a rate
    };
    /// The options that all kinds share.
    struct Options {
        double learning_rate, weight_decay;
        std::vector<ParameterGroup> groups = {};
        bool stochastic_rounding = false;
    };
    /// Extracts them from the options of one kind.
    template <class KindOptions>
    static Options common_options(const KindOptions& options) {
        return {options.learning_rate, options.weight_decay, options.groups, options.stochastic_rounding};
    }
    /// The tensors of a group as the kernels of devices take them, with up to two moments.
    static std::vector<UpdateTensors> tensors_of(const UpdateGroup& group);
    static std::vector<ParameterSlice> slices_of(const std::vector<nn::NamedTensor>& parameters) {
        return {parameters.begin(), parameters.end()};
    }

    /// Throws Error for options out of range, for a group that matches no parameter, and for parameters that cannot be
    /// updated: not floating, expanded, or partly overlapping another.
    Optimizer(Kind kind, const std::vector<ParameterSlice>& parameters, const Options& options);
    /// All parameters of a module, which later steps check.
    Optimizer(Kind kind, const nn::Module& module, const Options& options);

    /// Updates all weights of a group in place, and their rounded copies if Kind says so.
    virtual void update(const UpdateGroup& group) = 0;

private:
    /// What load_state_dict() stores in a slot: tensors of the state, in the order of parts_of().
    struct Loaded {
        std::int64_t steps = 0;
        std::vector<Tensor> parts = {};
    };

    std::vector<Loaded> fitting_parts(const nn::StateDict& state) const;
    std::string other_kind(const nn::StateDict& state) const;
    void add_slot(const ParameterSlice& parameter);
    void choose_groups(const Options& options);
    void check_module() const;
    bool needs_master(const Tensor& parameter) const;
    bool is_fit(const Slot& slot) const;
    Slot fitted(const Slot& slot) const;
    void prepare(Slot& slot) const;
    void refresh_master(Slot& slot) const;
    std::vector<RandomKey> rounding_keys() const;
    std::vector<UpdateGroup> update_groups(const UpdateControl* control, const UpdateNumbers* numbers);
    void run(const UpdateControl* control, const UpdateNumbers* numbers);
    void apply(const UpdateGroup& group);
    bool rounds_afterwards(const Tensor& parameter) const;
    void round_at_random(const Update& update) const;
    std::vector<std::string> parts_of(const Slot& slot, std::int64_t steps) const;
    static Tensor newest(const Tensor& master, const Tensor& weights);

    Kind kind_;
    std::vector<Slot> slots_;
    std::vector<std::size_t> started_;  // the slots that the last update started
    bool is_started_ = false;           // whether there was one, and it did not fail
    double learning_rate_;
    bool stochastic_rounding_;
    std::int64_t steps_ = 0;
    const nn::Module* module_ = nullptr;
    std::weak_ptr<const void> module_presence_;
};

/// Whether a name matches a pattern in which * stands for any text and ? for one character.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace potluck::optim
