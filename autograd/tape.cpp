#include "autograd/tape.h"

#include <algorithm>
#include <any>

#include "autograd/anomaly.h"
#include "core/format.h"
#include "core/strides.h"

namespace potluck {

// ---- Node ----

namespace {

/// The members of destroyed nodes, still to be destroyed. Destroying an entry may destroy a node, which adds its own
/// members here instead of destroying them recursively: so a deep graph needs no deep stack.
struct Remains {
    std::vector<std::shared_ptr<Node>> nodes;
    std::vector<Tensor> tensors;
    std::vector<std::any> packed;

    void drain() {
        while (drop_last(nodes) || drop_last(tensors) || drop_last(packed)) continue;
    }
    template <class T>
    static bool drop_last(std::vector<T>& entries) {
        if (entries.empty()) return false;
        const T last = std::move(entries.back());
        entries.pop_back();
        return true;
    }
};

// A plain pointer, so that it can be used at any time during a thread's exit.
thread_local Remains* open_remains = nullptr;

}  // namespace

Node::~Node() {
    Remains mine;
    Remains& remains = open_remains != nullptr ? *open_remains : mine;
    for (std::shared_ptr<Node>& input : inputs)
        if (input != nullptr) remains.nodes.push_back(std::move(input));
    for (Saved::Slot& slot : saved.slots_) {
        if (slot.tensor.defined() && slot.tensor.node() != nullptr)
            remains.tensors.push_back(std::move(slot.tensor));
        if (slot.packed == nullptr) continue;
        remains.packed.push_back(std::move(slot.packed->content));
        if (slot.packed->node != nullptr) remains.nodes.push_back(std::move(slot.packed->node));
    }
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
    node->saved = Saved(*node, output, std::move(saved));
    output.set_node(std::move(node));
    return output;
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
    storage()->mark_parameter();
    set_node(std::move(leaf));
    return *this;
}

void Tensor::backward() const { potluck::backward(*this); }

}  // namespace potluck
