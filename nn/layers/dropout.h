#pragma once

#include <string>

#include "autograd/ops/dropout.h"
#include "nn/module.h"

namespace potluck::nn {

/// In training, sets elements to zero with probability p and scales the others by 1 / (1 - p); after eval() the
/// identity.
class Dropout : public Module {
public:
    double p;

    /// Throws Error for p outside [0, 1].
    explicit Dropout(double p = 0.1) : p(p) {
        if (!(p >= 0.0 && p <= 1.0)) {
            throw Error("dropout", "p is " + std::to_string(p) + ". A probability lies in [0, 1].");
        }
    }

    Tensor forward(const Tensor& x) override {
        const RandomSiteScope site(random_site());
        return dropout(x, p, is_training());
    }
    std::string describe() const override { return "Dropout(" + std::to_string(p) + ")"; }
};

}  // namespace potluck::nn
