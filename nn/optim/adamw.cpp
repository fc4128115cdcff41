#include "nn/optim/adamw.h"

#include <cmath>

#include "core/backend.h"
#include "core/format.h"
#include "nn/optim/options.h"

namespace potluck::optim {
namespace {

const AdamWOptions& checked(const AdamWOptions& options) {
    check_share("adamw", "beta1", options.beta1);
    check_share("adamw", "beta2", options.beta2);
    if (!(options.epsilon >= 0.0) || std::isinf(options.epsilon)) {
        throw Error("adamw",
                    fmt::format("epsilon is {}. It must be finite and not negative.", options.epsilon));
    }
    return options;
}

}  // namespace

AdamW::AdamW(const nn::Module& module, const AdamWOptions& options)
    : Optimizer(kind_of(options), module, common_options(options)), options_(checked(options)) {}
AdamW::AdamW(const std::vector<nn::NamedTensor>& parameters, const AdamWOptions& options)
    : AdamW(slices_of(parameters), options) {}
AdamW::AdamW(const std::vector<ParameterSlice>& parameters, const AdamWOptions& options)
    : Optimizer(kind_of(options), parameters, common_options(options)), options_(checked(options)) {}

Optimizer::Kind AdamW::kind_of(const AdamWOptions&) {
    return {.op = "adamw",
            .moment_names = {"first_moment", "second_moment"},
            .writes_rounded = true,
            .takes_control = true};
}

void AdamW::update(const UpdateGroup& group) {
    const AdamWSpec step{.learning_rate = group.learning_rate,
                         .beta1 = options_.beta1,
                         .beta2 = options_.beta2,
                         .epsilon = options_.epsilon,
                         .weight_decay = group.weight_decay,
                         .step = group.step,
                         .decoupled = options_.decoupled,
                         .stochastic_rounding = options_.stochastic_rounding};
    std::vector<UpdateTensors> tensors = tensors_of(group);
    backend(group.device).adamw(step, tensors, group.control_or_none);
}

}  // namespace potluck::optim
