#pragma once

#include <vector>

#include "core/options.h"
#include "nn/optim/optimizer.h"

namespace potluck::optim {

struct SGDOptions {
    double learning_rate = 0.01;
    double momentum = 0.0;  // weight of the previous velocity
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
    explicit SGD(const nn::Module& module, const SGDOptions& options = {});
    explicit SGD(const std::vector<nn::NamedTensor>& parameters, const SGDOptions& options = {});
    explicit SGD(const std::vector<ParameterSlice>& parameters, const SGDOptions& options = {});
    template <std::size_t N>
    SGD(const nn::Module&, MistypedOptions<N>, Refused<"no such option: see SGDOptions", N> = {});
    template <std::size_t N>
    SGD(const std::vector<nn::NamedTensor>&, MistypedOptions<N>,
        Refused<"no such option: see SGDOptions", N> = {});
    template <std::size_t N>
    SGD(const std::vector<ParameterSlice>&, MistypedOptions<N>,
        Refused<"no such option: see SGDOptions", N> = {});

private:
    static Kind kind_of(const SGDOptions& options);
    void update(const UpdateGroup& group) override;

    SGDOptions options_;
};

}  // namespace potluck::optim
