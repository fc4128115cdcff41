#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/saved.h"
#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

class Gradients;

/// Computes the gradients of the inputs from `dy`, the gradient of the output (same shape, dtype and device). It runs
/// with recording off; with create_graph it runs with recording on: if it is written with ops of autograd/ops.h, its
/// result can then be differentiated again. `dy` may be shared and must not be changed.
using BackwardFunction = std::function<void(const Saved& saved, const Tensor& dy, Gradients& dx)>;

/// Receives the gradients of an op's inputs from its backward.
class Gradients {
public:
    virtual ~Gradients() = default;

    /// Whether input `index` needs a gradient. If not, skip the work.
    virtual bool wants(std::size_t index) const = 0;
    /// The dtype in which the gradient of input `index` is accumulated: the input's own, or that of its gradient buffer
    /// (f32 for a half type, see set_gradient_buffer()).
    virtual DType dtype(std::size_t index) const = 0;
    /// Whether a gradient for input `index` has already been added.
    virtual bool collected(std::size_t index) const = 0;
    /// Adds `gradient` to input `index`, summed over broadcast axes and converted to dtype(index).
    virtual void add(std::size_t index, const Tensor& gradient) = 0;

    /// The memory in which an input's gradient is accumulated: contiguous, with the input's shape and dtype(index).
    struct Destination {
        Tensor memory;
        bool accumulate;  // false: nothing was added yet; every element must be written
    };
    /// For ops that write a gradient themselves, or add to it in place (matmul). From this call on the memory is the
    /// gradient. Only without create_graph: such ops must call add() when is_grad_enabled().
    virtual Destination destination(std::size_t index) = 0;
    /// The same memory, initialised to zeros if nothing was added yet: for ops that add to parts of it (slices, rows of
    /// an embedding).
    virtual Tensor buffer(std::size_t index) = 0;
};

/// Receives the gradient of a tensor before it is used, and may return a replacement (undefined: keep it).
using GradientHook = std::function<Tensor(const Tensor& gradient)>;
/// Receives the grad() of a leaf when a backward has added all its contributions to it.
using AccumulatedHook = std::function<void(const Tensor& gradient)>;

/// The node of one tensor on the tape: how it was computed from others. A leaf has no backward and accumulates its
/// gradient. Each tensor on the tape has exactly one node, so a drawing of the nodes shows the computation.
struct Node : std::enable_shared_from_this<Node> {
    const char* name = "leaf";                  // the op
    std::vector<std::shared_ptr<Node>> inputs;  // null where an input needs no gradient
    Saved saved;
    BackwardFunction backward;  // empty for a leaf
    std::vector<GradientHook> hooks;
    bool retains_gradient = false;
    std::int64_t depth = 0;  // 0 for a leaf, else 1 + the largest of the inputs

    Tensor gradient;         // of a leaf, or when retained
    Tensor gradient_buffer;  // of a leaf; `gradient` is then undefined or refers to the same memory
    std::vector<AccumulatedHook> accumulated_hooks;
    std::mutex gradient_mutex;                 // guards `gradient`: threads may share a leaf
    std::atomic<const void*> walker{nullptr};  // the thread whose backward has reserved this node

    // properties of the tensor itself, for checks and printing
    Shape shape;
    DType dtype = DType::f32;
    Device device;

    Node() = default;
    ~Node();  // iterative: graphs may be a million ops deep
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;
};

/// Puts `output` on the tape as the result of op `name` on `inputs`, and saves `saved` for `backward`. (`backward` may
/// capture numbers but never tensors: those belong in `saved`, so that changes are detected, memory is counted and
/// backward() can free them.) Does nothing when recording is off or no input needs a gradient. `output` must be a new
/// tensor that is not yet on the tape; it may be among `saved`. Returns `output`.
Tensor record(const char* name, const Tensor& output, std::vector<Tensor> inputs, std::vector<Tensor> saved,
              BackwardFunction backward);

struct BackwardOptions {
    Tensor gradient = {};       // of the root; undefined: 1 (the root must then have one element)
    bool retain_graph = false;  // keep what ops saved, so that backward can run again
    bool create_graph = false;  // record the gradients themselves (second derivatives); implies retain_graph
};

/// Adds the gradient of `root` to the grad() of every leaf it depends on. Walks the tape without recursion, in
/// reverse order of depth, and frees what ops saved, and their links to their inputs, as it goes (a second run without
/// retain_graph is an Error). So a loss that is kept for a log keeps no graph alive.
///
/// When the gradients appear, and what is left when an op or a hook throws:
///   - A plain leaf (also with gradient hooks), and a tensor that retains its gradient: when the whole walk is done.
///   - A leaf with accumulated hooks: when its own gradient is complete, before the hooks run.
///   - A leaf with a gradient buffer: with the first contribution, in the buffer itself.
///   After an exception, whoever had no gradient before has none; a gradient that was there before may hold a part of
///   this run, so zero it before going on.
///
/// The gradient of an f16 or bf16 leaf is of that dtype after one backward, and f32 once a second one has been added, so
/// that a sum over many is not rounded to the half type. So does a tensor that retains its gradient. Within one backward,
/// too, the contributions to a gradient of a half type are added in f32, and the sum is rounded once.
///
/// Threads: a graph belongs to the thread that walks it; another one that comes upon it gets an Error. Graphs of
/// different threads may share leaves: their gradients become the sum (in no fixed order, so of no fixed rounding), and
/// hooks run in the thread of their backward. A leaf with a gradient buffer takes part in one backward at a time: a
/// second thread gets an Error before anything is changed. Nobody else may read or set a gradient meanwhile.
///
/// With create_graph a leaf's grad() is itself on the tape and refers to the leaf: dropping the gradient (set_grad({}))
/// breaks the circle. gradients() makes no such circle. A leaf with a gradient buffer refuses create_graph: a buffer is
/// memory, not a place on the tape.
void backward(const Tensor& root, const BackwardOptions& options = {});
template <std::size_t N>
void backward(const Tensor&, MistypedOptions<N>, Refused<"no such option: see BackwardOptions", N> = {});

/// The gradients of `root` with respect to `inputs`, without changing any grad(). Undefined for an input that root does
/// not depend on.
std::vector<Tensor> gradients(const Tensor& root, const std::vector<Tensor>& inputs,
                              const BackwardOptions& options = {});
template <std::size_t N>
std::vector<Tensor> gradients(const Tensor&, const std::vector<Tensor>&, MistypedOptions<N>,
                              Refused<"no such option: see BackwardOptions", N> = {});

/// Runs `hook` on the gradient of `tensor` in every later backward, before it is passed on to the tensor's op or added
/// to grad(). The hook gets the sum of the contributions of this backward alone, in the dtype of the tensor (or of its
/// gradient buffer). Changing it in place is an Error, since other branches may share its memory: return another tensor
/// instead. Throws Error when the tensor needs no gradient. A hook of a leaf must not capture the leaf itself (a
/// reference cycle that is never freed).
void add_gradient_hook(const Tensor& tensor, GradientHook hook);
/// Runs `hook` with the grad() of `leaf` once in every later backward() that contributes to it, as soon as it is
/// complete, while the backward continues with other tensors. The hook may change the gradient in place (reduce it over
/// processes) and drop it (after an update). gradients() does not run it. Throws Error when `leaf` is not a leaf that
/// requires a gradient. The hook must not capture the leaf itself.
void add_accumulated_hook(const Tensor& leaf, AccumulatedHook hook);
/// Keeps the gradient of a non-leaf tensor in its grad(), as for a leaf.
void retain_gradient(const Tensor& tensor);

/// Lets the gradient of `leaf` be collected in `buffer`: memory that somebody else laid out, such as a part of a flat
/// block. It has the leaf's shape and device, is contiguous, and is of the leaf's dtype, or f32 for f16 and bf16 (sums
/// over many backwards are then never rounded to the half type). Backward adds into it and never replaces or copies it.
/// The first contribution is stored over what is there, so the buffer need not be zeroed; grad() is undefined until
/// then, and again after set_grad({}), which does not touch the memory. Afterwards grad() shows the buffer.
/// set_grad(x) copies x into it. A gradient that the leaf has already moves into the buffer.
///
/// An undefined `buffer` takes it away: a grad() that shows it stays as it is, and is no longer added to in place.
/// It is also gone, without a word, once the leaf is moved to another device, and there and back, or converted to a dtype
/// that it does not fit (Module::to()): set it again then.
/// Throws Error when `leaf` is not a leaf that requires a gradient, or when the buffer does not fit or lies in the leaf's
/// own memory. A backward() that comes upon two leaves whose buffers overlap throws Error before anything is changed.
void set_gradient_buffer(const Tensor& leaf, const Tensor& buffer);

/// The tape that leads to `root`, one op per line: op, shape, dtype, inputs, bytes saved.
std::string tape_to_text(const Tensor& root);
/// The same as a DOT graph (`dot -Tsvg`).
std::string tape_to_dot(const Tensor& root);

}  // namespace potluck
