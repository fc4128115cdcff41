#pragma once

#include <vector>

#include "core/options.h"
#include "nn/optim/optimizer.h"

namespace potluck::optim {

struct AdamWOptions {
    double learning_rate = 1e-3;
    double beta1 = 0.9, beta2 = 0.999;  // decay rates of the moments
    double epsilon = 1e-8;
    double weight_decay = 0.01;
    bool decoupled = true;  // false adds weight_decay * parameter to the gradient: Adam with L2
    std::vector<ParameterGroup> groups = {};
    bool stochastic_rounding = false;  // bf16 parameters have no master copy: see Optimizer
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), with bias
/// correction by each parameter's own update count.
class AdamW final : public Optimizer {
public:
    /// Throws Error for options out of range and for a group that matches no parameter.
    explicit AdamW(const nn::Module& module, const AdamWOptions& options = {});
    explicit AdamW(const std::vector<nn::NamedTensor>& parameters, const AdamWOptions& options = {});
    explicit AdamW(const std::vector<ParameterSlice>& parameters, const AdamWOptions& options = {});
    template <std::size_t N>
    AdamW(const nn::Module&, MistypedOptions<N>, Refused<"no such option: see AdamWOptions", N> = {});
    template <std::size_t N>
    AdamW(const std::vector<nn::NamedTensor>&, MistypedOptions<N>,
          Refused<"no such option: see AdamWOptions", N> = {});
    template <std::size_t N>
    AdamW(const std::vector<ParameterSlice>&, MistypedOptions<N>,
          Refused<"no such option: see AdamWOptions", N> = {});

private:
    static Kind kind_of(const AdamWOptions& options);
    void update(const UpdateGroup& group) override;

    AdamWOptions options_;
};

}  // namespace potluck::optim
