// The operations on a leaf: hooks, a gradient buffer, reading and setting the gradient, replacing the elements.

#include <mutex>

#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/copies.h"
#include "core/format.h"

namespace potluck {

namespace {

Node& leaf_of(const char* caller, const Tensor& tensor) {
    if (!tensor.defined() || tensor.node() == nullptr || tensor.node()->depth > 0)
        throw Error(caller, fmt::format("the tensor is {}, but a leaf that requires a gradient is needed: a "
                                        "tensor that set_requires_grad() was called on.",
                                        !tensor.defined() ? "undefined"
                                        : tensor.node() == nullptr
                                            ? "not on the tape"
                                            : fmt::format("the result of '{}'", tensor.node()->name)));
    return *tensor.node();
}

}  // namespace

void add_gradient_hook(const Tensor& tensor, GradientHook hook) {
    if (tensor.node() == nullptr)
        throw Error(
            "add_gradient_hook",
            "the tensor needs no gradient, so the hook would never run. Call set_requires_grad() first.");
    if (!hook) throw Error("add_gradient_hook", "the hook is empty. Give a function.");
    tensor.node()->hooks.push_back(std::move(hook));
}

void add_accumulated_hook(const Tensor& leaf, AccumulatedHook hook) {
    Node& node = leaf_of("add_accumulated_hook", leaf);
    if (!hook) throw Error("add_accumulated_hook", "the hook is empty. Give a function.");
    node.accumulated_hooks.push_back(std::move(hook));
}

void retain_gradient(const Tensor& tensor) {
    if (tensor.node() == nullptr)
        throw Error("retain_gradient",
                    "the tensor needs no gradient. Call set_requires_grad() on what it is made from.");
    tensor.node()->retains_gradient = true;
}

void set_gradient_buffer(const Tensor& leaf, const Tensor& buffer) {
    Node& node = leaf_of("set_gradient_buffer", leaf);
    if (!buffer.defined()) {
        node.gradient_buffer = Tensor();
        return;
    }
    const bool wider = is_half(node.dtype) && buffer.dtype() == DType::f32;
    if (buffer.shape() != node.shape || !(buffer.device() == node.device) || !buffer.is_contiguous() ||
        (buffer.dtype() != node.dtype && !wider))
        throw Error("set_gradient_buffer",
                    fmt::format("the buffer is {} {} on {}{}, but the leaf is {} {} on {}. Shape and device "
                                "must agree; the buffer is contiguous, of the leaf's dtype, or f32 for a "
                                "half type.",
                                buffer.dtype(), pretty(buffer.shape()), buffer.device(),
                                buffer.is_contiguous() ? "" : " (not contiguous)", node.dtype,
                                pretty(node.shape), node.device));
    if (buffer.storage() == leaf.storage())
        throw Error(
            "set_gradient_buffer",
            fmt::format("the buffer {} lies in the memory of the leaf itself, which the gradient would "
                        "overwrite. Give memory of its own, such as empty_like(leaf).",
                        pretty(buffer.shape())));
    const Tensor old = leaf.grad();
    if (old.defined() && old.node() != nullptr)
        throw Error("set_gradient_buffer",
                    "the leaf has a gradient that is on the tape. Drop it first with set_grad({}).");
    node.gradient_buffer = buffer.detach();
    if (old.defined()) {
        node.gradient = Tensor();
        Tensor(leaf).set_grad(old);
    }
}

Tensor Tensor::grad() const {
    if (node() == nullptr) return {};
    const std::lock_guard lock(node()->gradient_mutex);
    return node()->gradient;
}

void Tensor::set_grad(const Tensor& gradient) {
    if (!gradient.defined()) {
        if (node() == nullptr) return;
        Tensor dropped;  // destroyed after the mutex is unlocked: it may own a graph
        const std::lock_guard lock(node()->gradient_mutex);
        std::swap(node()->gradient, dropped);
        return;
    }
    if (node() == nullptr)
        throw Error("set_grad", "the tensor collects no gradient. Call set_requires_grad() first.");
    if (gradient.shape() != shape() || !(gradient.device() == device()) || !is_floating(gradient.dtype()))
        throw Error(
            "set_grad",
            fmt::format("the gradient is {} {} on {}, but the tensor is {} {} on {}. Shape and device "
                        "must agree, and the dtype must be floating.",
                        gradient.dtype(), pretty(gradient.shape()), gradient.device(), dtype(),
                        pretty(shape()), device()));
    Tensor now = gradient;
    if (node()->gradient_buffer.defined()) {
        now = node()->gradient_buffer.detach();
        detail::copy_into(gradient, now);
        now.storage()->bump_version();
    }
    const std::lock_guard lock(node()->gradient_mutex);
    std::swap(node()->gradient, now);
}

void Tensor::set_elements(const Tensor& elements) const {
    if (elements.shape() != shape())
        throw Error("set_elements",
                    fmt::format("the tensor is {} and the elements are {}. The shapes must agree.",
                                pretty(shape()), pretty(elements.shape())));
    const bool collects = requires_grad();
    if (collects && node()->depth > 0) set_node(nullptr);
    elements.storage()->succeed(*storage());
    Impl& own = impl();
    const Impl& other = elements.impl();
    own.storage = other.storage;
    own.strides = other.strides;
    own.offset = other.offset;
    own.dtype = other.dtype;
    own.contiguous = other.contiguous;
    if (!collects) return;
    if (node() == nullptr) {
        Tensor(*this).set_requires_grad();
    } else {
        node()->dtype = dtype();
        node()->device = device();
        storage()->mark_parameter();
        // A gradient buffer is kept if it still fits.
        const Tensor& buffer = node()->gradient_buffer;
        const bool fits = buffer.defined() && buffer.device() == device() &&
                          (buffer.dtype() == dtype() || (is_half(dtype()) && buffer.dtype() == DType::f32));
        if (!fits) node()->gradient_buffer = Tensor();
    }
}

}  // namespace potluck
