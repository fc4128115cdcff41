#include "autograd/engine.h"
#include "autograd/recompute.h"
#include "core/format.h"

namespace potluck {

namespace {

/// What a region keeps for backward is not there when a backward inside of it asks for it.
void require_outside_of_regions(const char* caller) {
    if (detail::is_in_region())
        throw Error(caller,
                    "it is called inside a region of recompute(), whose tensors are not kept. Compute the "
                    "gradient outside of the region.");
}

}  // namespace

void backward(const Tensor& root, const BackwardOptions& options) {
    require_outside_of_regions("backward");
    if (!root.requires_grad())
        throw Error(
            "backward",
            fmt::format(
                "the tensor {} is not on the tape: nothing that it was computed from requires a gradient, "
                "or it was computed under NoGrad. Call set_requires_grad() on the inputs first.",
                pretty(root.shape())));
    Engine engine("backward", root, options, nullptr);
    engine.run(root, options.gradient);
    engine.commit();
}

std::vector<Tensor> gradients(const Tensor& root, const std::vector<Tensor>& inputs,
                              const BackwardOptions& options) {
    require_outside_of_regions("gradients");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].defined() || !inputs[i].requires_grad())
            throw Error(
                "gradients",
                fmt::format(
                    "input {} requires no gradient. Call set_requires_grad() on it before the tensor is "
                    "computed.",
                    i));
    }
    std::vector<Tensor> results(inputs.size());
    if (!root.requires_grad()) return results;
    Engine engine("gradients", root, options, &inputs);
    engine.run(root, options.gradient);
    engine.commit();
    for (std::size_t i = 0; i < inputs.size(); ++i) results[i] = engine.result_of(*inputs[i].node());
    return results;
}

}  // namespace potluck
