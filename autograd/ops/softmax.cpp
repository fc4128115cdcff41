#include "autograd/ops/softmax.h"

#include "autograd/autocast.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Along the last axis.
Tensor softmax_last(const char* name, bool logarithm, const Tensor& given) {
    const Tensor x = detail::autocast_wide(detail::as_floating(given));
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).softmax(x, logarithm, y);
    return record(name, y, {given}, {y}, [logarithm](const Saved& saved, const Tensor& dy, Gradients& dx) {
        const Tensor y = saved[0];
        if (!is_grad_enabled()) {
            Tensor fused = Tensor::empty(y.shape(), {y.dtype(), y.device()});
            backend(y.device()).softmax_backward(y, dy, logarithm, fused);
            dx.add(0, fused);
        } else if (logarithm) {
            dx.add(0, dy - exp(y) * sum(dy, {-1}, /*keep_axes=*/true));
        } else {
            dx.add(0, y * (dy - sum(dy * y, {-1}, /*keep_axes=*/true)));
        }
    });
}

Tensor along(const char* name, bool logarithm, const Tensor& x, std::int64_t axis) {
    const OpScope scope(name);
    detail::require_defined(name, x, "x");
    detail::require_rank(name, x, "x", 1);
    axis = normalize_axis(name, axis, x.ndim());
    if (axis == x.ndim() - 1) return softmax_last(name, logarithm, x);
    return transpose(softmax_last(name, logarithm, transpose(x, axis, -1)), axis, -1);
}

}  // namespace

Tensor softmax(const Tensor& x, std::int64_t axis) { return along("softmax", false, x, axis); }
Tensor log_softmax(const Tensor& x, std::int64_t axis) { return along("log_softmax", true, x, axis); }

}  // namespace potluck
