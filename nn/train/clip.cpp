#include "nn/train/clip.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "core/format.h"
#include "core/measure.h"
#include "core/op_scope.h"
#include "nn/optim/same_elements.h"

namespace potluck {
namespace {

/// Tensors of the same elements, which are one parameter with the sum of their gradients. A second handle of a tensor, and
/// a tensor that was given the gradient of another one, adds nothing to it.
struct Parameter {
    Tensor tensor;
    std::vector<Tensor> aliases = {};

    bool has_gradient(const Tensor& gradient) const {
        const auto is_this = [&](const Tensor& one) {
            return optim::sharing_of(one.grad(), gradient) == optim::Sharing::all;
        };
        return is_this(tensor) || std::any_of(aliases.begin(), aliases.end(), is_this);
    }
};

/// The parameters that have a gradient, each once.
std::vector<Parameter> distinct(std::span<const Tensor> parameters) {
    std::vector<Parameter> kept;
    for (const Tensor& tensor : parameters) {
        if (!tensor.grad().defined()) continue;
        const auto is_this = [&](const Parameter& other) {
            return optim::sharing_of(other.tensor, tensor) == optim::Sharing::all;
        };
        const auto known = std::find_if(kept.begin(), kept.end(), is_this);
        if (known == kept.end())
            kept.push_back({tensor});
        else if (!known->has_gradient(tensor.grad()))
            known->aliases.push_back(tensor);
    }
    return kept;
}

/// The gradients of these parameters, grouped by device: each device is queried once.
struct DeviceGradients {
    Device device;
    std::vector<Tensor> gradients;
};
std::vector<DeviceGradients> gradients_of(std::span<const Tensor> parameters) {
    std::vector<DeviceGradients> groups;
    for (const Parameter& parameter : distinct(parameters)) {
        const Tensor gradient = optim::gradient_of(parameter.tensor, parameter.aliases);
        auto group = std::find_if(groups.begin(), groups.end(),
                                  [&](const auto& one) { return one.device == gradient.device(); });
        if (group == groups.end()) {
            groups.push_back({gradient.device(), {}});
            group = groups.end() - 1;
        }
        group->gradients.push_back(gradient);
    }
    return groups;
}

double largest_gradient(std::span<const Tensor> parameters) {
    double largest = 0.0;
    for (const auto& [device, gradients] : gradients_of(parameters)) {
        const double magnitude = largest_magnitude(gradients);
        if (std::isnan(magnitude)) return magnitude;
        largest = std::max(largest, magnitude);
    }
    return largest;
}

double euclidean_norm(const std::vector<Tensor>& parameters) {
    SquareSums sums;
    for (const auto& [device, gradients] : gradients_of(parameters)) sums = sums + sum_of_squares(gradients);
    return norm_of(sums, [](double x) { return std::sqrt(x); });
}

/// x *= factor, rounded once: the factor is not rounded to a half type.
void scale(const Tensor& x, double factor) {
    if (size_of(x.dtype()) >= 4) {
        x.mul_(factor);
        return;
    }
    const Tensor wide = x.to(DType::f32);
    wide.mul_(factor);
    x.copy_(wide);
}

double clip(const std::vector<Tensor>& parameters, const std::vector<std::string>& names, double max_norm,
            double p) {
    const OpScope scope("clip_grad_norm");
    if (!(max_norm > 0.0)) {
        throw Error("clip_grad_norm", fmt::format("max_norm is {}. It must be above 0.", max_norm));
    }
    if (parameters.empty()) {
        fmt::print(stderr,
                   "[clip_grad_norm] warning: the list of parameters is empty, so nothing is clipped.\n");
        return 0.0;
    }
    const double norm = gradient_norm(parameters, p);
    if (!std::isfinite(norm)) {
        std::string culprit = "all together";
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            if (!std::isfinite(largest_gradient(std::span(&parameters[i], 1)))) {
                culprit = names.empty() ? fmt::format("parameter {}", i) : names[i];
                break;
            }
        }
        throw Error("clip_grad_norm",
                    fmt::format("the norm of the gradients is {}, because of {}. Nothing was changed: "
                                "skip this update, or lower the learning rate.",
                                norm, culprit));
    }
    if (norm <= max_norm) return norm;
    const NoGrad guard;
    std::vector<Tensor> scaled;  // two parameters may have been given the same gradient
    for (const Tensor& parameter : parameters) {
        const Tensor gradient = parameter.grad();
        const auto is_same = [&](const Tensor& other) {
            return optim::sharing_of(other, gradient) == optim::Sharing::all;
        };
        if (!gradient.defined() || std::any_of(scaled.begin(), scaled.end(), is_same)) continue;
        scale(gradient, max_norm / norm);
        scaled.push_back(gradient);
    }
    return norm;
}

}  // namespace

double gradient_norm(const std::vector<Tensor>& parameters, double p) {
    const NoGrad guard;
    if (p == 2.0) return euclidean_norm(parameters);
    if (std::isinf(p) && p > 0.0) return largest_gradient(parameters);
    if (p != 1.0) throw Error("gradient_norm", fmt::format("p is {}. It must be 1, 2 or infinity.", p));
    double total = 0.0;
    for (const auto& [device, gradients] : gradients_of(parameters))
        for (const Tensor& gradient : gradients) total += sum(abs(gradient.to(DType::f64))).item<double>();
    return total;
}

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, double p) {
    return clip(parameters, {}, max_norm, p);
}

double clip_grad_norm(const nn::Module& module, double max_norm, double p) {
    std::vector<Tensor> parameters;
    std::vector<std::string> names;
    for (const auto& [name, parameter] : module.named_parameters()) {
        parameters.push_back(parameter);
        names.push_back(name);
    }
    return clip(parameters, names, max_norm, p);
}

std::string first_non_finite_gradient(const nn::Module& module) {
    for (const auto& [name, parameter] : module.named_parameters()) {
        if (!std::isfinite(largest_gradient(std::span(&parameter, 1)))) return name;
    }
    return {};
}

}  // namespace potluck
