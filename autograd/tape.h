#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/grad_mode.h"
#include "core/tensor.h"

namespace potluck {

class Saved;
class Gradients;

/// Computes the gradients of the inputs from `dy`, the gradient of the output (same shape, dtype and device as it).
/// Runs with recording off, or on when a graph of the gradient was asked for: written with ops of autograd/ops.h it
/// can then be differentiated again.
using BackwardFunction = std::function<void(const Saved& saved, const Tensor& dy, Gradients& dx)>;

/// What an op kept for its backward. Reading checks that nothing was changed since.
class Saved {
public:
    Saved() = default;

    /// Tensor `index` of those given to record(). Throws Error when it was changed in place since, or when backward()
    /// has already freed it.
    Tensor operator[](std::size_t index) const;
    std::size_t size() const { return slots_.size(); }
    /// Tensor `index` when nothing else can see its memory and backward() frees it right after this op, so that the op
    /// may write a gradient over it; else an undefined tensor. Take it before reading the slot in any other way.
    Tensor reusable(std::size_t index) const;
    /// The storages that the slots keep alive, each once.
    std::vector<const Storage*> storages() const;
    /// Their bytes.
    std::int64_t bytes() const;

private:
    friend Tensor record(const char*, const Tensor&, std::vector<Tensor>, std::vector<Tensor>,
                         BackwardFunction);
    friend class Engine;
    friend struct Node;

    struct Slot {
        Tensor tensor;              // without a place on the tape when it is the op's own output (no cycle)
        std::uint64_t version = 0;  // of the storage when it was saved
        bool is_output = false;
    };
    std::vector<Slot> slots_;
    const Slot& checked_slot(std::size_t index) const;

    Node* owner_ = nullptr;
    bool freed_ = false;
    bool freed_after_use_ = false;  // set while a backward runs that does not retain the graph
};

/// Where a backward puts the gradients of its op's inputs.
class Gradients {
public:
    virtual ~Gradients() = default;

    /// Whether input `index` needs a gradient at all. Skip the work when it does not.
    virtual bool wants(std::size_t index) const = 0;
    /// Adds `gradient` to input `index`: summed over axes that were broadcast, converted to the input's dtype.
    virtual void add(std::size_t index, const Tensor& gradient) = 0;
    /// The gradient of input `index` as collected so far, contiguous, in the input's shape and dtype, made of zeros
    /// when there was none: for ops that add to parts of it in place (slices, rows of an embedding).
    /// Only without create_graph: such ops must take add() when is_grad_enabled().
    virtual Tensor buffer(std::size_t index) = 0;
    /// The same, but undefined when there is none yet: for ops that can either write or accumulate (matmul).
    virtual Tensor existing(std::size_t index) = 0;
};

/// Sees the gradient of a tensor before it goes on, and may return another one in its place (undefined: keep it).
using GradientHook = std::function<Tensor(const Tensor& gradient)>;

/// One tensor's place on the tape: how it was made from others. A leaf has no backward and collects its gradient.
/// Tensor and node are one to one, so a drawing of the nodes is a drawing of the computation.
struct Node : std::enable_shared_from_this<Node> {
    const char* name = "leaf";                  // the op
    std::vector<std::shared_ptr<Node>> inputs;  // null where an input needs no gradient
    Saved saved;
    BackwardFunction backward;  // empty for a leaf
    std::vector<GradientHook> hooks;
    Tensor gradient;  // of a leaf, or when retained
    bool retains_gradient = false;
    std::int64_t depth = 0;  // 0 for a leaf, else 1 + the largest of the inputs

    // the tensor itself, for checks and for printing
    Shape shape;
    DType dtype = DType::f32;
    Device device;

    Node() = default;
    ~Node();  // iterative: graphs may be a million ops deep
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;
};

/// Puts `output` on the tape as the result of op `name` on `inputs`, keeping `saved` for `backward` (which may hold
/// numbers, never tensors: those belong in `saved`, so that changes are caught, memory is counted and backward() can
/// free them). Does nothing when recording is off or no input needs a gradient. `output` must be a fresh tensor that
/// is not yet on the tape; it may be among `saved`. Returns `output`.
Tensor record(const char* name, const Tensor& output, std::vector<Tensor> inputs, std::vector<Tensor> saved,
              BackwardFunction backward);

struct BackwardOptions {
    Tensor gradient = {};       // of the root; undefined: 1 (the root must then have one element)
    bool retain_graph = false;  // keep what was saved, so that backward can run again
    bool create_graph = false;  // record the gradients themselves (second derivatives); implies retain_graph
};

/// Adds the gradient of `root` to the grad() of every leaf it depends on. Walks the tape without recursion, in
/// reverse order of depth, and frees what ops saved, and their links to their inputs, as it goes (a second run without
/// retain_graph is an Error). So a loss that is kept for a log keeps no graph alive.
///
/// The gradients appear when the whole walk is done. When an op or a hook throws, leaves without a gradient stay without
/// one; a gradient that was there before may already hold a part of this run, so zero it before going on.
///
/// With create_graph a leaf's grad() is itself on the tape and refers to the leaf: dropping the gradient (set_grad({}))
/// breaks the circle. gradients() makes no such circle.
void backward(const Tensor& root, const BackwardOptions& options = {});

/// The gradients of `root` with respect to `inputs`, without touching anybody's grad(). Undefined where root does not
/// depend on an input.
std::vector<Tensor> gradients(const Tensor& root, const std::vector<Tensor>& inputs,
                              const BackwardOptions& options = {});

/// Runs `hook` on the gradient of `tensor` in every later backward, before it goes on to the ops behind or is added to
/// grad(). Throws Error when it needs no gradient. A hook of a leaf must not hold the leaf itself (a circle that is
/// never freed).
void add_gradient_hook(const Tensor& tensor, GradientHook hook);
/// Keeps the gradient of an inner tensor in its grad(), as for a leaf.
void retain_gradient(const Tensor& tensor);

/// The tape that leads to `root`, one op a line: op, shape, dtype, inputs, bytes saved.
std::string tape_to_text(const Tensor& root);
/// The same as a DOT drawing (`dot -Tsvg`).
std::string tape_to_dot(const Tensor& root);

}  // namespace potluck
