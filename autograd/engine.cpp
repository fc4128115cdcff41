// backward() and gradients(): the walk over the tape.
//
// 1. collect: all nodes behind the root, the deepest first. A node is deeper than all of its inputs, so in this order
//    every node comes after all that add to its gradient.
// 2. run: each node takes its collected gradient, calls its op's backward, which adds to the gradients of the inputs,
//    and frees what the op saved.
// 3. commit: the gradients of leaves (and of tensors that retain theirs) appear, all at once.
//
// A leaf with accumulated hooks gets its gradient as soon as it is complete. How gradients add up and are stored is in
// autograd/collector.h.
//
// Threads: an engine has the inner nodes of its graph to itself, and the leaves that have a buffer (claim). Plain leaves
// are shared.

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "autograd/anomaly.h"
#include "autograd/autocast.h"
#include "autograd/collector.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/support.h"
#include "autograd/recompute.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Identifies the thread, at less cost than a thread id.
const void* this_thread() {
    thread_local const char mark = 0;
    return &mark;
}

/// Marks an op whose backward runs in this thread: a nested backward must not free what it saved.
class Running {
public:
    explicit Running(const Node& node) : node_(node), outer_(std::exchange(innermost, this)) {}
    ~Running() { innermost = outer_; }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    static bool has(const Node& node) {
        const Running* one = innermost;
        while (one != nullptr && &one->node_ != &node) one = one->outer_;
        return one != nullptr;
    }

private:
    static thread_local const Running* innermost;
    const Node& node_;
    const Running* outer_;
};
thread_local const Running* Running::innermost = nullptr;

}  // namespace

class Engine {
public:
    /// `targets` null: gradients go to the leaves. Else only the gradients of the targets are computed.
    Engine(const char* caller, const Tensor& root, const BackwardOptions& options,
           const std::vector<Tensor>* targets)
        : caller_(caller),
          keep_graph_(options.retain_graph || options.create_graph),
          create_graph_(options.create_graph),
          to_leaves_(targets == nullptr),
          collector_(to_leaves_, create_graph_),
          root_(root.node()) {
        try {
            collect();
            mark(targets);
        } catch (...) {
            release();
            throw;
        }
    }
    ~Engine() {
        for (Item& item : items_) Collector::restore(item);
        release();
    }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void run(const Tensor& root, const Tensor& gradient) {
        const OpScope scope("backward");
        const GradMode mode(create_graph_);
        const Autocast off(DType::f32);  // each op goes back in the dtypes in which it went forward
        if (!item_of(*root_).needed) return;
        seed(root, gradient);
        for (Item& item : items_)
            if (item.needed && !item.finished) run_node(item);
    }

    void commit() {
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

    /// Valid after commit(); undefined for a node that the root does not depend on.
    Tensor result_of(const Node& node) const {
        const auto found = index_.find(&node);
        return found == index_.end() ? Tensor() : items_[found->second].result;
    }

private:
    struct Item : Collected {
        std::int64_t consumers = 0;  // nodes that will still add to the gradient
        bool needed = false;         // its gradient leads to a leaf (or a target)
        bool runs = false;           // an input of its node is needed, so its op's backward runs
        bool target = false;         // its gradient is to be handed out
        bool finished = false;       // its gradient has been dealt with
        bool summed_wider = false;   // of a half type, whose sum is taken in f32 until it is complete
    };

    /// Receives the gradients of one node's inputs.
    class InputGradients final : public Gradients {
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
        items_.push_back({{.node = root_}});
        while (!open.empty()) {
            const std::shared_ptr<Node>& node = *open.back();
            open.pop_back();
            if (node->depth > 0) claim(*node);
            for (const std::shared_ptr<Node>& input : node->inputs) {
                if (input == nullptr || !index_.emplace(input.get(), 0).second) continue;
                items_.push_back({{.node = input}});
                open.push_back(&input);
            }
        }
        std::stable_sort(items_.begin(), items_.end(),
                         [](const Item& a, const Item& b) { return a.node->depth > b.node->depth; });
        for (std::size_t i = 0; i < items_.size(); ++i) index_[items_[i].node.get()] = i;
    }

    /// Reserves the node for this thread until the engine ends. A nested backward of the same thread may use it too.
    void claim(Node& node) {
        const void* nobody = nullptr;
        if (node.walker.compare_exchange_strong(nobody, this_thread(), std::memory_order_acquire)) {
            claimed_.push_back(&node);
        } else if (nobody != this_thread()) {
            throw Error(
                caller_,
                fmt::format(
                    "another thread is walking through '{}' {}, {}. Compute the tensors in each thread, or "
                    "let one thread wait for the other.",
                    node.name, pretty(node.shape),
                    node.depth > 0 ? "an op of this graph"
                                   : "a leaf with a gradient buffer, which takes part in one "
                                     "backward at a time"));
        }
    }

    void release() {
        for (Node* node : claimed_) node->walker.store(nullptr, std::memory_order_release);
    }

    void mark(const std::vector<Tensor>* targets) {
        if (targets != nullptr) {
            for (const Tensor& target : *targets) {
                const auto found = index_.find(target.node().get());
                if (found != index_.end()) items_[found->second].target = true;
            }
        }
        for (std::size_t i = items_.size(); i-- > 0;) {  // from the leaves upwards
            Item& item = items_[i];
            const Node& node = *item.node;
            if (to_leaves_) item.target = node.depth == 0 || node.retains_gradient;
            item.dtype = node.dtype;
            if (to_leaves_ && node.gradient_buffer.defined())
                use_buffer(item);
            else if (to_leaves_ && node.depth == 0 && is_half(node.dtype) && node.hooks.empty() &&
                     has_stored(*item.node))
                item.dtype = DType::f32;  // see Collector::sum_of()
            if (is_freed(node) && !(item.target && !to_leaves_))
                throw Error(
                    caller_,
                    fmt::format("the graph behind this tensor has been freed by an earlier backward (at "
                                "op '{}'). Pass retain_graph = true to the earlier one, or compute the "
                                "tensor again.",
                                node.name));
            if (!keep_graph_ && Running::has(node))
                throw Error(
                    caller_,
                    fmt::format("the backward of op '{}' is running around this one, which would free "
                                "what it reads. Pass retain_graph = true to the inner one.",
                                node.name));
            for (const std::shared_ptr<Node>& input : node.inputs)
                item.runs = item.runs || (input != nullptr && item_of(*input).needed);
            item.needed = item.target || item.runs;
        }
        check_buffers();
        for (Item& item : items_) {
            if (!item.needed) continue;
            for (const std::shared_ptr<Node>& input : item.node->inputs)
                if (input != nullptr && item_of(*input).needed) ++item_of(*input).consumers;
        }
        // A sum of two is rounded once in the half type, too.
        for (Item& item : items_) {
            item.summed_wider = item.consumers > 2 && is_half(item.dtype) && !item.buffered;
            if (item.summed_wider) item.dtype = DType::f32;
        }
    }

    static bool has_stored(Node& node) {
        const std::lock_guard lock(node.gradient_mutex);
        return node.gradient.defined();
    }

    void use_buffer(Item& item) {
        if (create_graph_)
            throw Error(
                caller_,
                fmt::format("a leaf {} has a gradient buffer, into which create_graph cannot write. "
                            "Use gradients(), or take the buffer away: set_gradient_buffer(leaf, {{}}).",
                            pretty(item.node->shape)));
        claim(*item.node);
        item.buffered = true;
        item.direct = item.node->hooks.empty();
        item.dtype = item.node->gradient_buffer.dtype();
    }

    /// Two leaves with one buffer would overwrite each other's sums.
    void check_buffers() const {
        std::vector<const Tensor*> buffers;
        for (const Item& item : items_)
            if (item.buffered && item.node->gradient_buffer.count() > 0)
                buffers.push_back(&item.node->gradient_buffer);
        const auto begin_of = [](const Tensor& x) {
            return std::pair(x.storage().get(), x.offset() * size_of(x.dtype()));
        };
        std::sort(buffers.begin(), buffers.end(),
                  [&](const Tensor* a, const Tensor* b) { return begin_of(*a) < begin_of(*b); });
        for (std::size_t i = 1; i < buffers.size(); ++i) {
            const Tensor &one = *buffers[i - 1], &next = *buffers[i];
            if (one.storage() != next.storage() ||
                begin_of(one).second + one.bytes() <= begin_of(next).second)
                continue;
            throw Error(caller_,
                        fmt::format("the gradient buffers of two leaves {} and {} overlap in memory, so that "
                                    "each would overwrite the other's sum. Give each leaf a part of its own.",
                                    pretty(one.shape()), pretty(next.shape())));
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
        collector_.add(caller_, item_of(*root_), start);
    }

    /// Runs the op's backward, and then finishes every input whose gradient is now complete.
    void run_node(Item& item) {
        Node& node = *item.node;
        Tensor dy = finish(item);
        if (!item.runs) return;
        if (dy.defined()) {
            if (is_freed(node))
                throw Error(
                    caller_,
                    fmt::format(
                        "a backward within this one (in a hook) has freed op '{}' before its turn. Pass "
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

    /// Takes the complete gradient of an item, runs its hooks, and stores it where it is wanted.
    Tensor finish(Item& item) {
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

    Tensor run_hooks(const Item& item, Tensor gradient) const {
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

    Tensor checked(const Item& item, const Tensor& gradient) const {
        const Node& node = *item.node;
        if (gradient.shape() != node.shape || !(gradient.device() == node.device) ||
            !is_floating(gradient.dtype()))
            throw Error(
                caller_,
                fmt::format("a hook of '{}' returned {} {} on {} for a gradient of {} {} on {}. Shape and "
                            "device must agree, and the dtype must be floating.",
                            node.name, gradient.dtype(), pretty(gradient.shape()), gradient.device(),
                            item.dtype, pretty(node.shape), node.device));
        return create_graph_ ? to(gradient, item.dtype) : detail::cast(gradient, item.dtype).detach();
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

    const char* caller_;
    bool keep_graph_;
    bool create_graph_;
    bool to_leaves_;
    Collector collector_;
    std::shared_ptr<Node> root_;
    std::vector<Item> items_;  // deepest first
    std::unordered_map<const Node*, std::size_t> index_;
    std::vector<Node*> claimed_;
};

namespace {

/// What a region keeps for backward is not there when a backward inside of it asks for it.
void require_outside_of_regions(const char* caller) {
    if (detail::is_in_region())
        throw Error(caller,
                    "it is called inside a region of recompute(), whose tensors are not kept. Compute the "
                    "gradient outside of the region.");
}

}  // namespace

void backward(const Tensor& root, const BackwardOptions& options) {
    require_outside_of_regions("backward");
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
    require_outside_of_regions("gradients");
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
