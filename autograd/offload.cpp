#include "autograd/offload.h"

#include <any>
#include <cstddef>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "core/async_copy.h"
#include "core/copies.h"
#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/tensor.h"

namespace potluck {

namespace detail {

/// All tensors that were moved within one guard, in the order in which ops kept them.
class OffloadedTensors {
public:
    explicit OffloadedTensors(const OffloadOptions& options) : options_(options) {}

    /// Moves `x`, unless an op before has done so. Returns its place.
    std::size_t move_away(const Tensor& x) {
        const View view{x.storage().get(), x.dtype(), x.offset(), x.shape(), x.strides()};
        const auto known = places_.find(view);
        if (known != places_.end() && is_unchanged(tensors_[known->second], x)) {
            ++tensors_[known->second].keepers;
            return known->second;
        }
        const OpScope scope("offload");
        const bool pinned = options_.to.is_cpu() && !x.device().is_cpu();
        const Tensor kept =
            Tensor::empty(x.shape(), {.dtype = x.dtype(), .device = options_.to, .pinned = pinned});
        // The handle is dropped: the memory at home is free as soon as the copy has ended.
        (void)copy_async(as_contiguous(x), kept);
        tensors_.push_back({kept, x.device(), x.storage(), x.storage()->version()});
        places_[view] = tensors_.size() - 1;
        return tensors_.size() - 1;
    }

    /// The tensor at a place, for one of the ops that keep it.
    Tensor take(std::size_t place) {
        const OpScope scope("offload");
        start_back(tensors_[place]);
        for (std::size_t i = 1; i <= static_cast<std::size_t>(options_.read_ahead) && i <= place; ++i)
            start_back(tensors_[place - i]);
        Offloaded& tensor = tensors_[place];
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
    struct Offloaded {
        Tensor kept;  // where it was moved to
        Device home;
        std::weak_ptr<Storage> origin;
        std::uint64_t version;  // of the origin
        int keepers = 1;        // ops that keep it
        int left = 0;           // of these, how many will still ask for it
        Tensor here = {};       // back again, or on its way
        CopyHandle coming = {};
    };
    /// Of a tensor, to find it again.
    using View = std::tuple<const Storage*, DType, std::int64_t, Shape, Strides>;

    static bool is_unchanged(const Offloaded& tensor, const Tensor& x) {
        return tensor.origin.lock() == x.storage() && tensor.version == x.storage()->version();
    }

    static void start_back(Offloaded& tensor) {
        if (tensor.here.defined()) return;
        // The copy may have been on its way when the origin was changed.
        if (const auto origin = tensor.origin.lock();
            origin != nullptr && origin->version() != tensor.version)
            throw Error(
                "offload",
                fmt::format(
                    "a value saved for backward was changed in place since: {} {} is at version {}, but "
                    "version {} was saved. Change it before it is used, or change a clone().",
                    tensor.kept.dtype(), pretty(tensor.kept.shape()), origin->version(), tensor.version));
        tensor.here = Tensor::empty(tensor.kept.shape(), {tensor.kept.dtype(), tensor.home});
        tensor.coming = copy_async(tensor.kept, tensor.here);
        tensor.left = tensor.keepers;
    }

    OffloadOptions options_;
    std::deque<Offloaded> tensors_;
    std::map<View, std::size_t> places_;
};

}  // namespace detail

namespace {

/// Stands for a tensor that was moved.
struct Place {
    std::shared_ptr<detail::OffloadedTensors> tensors;
    std::size_t index;
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
              return tensors->stays(x) ? std::any(x) : std::any(Place{tensors, tensors->move_away(x)});
          },
          [](const std::any& packed) {
              if (const auto* x = std::any_cast<Tensor>(&packed)) return *x;
              const auto& place = std::any_cast<const Place&>(packed);
              return place.tensors->take(place.index);
          }) {}

}  // namespace potluck
