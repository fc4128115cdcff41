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

/// The tensors that an op saved for its backward. Reading checks that they have not been changed since.
class Saved {
public:
    Saved() = default;
    /// The tensors saved by `owner`, the node of `output`. Runs this thread's pack hook on each defined tensor.
    Saved(Node& owner, const Tensor& output, std::vector<Tensor> tensors);

    /// Saved tensor number `index`, as given to record(). Throws Error when it was changed in place since, or when
    /// backward() has already freed it.
    Tensor operator[](std::size_t index) const;
    std::size_t size() const { return slots_.size(); }
    /// Tensor `index` if nothing else refers to its memory and backward() frees it right after this op, so that the op
    /// may overwrite it with a gradient; else an undefined tensor. Call it before any other access to this slot.
    Tensor reusable(std::size_t index) const;
    /// The storages that the slots keep alive, each once. For the result of a pack hook: the storages of its tensors.
    std::vector<const Storage*> storages() const;
    /// The total bytes of these storages.
    std::int64_t bytes() const;

private:
    friend class Engine;
    friend struct Node;

    /// What a pack hook returned for a tensor.
    struct Packed {
        std::any content;
        std::function<Tensor(const std::any&)> unpack;
        Shape shape;
        DType dtype;
        Device device;
        std::weak_ptr<Storage> storage;  // of the original tensor
        std::shared_ptr<Node> node;      // its node
        Tensor unpacked = {};            // only while the op's backward runs
    };
    struct Slot {
        Tensor tensor;              // without its node if it is the op's own output (avoids a cycle)
        std::uint64_t version = 0;  // of the storage at the time of saving
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

/// `SavedTensorHooks guard(pack, unpack);` passes every tensor that ops of this thread save for backward to `pack`
/// until the end of the block. It stores what `pack` returns instead of the tensor (a copy in other memory, a file
/// name), and calls `unpack` with it once for each backward of the op. For offloading, compression, statistics.
///
/// Both run without recording and without hooks. pack() sees every saved tensor, including parameters and indices, and
/// may return it unchanged. unpack() must return a tensor of the same shape, dtype and device, else Error; its values
/// are not checked, but if unpack() returns the saved tensor's own memory, an in-place change since is an Error as
/// usual. backward() frees packed values as it frees saved tensors. An exception of pack() reaches the caller of the
/// op, which is then not recorded; one of unpack() reaches the caller of backward(). An inner guard replaces an outer
/// one.
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
