#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "autograd/ops/activation.h"
#include "core/error.h"
#include "core/options.h"
#include "nn/layers/linear.h"
#include "nn/module.h"
#include "nn/recompute.h"

namespace potluck::nn {

/// down(activation(up(x))): (.., in) to (.., out) with `hidden` units, relu unless another activation is given.
class MLP : public Module {
public:
    Linear up, down;

    /// For the name of an op, including names that the C library also declares (tanh).
    MLP(std::int64_t in, std::int64_t hidden, std::int64_t out, Tensor (*activation)(const Tensor&) = relu)
        : MLP(in, hidden, out, std::function<Tensor(const Tensor&)>(activation)) {}
    /// For any other function from a tensor to a tensor.
    template <class Activation>
    requires std::constructible_from<std::function<Tensor(const Tensor&)>, Activation> MLP(
        std::int64_t in, std::int64_t hidden, std::int64_t out, Activation activation)
        : up(in, hidden), down(hidden, out), activation_(std::move(activation)) {
        if (!activation_) throw Error("mlp", "the activation is an empty function. Give one, such as relu.");
    }
    template <class Activation>
    requires(!std::constructible_from<std::function<Tensor(const Tensor&)>, Activation>)
        MLP(std::int64_t, std::int64_t, std::int64_t, Activation,
            Refused<"the activation takes one tensor: write [](const Tensor& x) { return f(x, ...); }",
                    sizeof(Activation)> = {});

    void members(Members& m) override { m("up", up)("down", down); }
    Tensor forward(const Tensor& x) override { return down(activation_(up(x))); }

private:
    std::function<Tensor(const Tensor&)> activation_;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x)) without biases (Shazeer, "GLU Variants Improve Transformer", 2020), with
/// Llama's names: (.., width) to (.., width) with `hidden` units.
class SwiGLU : public Module {
public:
    Linear gate_proj, up_proj, down_proj;

    SwiGLU(std::int64_t width, std::int64_t hidden, bool initialize = true)
        : gate_proj(width, hidden, {.bias = false, .initialize = initialize}),
          up_proj(width, hidden, {.bias = false, .initialize = initialize}),
          down_proj(hidden, width, {.bias = false, .initialize = initialize}) {}

    void members(Members& m) override {
        m("gate_proj", gate_proj)("up_proj", up_proj)("down_proj", down_proj);
    }
    Tensor forward(const Tensor& x) override {
        const auto rest = [this](const std::vector<Tensor>& in) { return down_proj(swiglu(in[0], in[1])); };
        const std::vector<Tensor> inputs{gate_proj(x), up_proj(x)};
        return recompute_ ? recompute_in(*this, rest, inputs) : rest(inputs);
    }
    /// Whether backward computes the product of gate and up again instead of keeping it.
    void set_recompute(bool recompute) { recompute_ = recompute; }

private:
    bool recompute_ = false;
};

}  // namespace potluck::nn
