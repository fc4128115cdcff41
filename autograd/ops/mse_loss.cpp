#include "autograd/ops/mse_loss.h"

#include "autograd/autocast.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

Tensor mse_loss(const Tensor& prediction, const Tensor& target, Reduction reduction) {
    const OpScope scope("mse_loss");
    detail::require_defined("mse_loss", prediction, "the prediction");
    detail::require_defined("mse_loss", target, "the target");
    if (prediction.shape() != target.shape())
        throw Error(
            "mse_loss",
            fmt::format("the prediction {} and the target {} differ in shape. Reshape one: broadcasting "
                        "would pair every prediction with every target.",
                        pretty(prediction.shape()), pretty(target.shape())));
    const Tensor difference = detail::autocast_wide(prediction) - detail::autocast_wide(target);
    const Tensor losses = square(detail::as_floating(difference));
    switch (reduction) {
        case Reduction::none:
            return losses;
        case Reduction::sum:
            return sum(losses);
        case Reduction::mean:
            break;
    }
    return mean(losses);
}

}  // namespace potluck
