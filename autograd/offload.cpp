#include "autograd/offload.h"

#include <algorithm>
#include <any>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

#include "core/async_copy.h"
#include "core/capture.h"
#include "core/copies.h"
#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/tensor.h"

namespace potluck {

namespace detail {

/// A tensor that was moved. It lives as long as an op keeps it.
struct Offloaded {
    Tensor kept;  // where it was moved to
    Device home;
    std::weak_ptr<Storage> origin;
    std::uint64_t version;  // of the origin
    std::size_t number;     // among all tensors of the guard, in the order in which ops kept them
    int keepers = 1;        // ops that keep it
    int left = 0;           // of these, how many will still ask for it
    Tensor here = {};       // back again, or on its way
    CopyHandle coming = {};

    /// Whether somebody changed the tensor: the copy may have been on its way.
    bool was_changed() const {
        const auto alive = origin.lock();
        return alive != nullptr && alive->version() != version;
    }
    void start_back() {
        if (here.defined()) return;
        here = Tensor::empty(kept.shape(), {kept.dtype(), home});
        coming = copy_async(kept, here);
        left = keepers;
    }
};

/// All tensors that were moved within one guard.
class OffloadedTensors {
public:
    explicit OffloadedTensors(const OffloadOptions& options) : options_(options) {}

    /// Moves `x`, unless an op before has done so.
    std::shared_ptr<Offloaded> move_away(const Tensor& x) {
        const View view{x.storage().get(), x.dtype(), x.offset(), x.shape(), x.strides()};
        if (const auto known = known_[view].lock();
            known != nullptr && known->origin.lock() == x.storage() && !known->was_changed()) {
            ++known->keepers;
            return known;
        }
        const OpScope scope("offload");
        if (is_recording(x.device()))
            throw Error("offload",
                        "work that is recorded cannot keep its tensors elsewhere. Let the guard end before "
                        "capture().");
        const bool pinned = options_.to.is_cpu() && !x.device().is_cpu();
        const Tensor kept =
            Tensor::empty(x.shape(), {.dtype = x.dtype(), .device = options_.to, .pinned = pinned});
        // The handle is dropped: the memory at home is free as soon as the copy has ended.
        (void)copy_async(as_contiguous(x), kept);
        const auto moved = std::make_shared<Offloaded>(
            Offloaded{kept, x.device(), x.storage(), x.storage()->version(), next_++});
        tensors_[moved->number] = moved;
        known_[view] = moved;
        if (tensors_.size() >= sweep_at_) sweep();
        return moved;
    }

    /// The tensor, for one of the ops that keep it.
    Tensor take(Offloaded& tensor) {
        const OpScope scope("offload");
        if (tensor.was_changed())
            throw Error(
                "offload",
                fmt::format(
                    "a value saved for backward was changed in place since: {} {} is no longer at version "
                    "{}, which was saved. Change it before it is used, or change a clone().",
                    tensor.kept.dtype(), pretty(tensor.kept.shape()), tensor.version));
        tensor.start_back();
        for (std::size_t i = 1; i <= static_cast<std::size_t>(options_.read_ahead) && i <= tensor.number;
             ++i) {
            const auto before = tensors_.find(tensor.number - i);
            if (before == tensors_.end()) continue;
            if (const auto alive = before->second.lock(); alive != nullptr && !alive->was_changed())
                alive->start_back();
        }
        tensor.coming.wait_on(StreamKind::compute);
        const Tensor x = tensor.here;
        if (--tensor.left == 0) {
            tensor.here = Tensor();
            tensor.coming = CopyHandle();
        }
        return x;
    }

    bool stays(const Tensor& x) const {
        return x.device() == options_.to || x.bytes() < options_.smallest || x.storage()->is_parameter();
    }

private:
    /// Of a tensor, to find it again.
    using View = std::tuple<const Storage*, DType, std::int64_t, Shape, Strides>;

    /// Forgets tensors of graphs that are gone.
    void sweep() {
        std::erase_if(tensors_, [](const auto& entry) { return entry.second.expired(); });
        std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
        sweep_at_ = std::max<std::size_t>(256, 2 * tensors_.size());
    }

    OffloadOptions options_;
    std::size_t next_ = 0, sweep_at_ = 256;
    std::map<std::size_t, std::weak_ptr<Offloaded>> tensors_;  // by number
    std::map<View, std::weak_ptr<Offloaded>> known_;
};

}  // namespace detail

namespace {

/// Stands for a tensor that was moved.
struct PackedTensor {
    std::shared_ptr<detail::OffloadedTensors> tensors;
    std::shared_ptr<detail::Offloaded> tensor;
};

std::shared_ptr<detail::OffloadedTensors> checked(const OffloadOptions& options) {
    if (options.smallest < 0 || options.read_ahead < 0)
        throw Error("offload", fmt::format("smallest is {} and read_ahead is {}. They must not be negative.",
                                           options.smallest, options.read_ahead));
    return std::make_shared<detail::OffloadedTensors>(options);
}

}  // namespace

Offload::Offload(const OffloadOptions& options) : Offload(checked(options)) {}

Offload::Offload(const std::shared_ptr<detail::OffloadedTensors>& tensors)
    : hooks_(
          [tensors](const Tensor& x) {
              return tensors->stays(x) ? std::any(x) : std::any(PackedTensor{tensors, tensors->move_away(x)});
          },
          [](const std::any& packed) {
              if (const auto* x = std::any_cast<Tensor>(&packed)) return *x;
              const auto& moved = std::any_cast<const PackedTensor&>(packed);
              return moved.tensors->take(*moved.tensor);
          }) {}

}  // namespace potluck
