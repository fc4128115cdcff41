#include "autograd/tape.h"

#include <algorithm>

#include "autograd/anomaly.h"
#include "autograd/ops/support.h"
#include "core/backend.h"
#include "core/format.h"

namespace potluck {

// ---- Saved ----

const Saved::Slot& Saved::checked_slot(std::size_t index) const {
    if (freed_)
        throw Error(owner_->name,
                    "what was saved for backward has been freed by an earlier backward(). Pass retain_graph "
                    "= true to "
                    "the earlier one.");
    if (index >= slots_.size())
        throw Error(owner_->name,
                    fmt::format("saved tensor {} was asked for, but only {} were given to record().", index,
                                slots_.size()));
    const Slot& slot = slots_[index];
    if (slot.tensor.defined() && slot.tensor.storage()->version() != slot.version)
        throw Error(
            owner_->name,
            fmt::format(
                "a value saved for backward was changed in place since: {} {} {} is at version {}, but "
                "version {} was saved. Change it before it is used, or change a clone().",
                slot.is_output ? "the result" : "an operand", slot.tensor.dtype(),
                pretty(slot.tensor.shape()), slot.tensor.storage()->version(), slot.version));
    return slot;
}

Tensor Saved::operator[](std::size_t index) const {
    const Slot& slot = checked_slot(index);
    if (!slot.is_output || !is_grad_enabled()) return slot.tensor;
    // For second derivatives the result needs its place on the tape again.
    Tensor output = slot.tensor.detach();
    output.set_node(owner_->shared_from_this());
    return output;
}

Tensor Saved::reusable(std::size_t index) const {
    const Slot& slot = checked_slot(index);
    const bool safe = freed_after_use_ && slot.tensor.defined() && slot.tensor.is_unique() &&
                      slot.tensor.storage()->owns_memory() && !detail::overlaps_itself(slot.tensor);
    return safe ? slot.tensor : Tensor();
}

std::vector<const Storage*> Saved::storages() const {
    std::vector<const Storage*> found;
    for (const Slot& slot : slots_) {
        if (!slot.tensor.defined()) continue;
        const Storage* storage = slot.tensor.storage().get();
        if (std::find(found.begin(), found.end(), storage) == found.end()) found.push_back(storage);
    }
    return found;
}

std::int64_t Saved::bytes() const {
    std::int64_t total = 0;
    for (const Storage* storage : storages()) total += storage->bytes();
    return total;
}

// ---- Node ----

namespace {

/// What a dying node leaves behind. Destroying an entry may destroy a node, which adds its own remains here instead of
/// destroying them: so the depth of the graph never becomes depth of the stack.
struct Remains {
    std::vector<std::shared_ptr<Node>> nodes;
    std::vector<Tensor> tensors;

    void drain() {
        while (!nodes.empty() || !tensors.empty()) {
            if (!nodes.empty()) {
                const std::shared_ptr<Node> node = std::move(nodes.back());
                nodes.pop_back();
            } else {
                const Tensor tensor = std::move(tensors.back());
                tensors.pop_back();
            }
        }
    }
};

// A plain pointer, so that it may be used at any time of a thread's end.
thread_local Remains* open_remains = nullptr;

}  // namespace

Node::~Node() {
    Remains mine;
    Remains& remains = open_remains != nullptr ? *open_remains : mine;
    for (std::shared_ptr<Node>& input : inputs)
        if (input != nullptr) remains.nodes.push_back(std::move(input));
    for (Saved::Slot& slot : saved.slots_)
        if (slot.tensor.defined() && slot.tensor.node() != nullptr)
            remains.tensors.push_back(std::move(slot.tensor));
    if (gradient.defined() && gradient.node() != nullptr) remains.tensors.push_back(std::move(gradient));
    if (open_remains == nullptr) {
        open_remains = &mine;
        mine.drain();
        open_remains = nullptr;
    }
}

// ---- recording ----

Tensor record(const char* name, const Tensor& output, std::vector<Tensor> inputs, std::vector<Tensor> saved,
              BackwardFunction backward) {
    if (AnomalyCheck::is_on()) detail::check_forward(name, output, inputs);
    if (!is_grad_enabled() || !is_floating(output.dtype())) return output;
    const bool wanted = std::any_of(inputs.begin(), inputs.end(), [](const Tensor& input) {
        return input.defined() && input.node() != nullptr;
    });
    if (!wanted) return output;
    if (output.node() != nullptr)
        throw Error(
            name,
            "the result given to record() is already on the tape. Give a fresh tensor or a detach()ed one.");

    if (!backward) throw Error(name, "record() was given no backward. Give a function.");

    auto node = std::make_shared<Node>();
    node->name = name;
    node->shape = output.shape();
    node->dtype = output.dtype();
    node->device = output.device();
    node->backward = std::move(backward);
    node->inputs.reserve(inputs.size());
    for (const Tensor& input : inputs) {
        node->inputs.push_back(input.defined() ? input.node() : nullptr);
        if (node->inputs.back() != nullptr)
            node->depth = std::max(node->depth, node->inputs.back()->depth + 1);
    }
    node->saved.owner_ = node.get();
    node->saved.slots_.reserve(saved.size());
    for (Tensor& tensor : saved) {
        Saved::Slot slot;
        slot.is_output = tensor.defined() && tensor.is_same(output);
        slot.tensor = slot.is_output ? tensor.detach() : std::move(tensor);
        if (slot.tensor.defined()) slot.version = slot.tensor.storage()->version();
        node->saved.slots_.push_back(std::move(slot));
    }
    output.set_node(std::move(node));
    return output;
}

void add_gradient_hook(const Tensor& tensor, GradientHook hook) {
    if (tensor.node() == nullptr)
        throw Error(
            "add_gradient_hook",
            "the tensor needs no gradient, so the hook would never run. Call set_requires_grad() first.");
    if (!hook) throw Error("add_gradient_hook", "the hook is empty. Give a function.");
    tensor.node()->hooks.push_back(std::move(hook));
}

void retain_gradient(const Tensor& tensor) {
    if (tensor.node() == nullptr)
        throw Error("retain_gradient",
                    "the tensor needs no gradient. Call set_requires_grad() on what it is made from.");
    tensor.node()->retains_gradient = true;
}

// ---- members of Tensor ----

bool Tensor::requires_grad() const { return node() != nullptr; }

Tensor& Tensor::set_requires_grad(bool requires_grad) {
    if (requires_grad == this->requires_grad()) return *this;
    if (!requires_grad) {
        if (node()->depth > 0)
            throw Error(
                "set_requires_grad",
                fmt::format(
                    "the tensor is the result of '{}', not a leaf. Use detach() to cut it off the tape.",
                    node()->name));
        set_node(nullptr);
        return *this;
    }
    if (!is_floating(dtype()))
        throw Error("set_requires_grad",
                    fmt::format("only floating tensors have gradients, this one is {} {}. Convert it with "
                                ".to(DType::f32).",
                                dtype(), pretty(shape())));
    auto leaf = std::make_shared<Node>();
    leaf->shape = shape();
    leaf->dtype = dtype();
    leaf->device = device();
    set_node(std::move(leaf));
    return *this;
}

Tensor Tensor::grad() const { return node() == nullptr ? Tensor() : node()->gradient; }

void Tensor::set_grad(const Tensor& gradient) {
    if (!gradient.defined()) {
        if (node() != nullptr) node()->gradient = Tensor();
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
    node()->gradient = gradient;
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
    }
}

void Tensor::backward() const { potluck::backward(*this); }

}  // namespace potluck
