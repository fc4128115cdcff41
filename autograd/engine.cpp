// backward() and gradients(): the walk over the tape.
//
// 1. collect: all nodes behind the root, the deepest first. A node is deeper than all of its inputs, so in this order
//    every node comes after all that add to its gradient.
// 2. run: each node takes its collected gradient, calls its op's backward, which adds to the gradients of the inputs,
//    and frees what the op saved.
// 3. commit: the gradients of leaves (and of tensors that retain theirs) appear, all at once.

#include <algorithm>
#include <unordered_map>

#include "autograd/anomaly.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Whether an addition in place is right: nobody else sees the memory, and every element has a place of its own.
bool may_change(const Tensor& x) { return x.is_unique() && !detail::overlaps_itself(x); }

/// Whether `x` is fit to be somebody's grad(): it shares no memory, holds no larger block, and lies in order.
bool stands_alone(const Tensor& x) {
    return x.is_unique() && x.is_contiguous() && x.storage()->bytes() == x.bytes();
}

}  // namespace

class Engine {
public:
    /// `targets` null: leaves collect. Else: only the gradients of the targets are computed.
    Engine(const char* caller, const Tensor& root, const BackwardOptions& options,
           const std::vector<Tensor>* targets)
        : caller_(caller),
          keep_graph_(options.retain_graph || options.create_graph),
          create_graph_(options.create_graph),
          to_leaves_(targets == nullptr),
          root_(root.node()) {
        collect();
        mark(targets);
    }
    ~Engine() { restore(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void run(const Tensor& root, const Tensor& gradient) {
        const OpScope scope("backward");
        const GradMode mode(create_graph_);
        if (!item_of(*root_).needed) return;
        seed(root, gradient);
        for (Item& item : items_)
            if (item.needed && !item.finished) run_node(item);
    }

    void commit() {
        const OpScope scope("backward");
        const GradMode mode(create_graph_);
        // What can fail comes first, so that either all gradients appear or none.
        for (Item& item : items_) {
            // A backward within this one may have left a gradient where ours was taken from.
            const bool alone = item.continues_stored && !item.node->gradient.defined();
            if (item.result.defined() && !alone) prepare_result(item);
        }
        if (!to_leaves_) return;
        for (Item& item : items_) {
            if (!item.result.defined()) continue;
            item.node->gradient = std::move(item.result);
            item.continues_stored = false;
        }
    }

    /// After commit(); undefined for a node that the root does not depend on.
    Tensor result_of(const Node& node) const {
        const auto found = index_.find(&node);
        return found == index_.end() ? Tensor() : items_[found->second].result;
    }

private:
    struct Item {
        std::shared_ptr<Node> node;
        Tensor gradient = {};           // collected so far
        Tensor result = {};             // complete, and to be handed out
        std::int64_t consumers = 0;     // nodes that will still add to the gradient
        bool needed = false;            // its gradient leads to a leaf (or a target)
        bool target = false;            // its gradient is to be handed out
        bool finished = false;          // its gradient has been dealt with
        bool continues_stored = false;  // gradient (or result) was the leaf's grad() and is added to in place
    };

    /// The gradients of one node's inputs.
    class InputGradients final : public Gradients {
    public:
        InputGradients(Engine& engine, const Node& node) : engine_(engine), node_(node) {}

        bool wants(std::size_t index) const override {
            check(index);
            return node_.inputs[index] != nullptr && item(index).needed;
        }
        void add(std::size_t index, const Tensor& gradient) override {
            if (wants(index)) engine_.add(node_.name, item(index), gradient);
        }
        Tensor buffer(std::size_t index) override {
            Tensor sum = existing(index);
            if (sum.defined()) return sum;
            const Node& input = *node_.inputs[index];
            item(index).gradient = zeros(input.shape, {input.dtype, input.device});
            return item(index).gradient;
        }
        Tensor existing(std::size_t index) override {
            if (!wants(index)) throw Error(node_.name, fmt::format("input {} wants no gradient.", index));
            if (engine_.create_graph_)
                throw Error(node_.name,
                            "this backward adds to gradients in place, which create_graph cannot record. "
                            "Use add() when is_grad_enabled().");
            return engine_.own(item(index));
        }

    private:
        void check(std::size_t index) const {
            if (index >= node_.inputs.size())
                throw Error(node_.name, fmt::format("the backward asked for input {}, but the op has {}.",
                                                    index, node_.inputs.size()));
        }
        Item& item(std::size_t index) const { return engine_.item_of(*node_.inputs[index]); }

        Engine& engine_;
        const Node& node_;
    };

    Item& item_of(const Node& node) { return items_[index_.at(&node)]; }

    void collect() {
        std::vector<const std::shared_ptr<Node>*> open{&root_};
        index_.emplace(root_.get(), 0);
        items_.push_back({.node = root_});
        while (!open.empty()) {
            const std::shared_ptr<Node>& node = *open.back();
            open.pop_back();
            for (const std::shared_ptr<Node>& input : node->inputs) {
                if (input == nullptr || !index_.emplace(input.get(), 0).second) continue;
                items_.push_back({.node = input});
                open.push_back(&input);
            }
        }
        std::stable_sort(items_.begin(), items_.end(),
                         [](const Item& a, const Item& b) { return a.node->depth > b.node->depth; });
        for (std::size_t i = 0; i < items_.size(); ++i) index_[items_[i].node.get()] = i;
    }

    void mark(const std::vector<Tensor>* targets) {
        if (targets != nullptr) {
            for (const Tensor& target : *targets) {
                const auto found = index_.find(target.node().get());
                if (found != index_.end()) items_[found->second].target = true;
            }
        }
        for (std::size_t i = items_.size(); i-- > 0;) {  // the leaves first
            Item& item = items_[i];
            const Node& node = *item.node;
            if (to_leaves_) item.target = node.depth == 0 || node.retains_gradient;
            item.needed = item.target;
            if (is_freed(node) && !(item.target && !to_leaves_))
                throw Error(
                    caller_,
                    fmt::format("the graph behind this tensor has been freed by an earlier backward (at "
                                "op '{}'). Pass retain_graph = true to the earlier one, or compute the "
                                "tensor again.",
                                node.name));
            for (const std::shared_ptr<Node>& input : node.inputs)
                item.needed = item.needed || (input != nullptr && item_of(*input).needed);
        }
        for (Item& item : items_) {
            if (!item.needed) continue;
            for (const std::shared_ptr<Node>& input : item.node->inputs)
                if (input != nullptr && item_of(*input).needed) ++item_of(*input).consumers;
        }
    }

    static bool is_freed(const Node& node) { return node.saved.freed_; }

    void seed(const Tensor& root, const Tensor& gradient) {
        Tensor start = gradient;
        if (!start.defined()) {
            if (root.count() != 1)
                throw Error(
                    caller_,
                    fmt::format("the tensor has shape {}. Reduce it to one element (sum(), mean()), or "
                                "give the gradient in the options.",
                                pretty(root.shape())));
            start = ones(root.shape(), {root.dtype(), root.device()});
        }
        if (start.shape() != root.shape() || !(start.device() == root.device()) ||
            !is_floating(start.dtype()))
            throw Error(
                caller_,
                fmt::format("the gradient given is {} {} on {}, but the tensor is {} {} on {}. Shape and "
                            "device must agree, and the dtype must be floating.",
                            start.dtype(), pretty(start.shape()), start.device(), root.dtype(),
                            pretty(root.shape()), root.device()));
        add(caller_, item_of(*root_), start);
    }

    /// The op's backward, and then: whoever got all of its gradient may be dealt with.
    void run_node(Item& item) {
        Node& node = *item.node;
        Tensor dy = finish(item);
        bool runs = false;
        for (const std::shared_ptr<Node>& input : node.inputs)
            runs = runs || (input != nullptr && item_of(*input).needed);
        if (!runs) return;
        if (dy.defined()) {
            const OpScope scope(node.name);
            InputGradients dx(*this, node);
            node.saved.freed_after_use_ = !keep_graph_;
            {
                const AnomalyCheck inside(false);  // the op is to be named, not the parts of its gradient
                node.backward(node.saved, dy, dx);
            }
            if (AnomalyCheck::is_on()) check_gradients(node, dy);
        }
        dy = Tensor();
        for (const std::shared_ptr<Node>& input : node.inputs) {
            if (input == nullptr || !item_of(*input).needed) continue;
            Item& behind = item_of(*input);
            // A leaf is dealt with at once, so that its hooks run as early as they can.
            if (--behind.consumers == 0 && input->depth == 0) finish(behind);
        }
        if (!keep_graph_) free_node(node);
    }

    /// Takes the complete gradient of an item: runs the hooks, and keeps it for whom it is.
    Tensor finish(Item& item) {
        item.finished = true;
        Tensor gradient = std::move(item.gradient);
        item.gradient = Tensor();
        if (!gradient.defined()) return gradient;
        Node& node = *item.node;
        const std::vector<GradientHook> hooks = node.hooks;  // a hook may add hooks
        for (const GradientHook& hook : hooks) {
            const Tensor other = hook(gradient);
            if (other.defined()) gradient = checked(node, other);
        }
        const bool joins_stored = to_leaves_ && node.depth == 0 && !create_graph_ && !item.continues_stored &&
                                  node.gradient.defined() && may_change(node.gradient);
        if (joins_stored)  // now, not at the end, so that the two need not live side by side
            backend(node.device).add_scaled(gradient, 1.0, node.gradient);
        else if (item.target)
            item.result = gradient;
        return gradient;
    }

    Tensor checked(const Node& node, const Tensor& gradient) const {
        if (gradient.shape() != node.shape || !(gradient.device() == node.device) ||
            !is_floating(gradient.dtype()))
            throw Error(
                caller_,
                fmt::format("a hook of '{}' returned {} {} on {} for a gradient of {} {} on {}. Shape and "
                            "device must agree, and the dtype must be floating.",
                            node.name, gradient.dtype(), pretty(gradient.shape()), gradient.device(),
                            node.dtype, pretty(node.shape), node.device));
        return create_graph_ ? to(gradient, node.dtype) : detail::cast(gradient, node.dtype).detach();
    }

    /// The leaf's grad() becomes the place where this run adds, when that is safe and nobody watches.
    void continue_stored(Item& item) {
        Node& node = *item.node;
        if (!to_leaves_ || create_graph_ || item.gradient.defined() || node.depth != 0 || !node.hooks.empty())
            return;
        if (!node.gradient.defined() || node.gradient.dtype() != node.dtype || !stands_alone(node.gradient))
            return;
        item.gradient = std::move(node.gradient);
        node.gradient = Tensor();
        item.continues_stored = true;
    }

    void add(const char* op, Item& item, const Tensor& given) {
        if (!given.defined())
            throw Error(op, "its backward gave an undefined gradient. Leave the call out instead.");
        const Node& node = *item.node;
        if (!(given.device() == node.device))
            throw Error(op, fmt::format("its backward gave a gradient on {} for an input on {}.",
                                        given.device(), node.device));
        Tensor gradient = detail::sum_to_shape(op, given, node.shape);
        continue_stored(item);
        Tensor& sum = item.gradient;
        if (create_graph_) {
            gradient = to(gradient, node.dtype);
            sum = sum.defined() ? sum + gradient : gradient;
        } else if (!sum.defined()) {
            gradient = detail::cast(gradient, node.dtype);
            sum = gradient.node() == nullptr ? gradient : gradient.detach();
        } else if (may_change(sum)) {
            backend(node.device).add_scaled(gradient, 1.0, sum);
        } else {
            Tensor fresh = Tensor::empty(node.shape, {node.dtype, node.device});
            backend(node.device).binary(BinaryOp::add, sum, detail::cast(gradient, node.dtype), fresh);
            sum = fresh;
        }
    }

    /// The gradient collected so far as memory that may be written to, or an undefined tensor.
    Tensor own(Item& item) {
        continue_stored(item);
        if (item.gradient.defined() && !(item.gradient.is_contiguous() && item.gradient.is_unique()))
            item.gradient = detail::copy_of(item.gradient);
        return item.gradient;
    }

    /// Makes item.result what the tensor's gradient will be: added to an old one, and sharing memory with nobody.
    void prepare_result(Item& item) {
        const Tensor& old = item.node->gradient;
        if (to_leaves_ && old.defined()) {
            // Into fresh memory: somebody else holds the old one.
            item.result = create_graph_ ? to(old, promote(old.dtype(), item.result.dtype())) + item.result
                                        : sum_of(old, item.result);
        } else if (!stands_alone(item.result)) {
            item.result = create_graph_ ? clone(item.result) : detail::copy_of(item.result);
        }
    }

    static Tensor sum_of(const Tensor& old, const Tensor& gradient) {
        Tensor sum = detail::copy_of(old);
        backend(old.device()).add_scaled(gradient, 1.0, sum);
        return sum;
    }

    void check_gradients(const Node& node, const Tensor& dy) {
        for (std::size_t i = 0; i < node.inputs.size(); ++i)
            if (node.inputs[i] != nullptr && item_of(*node.inputs[i]).gradient.defined())
                detail::check_backward(node.name, i, item_of(*node.inputs[i]).gradient, dy);
    }

    static void free_node(Node& node) {
        node.saved.freed_ = true;
        node.saved.slots_.clear();
        node.inputs.clear();
        node.hooks.clear();
        node.backward = nullptr;
    }

    /// After an exception: a grad() that was being added to goes back to its leaf.
    void restore() {
        for (Item& item : items_) {
            if (!item.continues_stored) continue;
            Tensor& sum = item.result.defined() ? item.result : item.gradient;
            if (!item.node->gradient.defined()) item.node->gradient = std::move(sum);
        }
    }

    const char* caller_;
    bool keep_graph_;
    bool create_graph_;
    bool to_leaves_;
    std::shared_ptr<Node> root_;
    std::vector<Item> items_;  // the deepest first
    std::unordered_map<const Node*, std::size_t> index_;
};

void backward(const Tensor& root, const BackwardOptions& options) {
    if (!root.requires_grad())
        throw Error(
            "backward",
            fmt::format(
                "the tensor {} is not on the tape: nothing that it was computed from requires a gradient, "
                "or it was computed under NoGrad. Call set_requires_grad() on the inputs first.",
                pretty(root.shape())));
    Engine engine("backward", root, options, nullptr);
    engine.run(root, options.gradient);
    engine.commit();
}

std::vector<Tensor> gradients(const Tensor& root, const std::vector<Tensor>& inputs,
                              const BackwardOptions& options) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].defined() || !inputs[i].requires_grad())
            throw Error(
                "gradients",
                fmt::format(
                    "input {} requires no gradient. Call set_requires_grad() on it before the tensor is "
                    "computed.",
                    i));
    }
    std::vector<Tensor> results(inputs.size());
    if (!root.requires_grad()) return results;
    Engine engine("gradients", root, options, &inputs);
    engine.run(root, options.gradient);
    engine.commit();
    for (std::size_t i = 0; i < inputs.size(); ++i) results[i] = engine.result_of(*inputs[i].node());
    return results;
}

}  // namespace potluck
