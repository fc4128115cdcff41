// The first stage of a backward (engine.h): which nodes take part, in which order, and where their gradients go.

#include <algorithm>
#include <mutex>
#include <utility>

#include "autograd/engine.h"
#include "core/dtype.h"
#include "core/format.h"

namespace potluck {

namespace {

/// Identifies the thread, at less cost than a thread id.
const void* this_thread() {
    thread_local const char mark = 0;
    return &mark;
}

bool has_stored(Node& node) {
    const std::lock_guard lock(node.gradient_mutex);
    return node.gradient.defined();
}

}  // namespace

Engine::Engine(const char* caller, const Tensor& root, const BackwardOptions& options,
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

Engine::~Engine() {
    for (Item& item : items_) Collector::restore(item);
    release();
}

void Engine::collect() {
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

void Engine::claim(Node& node) {
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

void Engine::release() {
    for (Node* node : claimed_) node->walker.store(nullptr, std::memory_order_release);
}

void Engine::mark(const std::vector<Tensor>* targets) {
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
        check_not_freed(item);
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

void Engine::check_not_freed(const Item& item) const {
    const Node& node = *item.node;
    if (is_freed(node) && !(item.target && !to_leaves_))
        throw Error(caller_,
                    fmt::format("the graph behind this tensor has been freed by an earlier backward (at "
                                "op '{}'). Pass retain_graph = true to the earlier one, or compute the "
                                "tensor again.",
                                node.name));
    if (!keep_graph_ && Running::has(node))
        throw Error(caller_,
                    fmt::format("the backward of op '{}' is running around this one, which would free "
                                "what it reads. Pass retain_graph = true to the inner one.",
                                node.name));
}

void Engine::use_buffer(Item& item) {
    if (create_graph_)
        throw Error(caller_,
                    fmt::format("a leaf {} has a gradient buffer, into which create_graph cannot write. "
                                "Use gradients(), or take the buffer away: set_gradient_buffer(leaf, {{}}).",
                                pretty(item.node->shape)));
    claim(*item.node);
    item.buffered = true;
    item.direct = item.node->hooks.empty();
    item.dtype = item.node->gradient_buffer.dtype();
}

void Engine::check_buffers() const {
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
        if (one.storage() != next.storage() || begin_of(one).second + one.bytes() <= begin_of(next).second)
            continue;
        throw Error(caller_,
                    fmt::format("the gradient buffers of two leaves {} and {} overlap in memory, so that "
                                "each would overwrite the other's sum. Give each leaf a part of its own.",
                                pretty(one.shape()), pretty(next.shape())));
    }
}

}  // namespace potluck
