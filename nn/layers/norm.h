#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "autograd/ops/norm.h"
#include "core/factories.h"
#include "nn/module.h"

namespace potluck::nn {

/// The weight of a norm layer. Throws Error(op, ...) when the layer was moved from: the op would silently use no
/// weight.
inline const Tensor& present(const char* op, const Tensor& weight) {
    if (!weight.defined()) throw Error(op, "the layer has no weight: it was moved from.");
    return weight;
}

/// layer_norm() over the last axis with trainable weight (initially 1) and bias (initially 0).
class LayerNorm : public Module {
public:
    Tensor weight, bias;
    double epsilon;

    /// Throws Error when width is below 1 or epsilon is negative.
    explicit LayerNorm(std::int64_t width, double epsilon = 1e-5) : epsilon(epsilon) {
        if (width < 1 || !(epsilon >= 0.0)) {
            throw Error("layer_norm", "width must be at least 1 and epsilon at least 0: they are " +
                                          std::to_string(width) + " and " + std::to_string(epsilon) + ".");
        }
        weight = parameter(ones({width}));
        bias = parameter(zeros({width}));
    }

    void members(Members& m) override { m("weight", weight)("bias", bias); }
    Tensor forward(const Tensor& x) override {
        return layer_norm(x, present("layer_norm", weight), bias, epsilon);
    }
    /// (x + residual, forward(x + residual)), with less memory traffic.
    std::pair<Tensor, Tensor> add_and_norm(const Tensor& x, const Tensor& residual) {
        return add_layer_norm(x, residual, present("layer_norm", weight), bias, epsilon);
    }
    std::string describe() const override { return "LayerNorm(" + std::to_string(weight.count()) + ")"; }
};

/// rms_norm() over the last axis with a trainable weight (initially 1).
class RMSNorm : public Module {
public:
    Tensor weight;
    double epsilon;

    /// Throws Error when width is below 1 or epsilon is negative.
    explicit RMSNorm(std::int64_t width, double epsilon = 1e-6) : epsilon(epsilon) {
        if (width < 1 || !(epsilon >= 0.0)) {
            throw Error("rms_norm", "width must be at least 1 and epsilon at least 0: they are " +
                                        std::to_string(width) + " and " + std::to_string(epsilon) + ".");
        }
        weight = parameter(ones({width}));
    }

    void members(Members& m) override { m("weight", weight); }
    Tensor forward(const Tensor& x) override { return rms_norm(x, present("rms_norm", weight), epsilon); }
    /// (x + residual, forward(x + residual)), with less memory traffic.
    std::pair<Tensor, Tensor> add_and_norm(const Tensor& x, const Tensor& residual) {
        return add_rms_norm(x, residual, present("rms_norm", weight), epsilon);
    }
    std::string describe() const override { return "RMSNorm(" + std::to_string(weight.count()) + ")"; }
};

}  // namespace potluck::nn
