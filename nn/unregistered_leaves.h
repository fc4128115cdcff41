#pragma once

#include <string>
#include <vector>

#include "core/tensor.h"
#include "nn/module.h"

namespace potluck::nn {

/// A leaf that would get a gradient from a loss.
struct UnregisteredLeaf {
    std::string op;  // an op that uses it
    Shape shape;
    DType dtype;
};

/// The leaves that would get a gradient from `loss` but belong to no member of the module: members() forgot their
/// layers, so no optimizer trains them, no file stores them and to() does not move them. Each is listed once, with the
/// first op that uses it. Call this before backward(), which frees the tape.
///
/// The Trainer looks at its first update. A loop of one's own asks once, since an optimizer sees no graph:
///
///     Tensor loss = cross_entropy(net(x), y);
///     if (first && !nn::unregistered_leaves(loss, net).empty()) ...  // members() forgot a layer
///     loss.backward();
std::vector<UnregisteredLeaf> unregistered_leaves(const Tensor& loss, const Module& module);

}  // namespace potluck::nn
