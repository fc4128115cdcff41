#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace potluck {

struct GradcheckOptions {
    double step = 1e-6;      // of the central difference
    double absolute = 1e-6;  // tolerance
    double relative = 1e-4;
};

/// Compares the gradients of `function` (its output, of any shape, is contracted with fixed random numbers) with
/// central differences in f64, for every element of every input that requires a gradient. Returns an empty text when
/// they agree, else a line that names input, element and both values. Throws Error when an input is not f64.
std::string gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& function,
                      const std::vector<Tensor>& inputs, const GradcheckOptions& options = {});

}  // namespace potluck
