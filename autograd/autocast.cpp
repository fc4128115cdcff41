#include "autograd/autocast.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/support.h"
#include "core/capture.h"
#include "core/error.h"
#include "core/format.h"

namespace potluck {

namespace {

thread_local Autocast* innermost = nullptr;
thread_local DType half_type = DType::f32;
std::atomic<int> scaled_losses = 0;  // a scaler may be made in one thread and used in another

void warn_of_f16() {
    thread_local bool said = false;
    if (scaled_losses > 0 || !is_grad_enabled() || std::exchange(said, true)) return;
    fmt::print(
        stderr,
        "[autocast] warning: gradients below 6e-8 are 0 in f16, and no loss is scaled here. Let a LossScaler "
        "compute the gradients (scaler.backward(loss); scaler.step(optimizer);), or use bf16.\n");
}

/// The same elements in another dtype and in the same order in memory, so that a transposed weight stays one.
Tensor cast_in_memory_order(const Tensor& x, DType dtype) {
    if (x.ndim() != 2 || x.is_contiguous()) return detail::cast(x, dtype);
    const Tensor transposed = detail::transposed_alias(x);
    return transposed.is_contiguous() ? detail::transposed_alias(detail::cast(transposed, dtype))
                                      : detail::cast(x, dtype);
}

/// `values` in the place of `x` on the tape.
Tensor in_place_of(const Tensor& x, const Tensor& values) {
    if (x.node() != nullptr) values.set_node(x.node());
    return values;
}

}  // namespace

Autocast::Autocast(DType dtype) : dtype_(dtype), outer_(innermost) {
    if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
        throw Error("autocast", fmt::format("the dtype is {}. Use bf16 or f16, or f32 for none.", dtype));
    if (dtype == DType::f16) warn_of_f16();
    innermost = this;
    half_type = dtype;
}

Autocast::~Autocast() {
    // Blocks end in the opposite order, but objects on the heap need not.
    Autocast** link = &innermost;
    while (*link != nullptr && *link != this) link = &(*link)->outer_;
    if (*link == this) *link = outer_;
    half_type = innermost == nullptr ? DType::f32 : innermost->dtype_;
}

DType Autocast::dtype() noexcept { return half_type; }

Tensor Autocast::rounded(const Tensor& x) {
    if (x.storage()->is_parameter()) detail::RoundedParameters::note(x);
    // What is recorded must be rounded in each replay.
    if (!x.storage()->is_parameter() || detail::is_recording(x.device()) || detail::is_replaying(x.device()))
        return cast_in_memory_order(x, dtype_);
    if (parameters_.size() >= sweep_at_) {
        std::erase_if(parameters_, [](const auto& entry) { return entry.second.source.expired(); });
        sweep_at_ = std::max<std::size_t>(64, 2 * parameters_.size());
    }
    Rounded& kept = parameters_[{x.storage().get(), x.offset(), x.shape(), x.strides()}];
    if (kept.source.lock() != x.storage() || kept.version != x.storage()->version() ||
        kept.values.storage()->version() != kept.values_version) {
        const Tensor values = cast_in_memory_order(x, dtype_);
        kept = {x.storage(), x.storage()->version(), values, values.storage()->version()};
    }
    return kept.values.detach();
}

Tensor autocast(const Tensor& x) {
    if (half_type == DType::f32 || !x.defined() || x.dtype() != DType::f32) return x;
    Autocast* keeper = innermost;  // the outermost block of this dtype
    for (Autocast* one = innermost; one != nullptr; one = one->outer_)
        if (one->dtype_ == half_type) keeper = one;
    return in_place_of(x, keeper->rounded(x));
}

namespace detail {

Tensor autocast_wide(const Tensor& x) {
    const bool narrow = half_type != DType::f32 && x.defined() && is_half(x.dtype());
    return narrow ? in_place_of(x, cast(x, DType::f32)) : x;
}

namespace {
thread_local RoundedParameters* innermost_notes = nullptr;
}  // namespace

RoundedParameters::RoundedParameters() noexcept : outer_(innermost_notes) { innermost_notes = this; }
RoundedParameters::~RoundedParameters() { innermost_notes = outer_; }

void RoundedParameters::note(const Tensor& parameter) {
    for (RoundedParameters* notes = innermost_notes; notes != nullptr; notes = notes->outer_)
        notes->uses_.emplace_back(parameter.storage(), parameter.storage()->version());
}

LossIsScaled::LossIsScaled() noexcept { ++scaled_losses; }
LossIsScaled::~LossIsScaled() { --scaled_losses; }

}  // namespace detail

}  // namespace potluck
