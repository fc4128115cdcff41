#pragma once

#include <any>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/tensor.h"

namespace potluck {

struct Node;
class SavedTensorHooks;

/// What an op kept for its backward. Reading checks that nothing was changed since.
class Saved {
public:
    Saved() = default;
    /// What `owner`, the node of `output`, keeps. Runs the pack hook of this thread on each defined tensor.
    Saved(Node& owner, const Tensor& output, std::vector<Tensor> tensors);

    /// Tensor `index` of those given to record(). Throws Error when it was changed in place since, or when backward()
    /// has already freed it.
    Tensor operator[](std::size_t index) const;
    std::size_t size() const { return slots_.size(); }
    /// Tensor `index` when nothing else can see its memory and backward() frees it right after this op, so that the op
    /// may write a gradient over it; else an undefined tensor. Take it before reading the slot in any other way.
    Tensor reusable(std::size_t index) const;
    /// The storages that the slots keep alive, each once. Of what a pack hook returned: those of tensors.
    std::vector<const Storage*> storages() const;
    /// Their bytes.
    std::int64_t bytes() const;

private:
    friend class Engine;
    friend struct Node;

    /// What a pack hook made of a tensor.
    struct Packed {
        std::any content;
        std::function<Tensor(const std::any&)> unpack;
        Shape shape;
        DType dtype;
        Device device;
        std::weak_ptr<Storage> storage;  // of the tensor itself
        std::shared_ptr<Node> node;      // its place on the tape
        Tensor unpacked = {};            // while the op's backward runs
    };
    struct Slot {
        Tensor tensor;              // without a place on the tape when it is the op's own output (no cycle)
        std::uint64_t version = 0;  // of the storage when it was saved
        bool is_output = false;
        std::unique_ptr<Packed> packed;  // then `tensor` is undefined
    };
    const Slot& slot(std::size_t index) const;
    Tensor read(const Slot& slot) const;
    void check_version(const Slot& slot, const Tensor& tensor) const;
    void forget_unpacked() const;

    std::vector<Slot> slots_;
    Node* owner_ = nullptr;
    bool freed_ = false;
    bool freed_after_use_ = false;  // set while a backward runs that does not retain the graph
};

/// `SavedTensorHooks guard(pack, unpack);` lets all that ops of this thread keep for their backward go through `pack`
/// until the end of the block: it stores what `pack` returns in the tensor's place (a copy in another memory, the name of
/// a file), and calls `unpack` with it once for each backward of the op. For offloading, compressing, counting.
///
/// Both run without recording and without hooks. pack() sees every kept tensor, parameters and indices too, and may
/// return one as it is. unpack() must return the tensor's shape, dtype and device, else Error; the values are its
/// matter, but a tensor that was changed in place since is an Error as ever when unpack() returns its own memory.
/// backward() frees what was packed as it frees what was saved. What a hook throws goes to the caller of the op, which
/// then records nothing, or of backward(). An inner guard takes the place of an outer one.
class SavedTensorHooks {
public:
    using Pack = std::function<std::any(const Tensor& tensor)>;
    using Unpack = std::function<Tensor(const std::any& packed)>;

    /// Throws Error when one of them is empty.
    SavedTensorHooks(Pack pack, Unpack unpack);
    ~SavedTensorHooks();
    SavedTensorHooks(const SavedTensorHooks&) = delete;
    SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

private:
    friend class Saved;

    Pack pack_;
    Unpack unpack_;
    SavedTensorHooks* outer_;
};

}  // namespace potluck
