#include "nn/train/shelf.h"

#include <utility>

#include "core/copies.h"
#include "core/op_scope.h"

namespace potluck {

Tensor copied_to(Device memory, const Tensor& x, CopyHandle& going) {
    const OpScope scope("offload");
    const Tensor from = detail::as_contiguous(x.detach());
    const bool pinned = memory.is_cpu() && !x.device().is_cpu();
    const Tensor to = Tensor::empty(x.shape(), {.dtype = x.dtype(), .device = memory, .pinned = pinned});
    going = copy_async(from, to);
    return to;
}

void Shelf::put(std::size_t place, const Tensor& x) {
    if (place >= places_.size()) places_.resize(place + 1);
    if (device_ == memory_) {
        places_[place] = {x.detach()};
        return;
    }
    CopyHandle going;  // dropped: the device's memory is free as soon as the copy has ended
    places_[place] = {copied_to(memory_, x, going)};
}

void Shelf::prefetch(std::size_t place) {
    if (device_ == memory_ || place >= places_.size()) return;
    Place& one = places_[place];
    if (!one.kept.defined() || one.here.defined()) return;
    const OpScope scope("offload");
    one.here = Tensor::empty(one.kept.shape(), {one.kept.dtype(), device_});
    one.coming = copy_async(one.kept, one.here);
}

Tensor Shelf::get(std::size_t place) {
    if (device_ == memory_) return places_[place].kept.detach();
    prefetch(place);
    Place& one = places_[place];
    one.coming.wait_on(StreamKind::compute);
    one.coming = CopyHandle();
    return std::exchange(one.here, Tensor());
}

Tensor Shelf::take(std::size_t place) {
    const Tensor x = get(place);
    places_[place] = Place();
    return x;
}

}  // namespace potluck
