#include "autograd/ops/copy.h"

#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/async_copy.h"
#include "core/backend.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// The gradient of a copy: add() converts it to the dtype of the input.
void pass_on(const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); }

/// A copy of `x` on another device. Copies between two GPUs do not wait for the host.
Tensor moved(const Tensor& given, Device device) {
    const Tensor x = detail::as_contiguous(given);
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), device});
    if (x.count() == 0) return y;
    if (x.device().is_cpu()) {
        backend(device).copy_from_host(y.raw_data(), x.raw_data(), x.bytes());
    } else if (device.is_cpu()) {
        backend(x.device()).copy_to_host(y.raw_data(), x.raw_data(), x.bytes());
    } else {
        copy_async(x, y, StreamKind::compute).wait_on(StreamKind::compute);
    }
    return y;
}

}  // namespace

Tensor clone(const Tensor& x) {
    const OpScope scope("clone");
    detail::require_defined("clone", x, "the operand");
    return record("clone", detail::copy_of(x), {x}, {}, pass_on);
}

Tensor contiguous(const Tensor& x) {
    const OpScope scope("contiguous");
    detail::require_defined("contiguous", x, "the operand");
    return x.is_contiguous() ? x : record("contiguous", detail::copy_of(x), {x}, {}, pass_on);
}

Tensor to(const Tensor& x, DType dtype) {
    const OpScope scope("to");
    detail::require_defined("to", x, "the operand");
    return x.dtype() == dtype ? x : record("to", detail::cast(x, dtype), {x}, {}, pass_on);
}

Tensor to(const Tensor& x, Device device) {
    const OpScope scope("to");
    detail::require_defined("to", x, "the operand");
    if (x.device() == device) return x;
    backend(device);  // throws when the build has no such device
    return record(
        "to", moved(x, device), {x}, {},
        [from = x.device()](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, to(dy, from)); });
}

// ---- shorthands ----

Tensor Tensor::to(DType dtype) const { return potluck::to(*this, dtype); }
Tensor Tensor::to(Device device) const { return potluck::to(*this, device); }
Tensor Tensor::contiguous() const { return potluck::contiguous(*this); }
Tensor Tensor::clone() const { return potluck::clone(*this); }

}  // namespace potluck
