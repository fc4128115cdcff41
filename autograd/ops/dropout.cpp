#include "autograd/ops/dropout.h"

#include "autograd/ops/dropout_key.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace detail {

Tensor dropout_by_key(const Tensor& x, double p, RandomKey key) {
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).dropout(key, p, x, y);
    // Dropout is a product with a mask, and its gradient is the same product.
    return record("dropout", y, {x}, {}, [p, key](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, dropout_by_key(dy, p, key));
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
    Generator& numbers = generator != nullptr ? *generator : default_generator(x.device());
    return detail::dropout_by_key(x, p, numbers.take(x.count()));
}

}  // namespace potluck
