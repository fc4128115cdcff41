#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "autograd/ops/matmul.h"
#include "core/factories.h"
#include "core/options.h"
#include "nn/branch.h"
#include "nn/init.h"
#include "nn/module.h"

namespace potluck::nn {

struct LinearOptions {
    bool bias = true;
    bool initialize = true;  // false leaves zeros, for a model that initialises its parameters itself
};

/// x weight^T + bias, plus branch(x) if a branch is assigned: (.., in) to (.., out). weight (out, in), bias (out), both
/// initially uniform in +-1 / sqrt(in).
class Linear : public Module {
public:
    Tensor weight, bias;
    Branch branch;  // empty unless assigned: see Branch

    /// Throws Error when a size is below 1.
    Linear(std::int64_t in, std::int64_t out, LinearOptions options = {}) {
        if (in < 1 || out < 1) {
            throw Error("linear", "sizes must be at least 1: in is " + std::to_string(in) + ", out is " +
                                      std::to_string(out) + ".");
        }
        weight = parameter(zeros({out, in}));
        if (options.bias) bias = parameter(zeros({out}));
        if (!options.initialize) return;
        const double bound = 1.0 / std::sqrt(static_cast<double>(in));
        init::uniform(weight, -bound, bound);
        if (options.bias) init::uniform(bias, -bound, bound);
    }

    template <std::size_t N>
    Linear(std::int64_t, std::int64_t, MistypedOptions<N>,
           Refused<"no such option: see LinearOptions", N> = {});

    /// Uses the given tensors, which it shares: a layer tied to another one. Throws Error unless they are (out, in) and
    /// (out).
    explicit Linear(Tensor shared_weight, Tensor shared_bias = {})
        : weight(std::move(shared_weight)), bias(std::move(shared_bias)) {
        if (weight.ndim() != 2 || (bias.defined() && bias.shape() != Shape{weight.size(0)})) {
            throw Error("linear",
                        "weight must be (out, in) and bias (out): they are " +
                            potluck::to_string(weight.shape()) +
                            (bias.defined() ? " and " + potluck::to_string(bias.shape()) + "." : "."));
        }
    }

    void members(Members& m) override { m("weight", weight)("bias", bias)("branch", branch); }
    Tensor forward(const Tensor& x) override {
        return branch.add_to(linear(x, weight, bias), x, is_training());
    }
    std::string describe() const override {
        return "Linear(" + std::to_string(weight.size(1)) + ", " + std::to_string(weight.size(0)) +
               (bias.defined() ? ")" : ", no bias)");
    }
};

}  // namespace potluck::nn
