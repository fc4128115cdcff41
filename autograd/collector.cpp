#include "autograd/collector.h"

#include <mutex>
#include <utility>

#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/support.h"
#include "core/backend.h"
#include "core/format.h"

namespace potluck {

namespace {

/// Whether an addition in place is right: nobody else sees the memory, and every element has a place of its own.
bool may_change(const Tensor& x) { return x.is_unique() && !detail::overlaps_itself(x); }

/// Takes the gradient out of its node, which then has none, if `accepts` says so. Nobody else can see it from then on.
template <class Accepts>
Tensor take(Node& node, const Accepts& accepts) {
    const std::lock_guard lock(node.gradient_mutex);
    if (!node.gradient.defined() || !accepts(node.gradient)) return {};
    return std::exchange(node.gradient, Tensor());
}

/// Whether `x` is fit to be somebody's grad(): it shares no memory, holds no larger block, and lies in order.
bool stands_alone(const Tensor& x) {
    return x.is_unique() && x.is_contiguous() && x.storage()->bytes() == x.bytes();
}

}  // namespace

// ---- collecting ----

bool Collector::has_sum(const Collected& item) const {
    const auto stored = [&] {
        const std::lock_guard lock(item.node->gradient_mutex);
        return item.node->gradient.defined();
    };
    return item.gradient.defined() || ((item.direct || may_continue(item)) && stored());
}

bool Collector::may_continue(const Collected& item) const {
    return to_leaves_ && !create_graph_ && item.node->depth == 0 && item.node->hooks.empty();
}

/// The leaf's grad() becomes the place where this run adds, when that is safe and nobody watches.
void Collector::continue_stored(Collected& item) const {
    if (item.gradient.defined() || item.buffered || !may_continue(item)) return;
    item.gradient = take(*item.node, [&](const Tensor& stored) {
        return stored.dtype() == item.dtype && stands_alone(stored);
    });
    item.continues_stored = item.gradient.defined();
}

void Collector::add(const char* op, Collected& item, const Tensor& given) const {
    if (!given.defined())
        throw Error(op, "its backward gave an undefined gradient. Leave the call out instead.");
    const Node& node = *item.node;
    if (!(given.device() == node.device))
        throw Error(op, fmt::format("its backward gave a gradient on {} for an input on {}.", given.device(),
                                    node.device));
    const bool wider = item.dtype == DType::f32 && is_half(given.dtype());
    Tensor gradient = detail::sum_to_shape(op, given, node.shape, wider ? DType::f32 : given.dtype());
    if (item.direct) return add_to_buffer(item, gradient);
    continue_stored(item);
    Tensor& sum = item.gradient;
    if (create_graph_) {
        gradient = to(gradient, item.dtype);
        sum = sum.defined() ? sum + gradient : gradient;
    } else if (!sum.defined()) {
        gradient = detail::cast(gradient, item.dtype);
        sum = gradient.node() == nullptr ? gradient : gradient.detach();
    } else if (may_change(sum)) {
        detail::add_into(gradient, sum);
    } else {
        Tensor fresh = Tensor::empty(node.shape, {item.dtype, node.device});
        backend(node.device).binary(BinaryOp::add, sum, detail::cast(gradient, item.dtype), fresh);
        sum = fresh;
    }
}

Gradients::Destination Collector::destination(Collected& item) const {
    if (item.direct) {
        const bool holds_sum = open_buffer(item);
        return {item.gradient, holds_sum};
    }
    continue_stored(item);
    Tensor& sum = item.gradient;
    if (!sum.defined()) {
        sum = Tensor::empty(item.node->shape, {item.dtype, item.node->device});
        return {sum, false};
    }
    if (!(sum.is_contiguous() && sum.is_unique())) sum = detail::copy_of(sum);
    return {sum, true};
}

// ---- leaves with a buffer ----

/// Makes the leaf's grad() show its buffer. Returns whether there is a sum in it already.
bool Collector::open_buffer(Collected& item) {
    Node& node = *item.node;
    const std::lock_guard lock(node.gradient_mutex);
    const bool holds_sum = node.gradient.defined();
    if (!holds_sum) {
        node.gradient = node.gradient_buffer.detach();
        item.appeared = true;
    }
    item.gradient = node.gradient;
    node.gradient.storage()->bump_version();
    return holds_sum;
}

void Collector::add_to_buffer(Collected& item, const Tensor& gradient) {
    const bool holds_sum = open_buffer(item);
    if (holds_sum)
        detail::add_into(gradient, item.gradient);
    else
        detail::copy_into(gradient, item.gradient);
}

// ---- handing out ----

void Collector::finish_leaf(Collected& item, Tensor gradient) const {
    if (item.buffered && !item.direct) {
        add_to_buffer(item, gradient);
        gradient = std::exchange(item.gradient, Tensor());
    } else if (!item.buffered) {
        // What can be added now is, so that the two need not live side by side.
        if (join_stored(item, gradient)) {
            gradient = put(*item.node, std::exchange(item.stored, Tensor()));
        } else {
            item.result = std::move(gradient);
            if (item.node->accumulated_hooks.empty()) return;  // it appears with the others
            prepare_result(item);
            gradient = publish(item);
        }
    }
    const std::vector<AccumulatedHook> hooks = item.node->accumulated_hooks;
    for (const AccumulatedHook& hook : hooks) hook(gradient);
}

/// Adds to the leaf's grad() in place, where that is safe: then item.stored is the sum.
bool Collector::join_stored(Collected& item, const Tensor& gradient) const {
    if (create_graph_ || item.continues_stored) return false;
    Node& node = *item.node;
    item.stored =
        take(node, [](const Tensor& stored) { return may_change(stored) && !is_half(stored.dtype()); });
    if (!item.stored.defined()) return false;
    detail::add_into(gradient, item.stored);
    return true;
}

void Collector::prepare_result(Collected& item) const {
    // There is an old one where somebody holds it, or where a backward within this one has left one.
    if (to_leaves_) item.stored = take(*item.node, [](const Tensor&) { return true; });
    if (item.stored.defined()) {
        item.result = sum_of(item.stored, item.result);
    } else if (!item.continues_stored && !stands_alone(item.result)) {
        item.result = create_graph_ ? clone(item.result) : detail::copy_of(item.result);
    }
}

Tensor Collector::publish(Collected& item) const {
    item.appeared = !item.continues_stored && !item.stored.defined();
    item.continues_stored = false;
    item.stored = Tensor();
    return put(*item.node, std::exchange(item.result, Tensor()));
}

/// Adds `sum` to the gradient of a node, and returns what it is then.
Tensor Collector::put(Node& node, Tensor sum) const {
    for (;;) {
        Tensor other;
        {
            const std::lock_guard lock(node.gradient_mutex);
            std::swap(node.gradient, other);
            if (!other.defined()) {
                node.gradient = sum;
                return sum;
            }
        }
        sum = sum_of(other, sum);
    }
}

/// In fresh memory: somebody else may hold the old one. Half types are added in f32, whatever the number of backwards.
Tensor Collector::sum_of(const Tensor& old, const Tensor& gradient) const {
    const bool widens = is_half(old.dtype());
    if (create_graph_)
        return to(old, widens ? DType::f32 : promote(old.dtype(), gradient.dtype())) + gradient;
    Tensor sum = widens ? detail::cast(old, DType::f32) : detail::copy_of(old);
    detail::add_into(gradient, sum);
    return sum;
}

void Collector::restore(Collected& item) {
    Tensor back = std::move(item.stored);
    if (item.continues_stored) back = std::move(item.result.defined() ? item.result : item.gradient);
    if (!item.appeared && !back.defined()) return;
    const std::lock_guard lock(item.node->gradient_mutex);
    if (item.appeared || !item.node->gradient.defined()) std::swap(item.node->gradient, back);
}

}  // namespace potluck
