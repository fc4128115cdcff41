#include "nn/clip.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

double largest_gradient(const std::vector<Tensor>& parameters) {
    double largest = 0.0;
    for (const Tensor& parameter : parameters) {
        const Tensor gradient = parameter.grad();
        if (!gradient.defined()) continue;
        const double magnitude = backend(gradient.device()).largest_magnitude(gradient);
        if (std::isnan(magnitude)) return magnitude;
        largest = std::max(largest, magnitude);
    }
    return largest;
}

/// Sum of squares of gradients, each first multiplied by `scale`.
double sum_of_squares(const std::vector<Tensor>& parameters, double scale) {
    double sum = 0.0;
    for (const Tensor& parameter : parameters) {
        const Tensor gradient = parameter.grad();
        if (!gradient.defined()) continue;
        sum += backend(gradient.device()).sum_of_squares(scale == 1.0 ? gradient : gradient.detach() * scale);
    }
    return sum;
}

double euclidean_norm(const std::vector<Tensor>& parameters) {
    const double sum = sum_of_squares(parameters, 1.0);
    if (std::isfinite(sum)) return std::sqrt(sum);
    // Either a gradient is not finite, or squares of f64 gradients overflow: then they are scaled down first.
    const double largest = largest_gradient(parameters);
    if (!std::isfinite(largest)) return std::isnan(sum) ? sum : largest;
    return largest * std::sqrt(sum_of_squares(parameters, 1.0 / largest));
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
            if (!std::isfinite(largest_gradient({parameters[i]}))) {
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
        const auto is_same = [&](const Tensor& other) { return other.is_same(gradient); };
        if (!gradient.defined() || std::any_of(scaled.begin(), scaled.end(), is_same)) continue;
        gradient.mul_(max_norm / norm);
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
    for (const Tensor& parameter : parameters) {
        const Tensor gradient = parameter.grad();
        if (gradient.defined()) total += sum(abs(gradient)).item<double>();
    }
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
        if (!std::isfinite(largest_gradient({parameter}))) return name;
    }
    return {};
}

}  // namespace potluck
