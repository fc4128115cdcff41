#pragma once

#include <functional>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// `region(inputs)`, of which nothing is kept for backward but the inputs: when backward comes to it, the region is computed
/// again (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Loss and gradients have the same bits as
/// without.
///
///     x = recompute([&](const Tensor& in) { return block(in); }, x);
///
/// The second time it runs with what the first time had: the precision of Autocast, the random numbers (dropout draws the
/// same masks, and the generators stand afterwards where they stood), and recording. It ends as soon as it has what backward
/// needs, so the last op is mostly not computed again. Running statistics of batch norm are updated once; any other side
/// effect of a region happens twice, and whatever it reads besides its inputs must not change in between (parameters that
/// did are found, as ever). Regions nest. Inputs may need no gradient and be of any dtype: the parameters inside get theirs.
/// Under NoGrad it is a plain call.
///
/// `region` lives as long as the graph: what it captures by reference must, too. backward() and gradients() throw Error
/// inside a region, where nothing is kept for them. Backward throws Error when an input was
/// changed in place since, or when the region does something else the second time.
Tensor recompute(const std::function<Tensor(const std::vector<Tensor>& inputs)>& region,
                 const std::vector<Tensor>& inputs);
Tensor recompute(std::function<Tensor(const Tensor& input)> region, const Tensor& input);

namespace detail {

/// Whether this thread computes a region that is to be computed again, or computes it again.
bool is_in_region() noexcept;

/// What runs while it lives is being computed again.
class RecomputingScope {
public:
    RecomputingScope() noexcept;
    ~RecomputingScope();
    RecomputingScope(const RecomputingScope&) = delete;
    RecomputingScope& operator=(const RecomputingScope&) = delete;

private:
    bool outer_;
};

}  // namespace detail

/// Whether a region is being computed again in this thread: what it counted the first time is not to be counted twice.
bool is_recomputing() noexcept;

}  // namespace potluck
