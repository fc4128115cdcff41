#include "nn/optim/sgd.h"

#include "core/backend.h"
#include "core/format.h"
#include "nn/optim/options.h"

namespace potluck::optim {
namespace {

const SGDOptions& checked(const SGDOptions& options) {
    check_share("sgd", "momentum", options.momentum);
    if (!(options.dampening >= 0.0 && options.dampening <= 1.0)) {
        throw Error("sgd", fmt::format("dampening is {}. It must lie in [0, 1].", options.dampening));
    }
    if (options.nesterov && (options.momentum == 0.0 || options.dampening != 0.0)) {
        throw Error("sgd", "nesterov needs momentum above 0 and no dampening.");
    }
    return options;
}

}  // namespace

SGD::SGD(const nn::Module& module, const SGDOptions& options)
    : Optimizer(kind_of(options), module, common_options(options)), options_(checked(options)) {}
SGD::SGD(const std::vector<nn::NamedTensor>& parameters, const SGDOptions& options)
    : SGD(slices_of(parameters), options) {}
SGD::SGD(const std::vector<ParameterSlice>& parameters, const SGDOptions& options)
    : Optimizer(kind_of(options), parameters, common_options(options)), options_(checked(options)) {}

Optimizer::Kind SGD::kind_of(const SGDOptions& options) {
    return {.op = "sgd",
            .moment_names =
                options.momentum == 0.0 ? std::vector<std::string>{} : std::vector<std::string>{"momentum"},
            .writes_rounded = true,
            .takes_control = true};
}

void SGD::update(const UpdateGroup& group) {
    const SgdSpec step{.learning_rate = group.learning_rate,
                       .momentum = options_.momentum,
                       .dampening = options_.dampening,
                       .weight_decay = group.weight_decay,
                       .nesterov = options_.nesterov,
                       .step = group.step,
                       .stochastic_rounding = options_.stochastic_rounding};
    std::vector<UpdateTensors> tensors = tensors_of(group);
    backend(group.device).sgd(step, tensors, group.control_or_none);
}

}  // namespace potluck::optim
