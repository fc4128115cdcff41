// In-place changes: the members of Tensor whose names end in an underscore. They are never recorded. Tensors that were
// saved for backward detect them by the version of the storage.

#include "autograd/grad_mode.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/support.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Throws Error unless the elements may be changed, and makes ready for it.
void prepare_change(const char* name, const Tensor& target) {
    detail::require_defined(name, target, "the tensor");
    if (is_grad_enabled() && target.requires_grad())
        throw Error(
            name,
            fmt::format(
                "the tensor {} is on the tape, and a change in place is not recorded: its gradient would "
                "be wrong. Compute a new tensor, or change it under NoGrad.",
                pretty(target.shape())));
    if (detail::overlaps_itself(target))
        throw Error(
            name,
            fmt::format("the tensor {} is a broadcast view: several of its elements are one place in memory. "
                        "Change a clone().",
                        pretty(target.shape())));
    target.storage()->write_after_uses();  // a copy that was started before gets the elements as they are now
}

/// The range of bytes that a tensor covers in its storage: [first, last). A negative stride extends downwards.
std::pair<std::int64_t, std::int64_t> reach(const Tensor& x) {
    std::int64_t first = x.offset();
    std::int64_t last = x.offset();
    for (std::size_t i = 0; i < x.shape().size(); ++i) {
        const std::int64_t way = (x.shape()[i] - 1) * x.strides()[i];
        (way < 0 ? first : last) += way;
    }
    return {first * size_of(x.dtype()), (last + 1) * size_of(x.dtype())};
}

/// Whether writing to `target` element by element could change elements of `source` that are read later.
bool overlap(const Tensor& target, const Tensor& source) {
    if (target.storage() != source.storage() || target.count() == 0 || source.count() == 0) return false;
    const bool same_place = target.offset() == source.offset() && target.strides() == source.strides() &&
                            target.shape() == source.shape() && target.dtype() == source.dtype();
    if (same_place) return false;
    const auto [a_first, a_last] = reach(target);
    const auto [b_first, b_last] = reach(source);
    return a_first < b_last && b_first < a_last;
}

/// `source` in the target's shape and in `dtype`, safe to read while the target is written.
Tensor operand(const char* name, const Tensor& target, const Tensor& source, DType dtype) {
    if (is_grad_enabled() && source.requires_grad())
        throw Error(
            name,
            fmt::format(
                "the other tensor {} is on the tape, and a change in place is not recorded: no gradient "
                "would reach it. detach() it, or work under NoGrad.",
                pretty(source.shape())));
    const Tensor converted = detail::cast(source, dtype);
    const Tensor safe = overlap(target, converted) ? detail::copy_of(converted) : converted;
    return safe.broadcast_alias(name, target.shape());
}

}  // namespace

const Tensor& Tensor::fill_(const Scalar& value) const {
    const OpScope scope("fill_");
    prepare_change("fill_", *this);
    require_held("fill_", value, dtype());
    Tensor target = detach();
    potluck::backend(device()).fill(target, value);
    storage()->bump_version();
    return *this;
}

const Tensor& Tensor::copy_(const Tensor& source) const {
    const OpScope scope("copy_");
    prepare_change("copy_", *this);
    detail::require_defined("copy_", source, "the other tensor");
    const Tensor from =
        operand("copy_", *this, source.device() == device() ? source : source.to(device()), source.dtype());
    Tensor target = detach();
    potluck::backend(device()).copy(from, target);
    storage()->bump_version();
    return *this;
}

const Tensor& Tensor::add_(const Tensor& other, double scale) const {
    const OpScope scope("add_");
    prepare_change("add_", *this);
    detail::require_defined("add_", other, "the other tensor");
    detail::require_same_device("add_", {*this, other});
    Tensor target = detach();
    if (is_floating(dtype())) {
        const Tensor x = operand("add_", *this, other, is_floating(other.dtype()) ? other.dtype() : dtype());
        potluck::backend(device()).add_scaled(x, scale, target);
    } else {
        if (scale != static_cast<double>(Scalar(scale).to_int64()))
            throw Error("add_",
                        fmt::format("the scale {} is no integer, but the tensor is {}.", scale, dtype()));
        const Tensor x = operand("add_", *this, other, dtype());
        potluck::backend(device()).add_scaled(x, scale, target);
    }
    storage()->bump_version();
    return *this;
}

const Tensor& Tensor::mul_(const Tensor& other) const {
    const OpScope scope("mul_");
    prepare_change("mul_", *this);
    detail::require_defined("mul_", other, "the other tensor");
    detail::require_same_device("mul_", {*this, other});
    const Tensor x = operand("mul_", *this, other, dtype());
    Tensor target = detach();
    potluck::backend(device()).binary(BinaryOp::multiply, detach(), x, target);
    storage()->bump_version();
    return *this;
}

const Tensor& Tensor::mul_(const Scalar& factor) const {
    const OpScope scope("mul_");
    prepare_change("mul_", *this);
    require_held("mul_", factor, dtype());
    Tensor target = detach();
    potluck::backend(device()).binary(BinaryOp::multiply, detach(), factor, target);
    storage()->bump_version();
    return *this;
}

}  // namespace potluck
