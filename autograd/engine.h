#pragma once

// Internal: backward() and gradients() walk over the tape in three stages.
//
// 1. collect (engine_collect.cpp): all nodes behind the root, the deepest first. A node is deeper than all of its inputs, so in this order
//    every node comes after all that add to its gradient.
// 2. run (engine.cpp): each node takes its collected gradient, calls its op's backward, which adds to the gradients of the inputs,
//    and frees what the op saved.
// 3. commit (engine.cpp): the gradients of leaves (and of tensors that retain theirs) appear, all at once.
//
// A leaf with accumulated hooks gets its gradient as soon as it is complete. How gradients add up and are stored is in
// autograd/collector.h.
//
// Threads: an engine has the inner nodes of its graph to itself, and the leaves that have a buffer (claim). Plain leaves
// are shared.

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "autograd/collector.h"
#include "autograd/tape.h"

namespace potluck {

class Engine {
public:
    /// Collects. `targets` null: gradients go to the leaves. Else only the gradients of the targets are computed.
    Engine(const char* caller, const Tensor& root, const BackwardOptions& options,
           const std::vector<Tensor>* targets);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void run(const Tensor& root, const Tensor& gradient);
    void commit();
    /// Valid after commit(); undefined for a node that the root does not depend on.
    Tensor result_of(const Node& node) const;

private:
    class InputGradients;

    struct Item : Collected {
        std::int64_t consumers = 0;  // nodes that will still add to the gradient
        bool needed = false;         // its gradient leads to a leaf (or a target)
        bool runs = false;           // an input of its node is needed, so its op's backward runs
        bool target = false;         // its gradient is to be handed out
        bool finished = false;       // its gradient has been dealt with
        bool summed_wider = false;   // of a half type, whose sum is taken in f32 until it is complete
    };

    /// Marks an op whose backward runs in this thread: a nested backward must not free what it saved.
    class Running {
    public:
        explicit Running(const Node& node);
        ~Running();
        Running(const Running&) = delete;
        Running& operator=(const Running&) = delete;

        static bool has(const Node& node);

    private:
        static thread_local const Running* innermost;
        const Node& node_;
        const Running* outer_;
    };

    Item& item_of(const Node& node) { return items_[index_.at(&node)]; }
    static bool is_freed(const Node& node) { return node.saved.freed_; }

    // collect
    void collect();
    /// Reserves the node for this thread until the engine ends. A nested backward of the same thread may use it too.
    void claim(Node& node);
    void release();
    /// Finds out what is needed and where it goes.
    void mark(const std::vector<Tensor>* targets);
    void check_not_freed(const Item& item) const;
    void use_buffer(Item& item);
    /// Two leaves with one buffer would overwrite each other's sums.
    void check_buffers() const;

    // run
    void seed(const Tensor& root, const Tensor& gradient);
    /// Runs the op's backward, and then finishes every input whose gradient is now complete.
    void run_node(Item& item);
    /// Takes the complete gradient of an item, runs its hooks, and stores it where it is wanted.
    Tensor finish(Item& item);
    Tensor run_hooks(const Item& item, Tensor gradient) const;
    Tensor checked(const Item& item, const Tensor& gradient) const;
    void check_gradients(const Node& node, const Tensor& dy);
    static void free_node(Node& node);

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

}  // namespace potluck
