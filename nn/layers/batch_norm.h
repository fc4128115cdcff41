#pragma once

#include <cstdint>
#include <string>

#include "autograd/grad_mode.h"
#include "autograd/ops/batch_norm.h"
#include "autograd/recompute.h"
#include "core/factories.h"
#include "core/options.h"
#include "nn/module.h"

namespace potluck::nn {

struct BatchNormOptions {
    double epsilon = 1e-5;
    double momentum = 0.1;  // weight of each batch in the running statistics
    bool affine = true;     // trainable weight (initially 1) and bias (initially 0)
};

/// batch_norm() of x (batch, channels, ..) with 2 to 5 axes. Training uses the statistics of the batch and updates the
/// running ones; after eval() the running ones are used. State dict names are those of PyTorch's layers; the running
/// statistics are f32 buffers, which keep their dtype in to(dtype).
class BatchNorm : public Module {
public:
    Tensor weight, bias;
    Tensor running_mean, running_var;  // (channels); initially 0 and 1
    Tensor num_batches_tracked;        // number of batches in them: i64, 0-dimensional
    double epsilon, momentum;

    /// Throws Error when channels is below 1, epsilon negative or momentum outside [0, 1].
    explicit BatchNorm(std::int64_t channels, BatchNormOptions options = {})
        : epsilon(options.epsilon), momentum(options.momentum) {
        if (channels < 1 || !(epsilon >= 0.0) || !(momentum >= 0.0 && momentum <= 1.0)) {
            throw Error("batch_norm",
                        "channels must be at least 1, epsilon at least 0 and momentum in [0, 1]: "
                        "they are " +
                            std::to_string(channels) + ", " + std::to_string(epsilon) + " and " +
                            std::to_string(momentum) + ".");
        }
        if (options.affine) {
            weight = parameter(ones({channels}));
            bias = parameter(zeros({channels}));
        }
        running_mean = zeros({channels});
        running_var = ones({channels});
        num_batches_tracked = zeros({}, {DType::i64});
    }
    template <std::size_t N>
    BatchNorm(std::int64_t, MistypedOptions<N>, Refused<"no such option: see BatchNormOptions", N> = {});

    void members(Members& m) override {
        m("weight", weight)("bias", bias)
            .buffer("running_mean", running_mean)
            .buffer("running_var", running_var)
            .buffer("num_batches_tracked", num_batches_tracked);
    }
    Tensor forward(const Tensor& x) override {
        const Tensor y =
            batch_norm(x, weight, bias, running_mean, running_var, {is_training(), momentum, epsilon});
        if (is_training() && !is_recomputing()) {
            const NoGrad guard;
            num_batches_tracked.add_(ones({}, {DType::i64, num_batches_tracked.device()}));
        }
        return y;
    }
    std::string describe() const override {
        return "BatchNorm(" + std::to_string(running_mean.count()) +
               (weight.defined() ? ")" : ", no weight)");
    }
};

}  // namespace potluck::nn
