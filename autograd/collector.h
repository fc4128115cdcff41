#pragma once

// Internal: where the gradients of a backward add up and go to; autograd/engine.h says when.
//
// A leaf with a buffer is added to in that buffer from the first contribution on. Threads: whoever adds to the stored
// gradient of a plain leaf takes it out of the leaf first (take), and puts the sum back, added to what another thread may
// have put there meanwhile (put).

#include <memory>

#include "autograd/tape.h"

namespace potluck {

/// What one backward has collected for a node.
struct Collected {
    std::shared_ptr<Node> node;
    Tensor gradient = {};           // so far
    Tensor result = {};             // complete, and to be handed out
    bool continues_stored = false;  // gradient (or result) was the leaf's grad() and is added to in place
    Tensor stored = {};             // the leaf's grad(), taken out until the result is put in its place
    bool appeared = false;          // the leaf had no grad(), and has one since before the commit
    bool buffered = false;          // its gradient goes to the leaf's buffer
    bool direct = false;            // ops write it there, since no hook looks at it first
    DType dtype = DType::f32;       // of the gradient
};

class Collector {
public:
    /// `to_leaves`: gradients become the grad() of leaves; else they are handed to the caller alone. `create_graph`:
    /// sums are made on the tape.
    Collector(bool to_leaves, bool create_graph) : to_leaves_(to_leaves), create_graph_(create_graph) {}

    /// As Gradients::add(), destination() and collected() promise.
    void add(const char* op, Collected& item, const Tensor& given) const;
    Gradients::Destination destination(Collected& item) const;
    bool has_sum(const Collected& item) const;

    /// Stores the complete gradient of a leaf where it may appear already, and then runs the accumulated hooks.
    void finish_leaf(Collected& item, Tensor gradient) const;
    /// Makes item.result what the tensor's gradient will be: added to an old one, and sharing memory with nobody.
    void prepare_result(Collected& item) const;
    /// Makes item.result the grad() of its tensor, which is returned.
    Tensor publish(Collected& item) const;
    /// After an exception: what was taken out of a leaf goes back, and what it did not have before goes.
    static void restore(Collected& item);

private:
    bool may_continue(const Collected& item) const;
    void continue_stored(Collected& item) const;
    bool join_stored(Collected& item, const Tensor& gradient) const;
    static bool open_buffer(Collected& item);
    static void add_to_buffer(Collected& item, const Tensor& gradient);
    Tensor put(Node& node, Tensor sum) const;
    Tensor sum_of(const Tensor& old, const Tensor& gradient) const;

    bool to_leaves_;
    bool create_graph_;
};

}  // namespace potluck
