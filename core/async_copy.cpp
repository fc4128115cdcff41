#include "core/async_copy.h"

#include <utility>

#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

void check(const Tensor& from, const Tensor& to) {
    const char* const op = "copy_async";
    if (!from.defined() || !to.defined())
        throw Error(op, fmt::format("{} is an undefined tensor. Make one with Tensor::empty().",
                                    from.defined() ? "the target" : "the source"));
    if (from.shape() != to.shape() || from.dtype() != to.dtype())
        throw Error(op, fmt::format("the source is {} of {}, the target {} of {}. Make them alike.",
                                    pretty(from.shape()), from.dtype(), pretty(to.shape()), to.dtype()));
    for (const Tensor& side : {from, to})
        if (!side.is_contiguous())
            throw Error(op, fmt::format("strides {} of shape {} are not row-major. Call contiguous() on the "
                                        "source, or take a target without gaps.",
                                        pretty(side.strides()), pretty(side.shape())));
    if (from.storage() == to.storage() && from.offset() < to.offset() + to.count() &&
        to.offset() < from.offset() + from.count())
        throw Error(op, "source and target overlap. Give memory of its own to one.");
}

}  // namespace

void CopyHandle::wait() {
    if (work_ != nullptr) work_->wait();
    *this = CopyHandle();
}

void CopyHandle::wait_on(StreamKind stream) const {
    if (work_ == nullptr) return;
    work_->block(from_.device(), stream);
    if (to_.device() != from_.device()) work_->block(to_.device(), stream);
}

CopyHandle copy_async(const Tensor& from, const Tensor& to, StreamKind stream) {
    const OpScope scope("copy_async");
    check(from, to);
    CopyHandle handle;
    if (from.count() == 0) return handle;
    to.storage()->bump_version();
    Tensor target = to.detach();
    const Device starter = from.device().is_cpu() ? to.device() : from.device();
    handle.work_ = backend(starter).start_copy(from, target, stream);
    if (handle.work_ == nullptr) return handle;
    from.storage()->keep_until(handle.work_);
    to.storage()->keep_until(handle.work_);
    handle.from_ = from;
    handle.to_ = to;
    return handle;
}

}  // namespace potluck
