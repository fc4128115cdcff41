#include "autograd/saved.h"

#include <algorithm>
#include <utility>

#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/format.h"

namespace potluck {

namespace {

thread_local SavedTensorHooks* running_hooks = nullptr;

/// While a hook runs, its ops are neither recorded nor passed to hooks.
class HookScope {
public:
    HookScope() : outer_(std::exchange(running_hooks, nullptr)) {}
    ~HookScope() { running_hooks = outer_; }
    HookScope(const HookScope&) = delete;
    HookScope& operator=(const HookScope&) = delete;

private:
    SavedTensorHooks* outer_;
    NoGrad no_grad_;
};

}  // namespace

SavedTensorHooks::SavedTensorHooks(Pack pack, Unpack unpack)
    : pack_(std::move(pack)), unpack_(std::move(unpack)), outer_(running_hooks) {
    if (!pack_ || !unpack_)
        throw Error("SavedTensorHooks", "a hook is empty. Give both: how to pack, and how to unpack.");
    running_hooks = this;
}

SavedTensorHooks::~SavedTensorHooks() { running_hooks = outer_; }

Saved::Saved(Node& owner, const Tensor& output, std::vector<Tensor> tensors) : owner_(&owner) {
    slots_.reserve(tensors.size());
    for (Tensor& tensor : tensors) {
        Slot slot;
        slot.is_output = tensor.defined() && tensor.is_same(output);
        slot.tensor = slot.is_output ? tensor.detach() : std::move(tensor);
        if (slot.tensor.defined()) {
            slot.version = slot.tensor.storage()->version();
            if (const SavedTensorHooks* hooks = running_hooks; hooks != nullptr) {
                const HookScope scope;
                const Tensor& x = slot.tensor;
                slot.packed = std::make_unique<Packed>(Packed{hooks->pack_(x), hooks->unpack_, x.shape(),
                                                              x.dtype(), x.device(), x.storage(), x.node()});
                slot.tensor = Tensor();
            }
        }
        slots_.push_back(std::move(slot));
    }
}

const Saved::Slot& Saved::slot(std::size_t index) const {
    if (freed_)
        throw Error(owner_->name,
                    "what was saved for backward has been freed by an earlier backward(). Pass retain_graph "
                    "= true to "
                    "the earlier one.");
    if (index >= slots_.size())
        throw Error(owner_ == nullptr ? "saved" : owner_->name,
                    fmt::format("saved tensor {} was asked for, but only {} were given to record().", index,
                                slots_.size()));
    return slots_[index];
}

void Saved::check_version(const Slot& slot, const Tensor& tensor) const {
    if (!tensor.defined() || tensor.storage()->version() == slot.version) return;
    throw Error(
        owner_->name,
        fmt::format("a value saved for backward was changed in place since: {} {} {} is at version {}, but "
                    "version {} was saved. Change it before it is used, or change a clone().",
                    slot.is_output ? "the result" : "an operand", tensor.dtype(), pretty(tensor.shape()),
                    tensor.storage()->version(), slot.version));
}

Tensor Saved::read(const Slot& slot) const {
    if (slot.packed == nullptr) {
        check_version(slot, slot.tensor);
        return slot.tensor;
    }
    Packed& packed = *slot.packed;
    if (!packed.unpacked.defined()) {
        const HookScope scope;
        const Tensor x = packed.unpack(packed.content);
        if (!x.defined() || x.shape() != packed.shape || x.dtype() != packed.dtype ||
            !(x.device() == packed.device))
            throw Error(
                owner_->name,
                fmt::format("an unpack hook must return {} {} on {}, as was packed, but returned {}.",
                            packed.dtype, pretty(packed.shape), packed.device,
                            x.defined() ? fmt::format("{} {} on {}", x.dtype(), pretty(x.shape()), x.device())
                                        : "an undefined tensor"));
        packed.unpacked = x.detach();
        if (packed.node != nullptr) packed.unpacked.set_node(packed.node);
    }
    if (packed.unpacked.storage() == packed.storage.lock()) check_version(slot, packed.unpacked);
    return packed.unpacked;
}

Tensor Saved::operator[](std::size_t index) const {
    const Slot& kept = slot(index);
    Tensor tensor = read(kept);
    if (!kept.is_output || !is_grad_enabled()) return tensor;
    // For second derivatives the output needs its node again.
    Tensor output = tensor.detach();
    output.set_node(owner_->shared_from_this());
    return output;
}

Tensor Saved::reusable(std::size_t index) const {
    const Slot& kept = slot(index);
    check_version(kept, kept.tensor);
    const bool safe = freed_after_use_ && kept.tensor.defined() && kept.tensor.is_unique() &&
                      kept.tensor.storage()->owns_memory() && !detail::overlaps_itself(kept.tensor);
    return safe ? kept.tensor : Tensor();
}

void Saved::forget_unpacked() const {
    for (const Slot& slot : slots_)
        if (slot.packed != nullptr) slot.packed->unpacked = Tensor();
}

std::vector<const Storage*> Saved::storages() const {
    std::vector<const Storage*> found;
    for (const Slot& slot : slots_) {
        const Tensor* tensor =
            slot.packed == nullptr ? &slot.tensor : std::any_cast<Tensor>(&slot.packed->content);
        if (tensor == nullptr || !tensor->defined()) continue;
        const Storage* storage = tensor->storage().get();
        if (std::find(found.begin(), found.end(), storage) == found.end()) found.push_back(storage);
    }
    return found;
}

std::int64_t Saved::bytes() const {
    std::int64_t total = 0;
    for (const Storage* storage : storages()) total += storage->bytes();
    return total;
}

}  // namespace potluck
