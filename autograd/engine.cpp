// The second and third stage of a backward (engine.h): the ops go back, and the gradients appear.

#include <utility>

#include "autograd/anomaly.h"
#include "autograd/autocast.h"
#include "autograd/engine.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/support.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

thread_local const Engine::Running* Engine::Running::innermost = nullptr;

Engine::Running::Running(const Node& node) : node_(node), outer_(std::exchange(innermost, this)) {}
Engine::Running::~Running() { innermost = outer_; }

bool Engine::Running::has(const Node& node) {
    const Running* one = innermost;
    while (one != nullptr && &one->node_ != &node) one = one->outer_;
    return one != nullptr;
}

/// Receives the gradients of one node's inputs.
class Engine::InputGradients final : public Gradients {
public:
    InputGradients(Engine& engine, const Node& node) : engine_(engine), node_(node) {}

    bool wants(std::size_t index) const override {
        check(index);
        return node_.inputs[index] != nullptr && item(index).needed;
    }
    void add(std::size_t index, const Tensor& gradient) override {
        if (wants(index)) engine_.collector_.add(node_.name, item(index), gradient);
    }
    DType dtype(std::size_t index) const override {
        check(index);
        return node_.inputs[index] != nullptr ? item(index).dtype : DType::f32;
    }
    bool collected(std::size_t index) const override {
        return wants(index) && engine_.collector_.has_sum(item(index));
    }
    Destination destination(std::size_t index) override {
        if (!wants(index)) throw Error(node_.name, fmt::format("input {} wants no gradient.", index));
        if (engine_.create_graph_)
            throw Error(node_.name,
                        "this backward adds to gradients in place, which create_graph cannot record. "
                        "Use add() when is_grad_enabled().");
        return engine_.collector_.destination(item(index));
    }
    Tensor buffer(std::size_t index) override {
        Destination sum = destination(index);
        if (!sum.accumulate) detail::fill_with(0, sum.memory);
        return sum.memory;
    }

private:
    void check(std::size_t index) const {
        if (index >= node_.inputs.size())
            throw Error(node_.name, fmt::format("the backward asked for input {}, but the op has {}.", index,
                                                node_.inputs.size()));
    }
    Item& item(std::size_t index) const { return engine_.item_of(*node_.inputs[index]); }

    Engine& engine_;
    const Node& node_;
};

// ---- run ----

void Engine::run(const Tensor& root, const Tensor& gradient) {
    const OpScope scope("backward");
    const GradMode mode(create_graph_);
    const Autocast off(DType::f32);  // each op goes back in the dtypes in which it went forward
    if (!item_of(*root_).needed) return;
    seed(root, gradient);
    for (Item& item : items_)
        if (item.needed && !item.finished) run_node(item);
}

void Engine::seed(const Tensor& root, const Tensor& gradient) {
    Tensor start = gradient;
    if (!start.defined()) {
        if (root.count() != 1)
            throw Error(caller_,
                        fmt::format("the tensor has shape {}. Reduce it to one element (sum(), mean()), or "
                                    "give the gradient in the options.",
                                    pretty(root.shape())));
        start = ones(root.shape(), {root.dtype(), root.device()});
    }
    if (start.shape() != root.shape() || !(start.device() == root.device()) || !is_floating(start.dtype()))
        throw Error(caller_,
                    fmt::format("the gradient given is {} {} on {}, but the tensor is {} {} on {}. Shape and "
                                "device must agree, and the dtype must be floating.",
                                start.dtype(), pretty(start.shape()), start.device(), root.dtype(),
                                pretty(root.shape()), root.device()));
    collector_.add(caller_, item_of(*root_), start);
}

void Engine::run_node(Item& item) {
    Node& node = *item.node;
    Tensor dy = finish(item);
    if (!item.runs) return;
    if (dy.defined()) {
        if (is_freed(node))
            throw Error(
                caller_,
                fmt::format("a backward within this one (in a hook) has freed op '{}' before its turn. Pass "
                            "retain_graph = true to the inner one, or compute its tensor apart.",
                            node.name));
        const OpScope scope(node.name);
        InputGradients dx(*this, node);
        node.saved.freed_after_use_ = !keep_graph_;
        {
            const AnomalyCheck inside(false);  // the error must name the op, not the ops of its backward
            const std::uint64_t version = dy.storage()->version();
            const Running running(node);
            node.backward(node.saved, dy, dx);
            if (dy.storage()->version() != version)
                throw Error(node.name,
                            "its backward changed dy in place, which others may see. Change a clone().");
        }
        node.saved.forget_unpacked();
        if (AnomalyCheck::is_on()) check_gradients(node, dy);
    }
    dy = Tensor();
    // A hook may run a backward that frees this node: its remaining inputs are then finished when their turn comes.
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
        if (node.inputs[i] == nullptr || !item_of(*node.inputs[i]).needed) continue;
        Item& behind = item_of(*node.inputs[i]);
        // A leaf is finished immediately, so that its hooks run as early as possible.
        if (--behind.consumers == 0 && behind.node->depth == 0) (void)finish(behind);
    }
    if (!keep_graph_) free_node(node);
}

Tensor Engine::finish(Item& item) {
    item.finished = true;
    Tensor gradient = std::move(item.gradient);
    item.gradient = Tensor();
    if (!gradient.defined()) return gradient;
    Node& node = *item.node;
    if (item.summed_wider) {
        item.dtype = node.dtype;
        gradient = create_graph_ ? to(gradient, item.dtype) : detail::cast(gradient, item.dtype);
    }
    if (!item.direct) gradient = run_hooks(item, gradient);
    if (to_leaves_ && node.depth == 0) {
        collector_.finish_leaf(item, std::move(gradient));
        return {};
    }
    if (item.target) item.result = gradient;
    return gradient;
}

Tensor Engine::run_hooks(const Item& item, Tensor gradient) const {
    const std::vector<GradientHook> hooks = item.node->hooks;  // a copy: a hook may add hooks
    for (const GradientHook& hook : hooks) {
        const std::uint64_t version = gradient.storage()->version();
        const Tensor other = hook(gradient);
        if (gradient.storage()->version() != version)
            throw Error(caller_, fmt::format("a hook of '{}' changed the gradient in place, which other "
                                             "branches may see. Return a changed tensor instead: "
                                             "`return gradient * 2;`.",
                                             item.node->name));
        if (other.defined()) gradient = checked(item, other);
    }
    return gradient;
}

Tensor Engine::checked(const Item& item, const Tensor& gradient) const {
    const Node& node = *item.node;
    if (gradient.shape() != node.shape || !(gradient.device() == node.device) ||
        !is_floating(gradient.dtype()))
        throw Error(
            caller_,
            fmt::format("a hook of '{}' returned {} {} on {} for a gradient of {} {} on {}. Shape and "
                        "device must agree, and the dtype must be floating.",
                        node.name, gradient.dtype(), pretty(gradient.shape()), gradient.device(), item.dtype,
                        pretty(node.shape), node.device));
    return create_graph_ ? to(gradient, item.dtype) : detail::cast(gradient, item.dtype).detach();
}

void Engine::check_gradients(const Node& node, const Tensor& dy) {
    for (std::size_t i = 0; i < node.inputs.size(); ++i)
        if (node.inputs[i] != nullptr && item_of(*node.inputs[i]).gradient.defined())
            detail::check_backward(node.name, i, item_of(*node.inputs[i]).gradient, dy);
}

void Engine::free_node(Node& node) {
    node.saved.freed_ = true;
    node.saved.slots_.clear();
    node.inputs.clear();
    node.hooks.clear();
    node.backward = nullptr;
}

// ---- commit ----

void Engine::commit() {
    const OpScope scope("backward");
    const GradMode mode(create_graph_);
    const Autocast off(DType::f32);
    // Everything that may fail comes first, so that either all gradients become visible or none.
    for (Item& item : items_)
        if (item.result.defined()) collector_.prepare_result(item);
    if (!to_leaves_) return;
    for (Item& item : items_)
        if (item.result.defined()) (void)collector_.publish(item);
    for (Item& item : items_) item.appeared = false;
}

Tensor Engine::result_of(const Node& node) const {
    const auto found = index_.find(&node);
    return found == index_.end() ? Tensor() : items_[found->second].result;
}

}  // namespace potluck
