#pragma once

#include <string>
#include <vector>

#include "core/tensor.h"
#include "nn/module.h"

namespace potluck::nn {

/// A leaf that collects gradients for a loss.
struct ForgottenLeaf {
    std::string op;  // that uses it
    Shape shape;
    DType dtype;
};

/// The leaves that would collect gradients of `loss` and belong to no member of the module: layers that members() forgot
/// would be trained by no optimizer, saved in no file and moved to no device. Each is named once, with the first op that
/// uses it. Call it before backward(), which takes the tape apart.
///
/// The Trainer looks at its first update. A loop of one's own asks once, since an optimizer sees no graph:
///
///     Tensor loss = cross_entropy(net(x), y);
///     if (first && !nn::forgotten_leaves(loss, net).empty()) ...  // members() forgot a layer
///     loss.backward();
std::vector<ForgottenLeaf> forgotten_leaves(const Tensor& loss, const Module& module);

}  // namespace potluck::nn
