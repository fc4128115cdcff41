#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "nn/module.h"

namespace potluck::optim {

/// Parameters that are treated differently, chosen by their full names.
struct ParameterGroup {
    std::string pattern;                      // * stands for any text, ? for one character: "*.bias", "h.0.*"
    double learning_rate_factor = 1.0;        // of the optimizer's learning rate; 0 freezes
    std::optional<double> weight_decay = {};  // in place of the optimizer's, for parameters of any rank
};

/// The base of optimizers: changes parameters by their gradients.
///
/// Weight decay is applied to parameters with two axes or more; biases and the weights of norms are left alone, unless a
/// group says otherwise. A parameter that matches several groups belongs to the first of them.
///
/// Parameters of f16 and bf16 (and those whose elements are not contiguous) keep a master copy in f32, which is what is
/// updated: steps too small for the half type still add up. With `stochastic_rounding` contiguous bf16 parameters have no
/// master (4 bytes a parameter less): they are rounded up or down at random, so that small steps add up in the mean. The
/// random numbers are those of the device's default generator, whose state belongs to a checkpoint. State belongs to
/// names, never to positions.
class Optimizer {
public:
    virtual ~Optimizer() = default;
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// One update of every parameter that has a gradient. Throws Error when none has: then backward() did not run, or
    /// the module was moved by to() after this optimizer was made.
    void step();
    /// Drops the gradients.
    void zero_grad();

    double learning_rate() const { return learning_rate_; }
    /// Throws Error when it is negative or not finite.
    void set_learning_rate(double learning_rate);
    /// Updates so far.
    std::int64_t steps() const { return steps_; }

    /// Everything that the next update depends on besides parameters, gradients and options: per parameter its number of
    /// updates, moments and master copy, called "first_moment/name" and so on; and the learning rate. The tensors
    /// themselves, not copies.
    nn::StateDict state_dict() const;
    /// Goes on from a state. One Error lists all names that are missing or unknown and all shapes that differ, and then
    /// nothing was changed.
    void load_state_dict(const nn::StateDict& state);

protected:
    /// A parameter with what the optimizer knows about it.
    struct Slot {
        std::string name;
        Tensor parameter;
        Tensor master;                // undefined when the parameter itself is updated
        std::vector<Tensor> moments;  // in the order of moment_names(); made at the first update
        double learning_rate_factor = 1.0;
        double weight_decay = 0.0;
        std::int64_t steps = 0;     // updates so far
        std::uint64_t version = 0;  // of the parameter's storage after the last update
    };

    /// What the update of one parameter works on, all contiguous.
    struct Update {
        Slot* slot;
        Tensor weights;          // the parameter or its master copy
        Tensor gradient;         // of any floating dtype
        Tensor rounded_or_none;  // the half-type parameter that gets the rounded master
        RandomKey rounding_key;  // when a bf16 parameter itself is updated
    };
    /// Updates that differ in nothing but their tensors: one call of the device's kernel.
    struct Batch {
        Device device;
        double learning_rate, weight_decay;
        std::int64_t step;  // 1 for the first update of these parameters
        std::vector<Update> updates;
    };

    Optimizer(const char* op, const std::vector<nn::NamedTensor>& parameters, double learning_rate,
              double weight_decay, const std::vector<ParameterGroup>& groups,
              std::vector<std::string> moment_names, bool stochastic_rounding);

    /// Updates all weights of a batch, and their rounded copies, in place.
    virtual void update(const Batch& batch) = 0;

private:
    bool needs_master(const Tensor& parameter) const;
    void prepare(Slot& slot) const;
    void refresh_master(Slot& slot) const;
    std::vector<Batch> batches();
    void apply(const Batch& batch);
    std::vector<std::string> parts_of(const Slot& slot, std::int64_t steps) const;

    const char* op_;
    std::vector<Slot> slots_;
    std::vector<std::string> moment_names_;
    double learning_rate_;
    bool stochastic_rounding_;
    std::int64_t steps_ = 0;
};

struct SGDOptions {
    double learning_rate = 0.01;
    double momentum = 0.0;  // share of the last step that is kept
    double dampening = 0.0;
    double weight_decay = 0.0;
    bool nesterov = false;
    std::vector<ParameterGroup> groups = {};
    bool stochastic_rounding = false;  // bf16 parameters have no master copy: see Optimizer
};

/// Stochastic gradient descent: velocity = momentum * velocity + (1 - dampening) * gradient (the gradient alone at the
/// first update), then parameter -= learning_rate * velocity. Weight decay adds weight_decay * parameter to the gradient.
class SGD final : public Optimizer {
public:
    /// Throws Error for options out of range and for a group that matches no parameter.
    explicit SGD(const nn::Module& module, const SGDOptions& options = {})
        : SGD(module.named_parameters(), options) {}
    explicit SGD(const std::vector<nn::NamedTensor>& parameters, const SGDOptions& options = {});

private:
    void update(const Batch& batch) override;

    SGDOptions options_;
};

struct AdamWOptions {
    double learning_rate = 1e-3;
    double beta1 = 0.9, beta2 = 0.999;  // how slowly the moments forget
    double epsilon = 1e-8;
    double weight_decay = 0.01;
    bool decoupled = true;  // false adds weight_decay * parameter to the gradient: Adam with L2
    std::vector<ParameterGroup> groups = {};
    bool stochastic_rounding = false;  // bf16 parameters have no master copy: see Optimizer
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), with bias
/// correction by each parameter's own number of updates.
class AdamW final : public Optimizer {
public:
    /// Throws Error for options out of range and for a group that matches no parameter.
    explicit AdamW(const nn::Module& module, const AdamWOptions& options = {})
        : AdamW(module.named_parameters(), options) {}
    explicit AdamW(const std::vector<nn::NamedTensor>& parameters, const AdamWOptions& options = {});

private:
    void update(const Batch& batch) override;

    AdamWOptions options_;
};

/// Whether a name fits a pattern in which * stands for any text and ? for one character.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace potluck::optim
