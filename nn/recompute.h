#pragma once

#include <string>
#include <utility>
#include <vector>

#include "autograd/recompute.h"
#include "core/error.h"
#include "nn/module.h"

namespace potluck::nn {

/// recompute() of a region that uses `owner`: backward throws Error when the module was moved or has ended by then, or was
/// switched between training and evaluation.
template <class Region>
Tensor recompute_in(const Module& owner, Region region, const std::vector<Tensor>& inputs) {
    return potluck::recompute(
        [presence = owner.presence(), module = &owner, training = owner.is_training(),
         region = std::move(region)](const std::vector<Tensor>& in) {
            if (presence.expired())
                throw Error(
                    "recompute",
                    "the module whose layers are to be computed again was moved, or has ended. Let it stay "
                    "until backward() is done.");
            if (module->is_training() != training)
                throw Error("recompute",
                            "the module was switched between train() and eval() since its forward pass, so "
                            "that its layers "
                            "would do something else. Call backward() before.");
            return region(in);
        },
        inputs);
}

}  // namespace potluck::nn
