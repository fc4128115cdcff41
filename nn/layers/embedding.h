#pragma once

#include <cstdint>
#include <string>

#include "autograd/ops/embedding.h"
#include "core/factories.h"
#include "nn/init.h"
#include "nn/module.h"

namespace potluck::nn {

/// A table of `rows` vectors: ids (..) to (.., width). weight (rows, width) is initialised from a normal distribution
/// with the given standard deviation (0 leaves zeros, for a model that initialises its parameters itself).
class Embedding : public Module {
public:
    Tensor weight;

    /// Throws Error when a size is below 1.
    Embedding(std::int64_t rows, std::int64_t width, double std = 1.0) {
        if (rows < 1 || width < 1) {
            throw Error("embedding", "sizes must be at least 1: rows is " + std::to_string(rows) +
                                         ", width is " + std::to_string(width) + ".");
        }
        weight = parameter(zeros({rows, width}));
        if (std != 0.0) init::normal(weight, 0.0, std);
    }

    void members(Members& m) override { m("weight", weight); }
    Tensor forward(const Tensor& ids) override { return embedding(weight, ids); }
    std::string describe() const override {
        return "Embedding(" + std::to_string(weight.size(0)) + ", " + std::to_string(weight.size(1)) + ")";
    }
};

}  // namespace potluck::nn
