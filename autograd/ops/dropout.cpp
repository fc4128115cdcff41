#include "autograd/ops/dropout.h"

#include "autograd/ops/dropout_numbers.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace detail {

Tensor dropout_by_numbers(const Tensor& x, double p, const MaskNumbers& numbers) {
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).dropout(numbers.key, numbers.part, p, x, y);
    // Dropout multiplies by a mask, and its gradient is the same product.
    return record("dropout", y, {x}, {}, [p, numbers](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, dropout_by_numbers(dy, p, numbers));
    });
}

}  // namespace detail

Tensor dropout(const Tensor& x, double p, bool training, Generator* generator) {
    const OpScope scope("dropout");
    detail::require_defined("dropout", x, "x");
    detail::require_floating("dropout", x, "x");
    if (!(p >= 0.0 && p <= 1.0))
        throw Error("dropout", fmt::format("p is {}, but a probability in [0, 1] is needed.", p));
    if (!training || p == 0.0) return x;
    return detail::dropout_by_numbers(x, p, take_mask_numbers(x.shape(), x.device(), generator));
}

}  // namespace potluck
