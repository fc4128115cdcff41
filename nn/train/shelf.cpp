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
    // Between CPU devices a copy is done at once, so starting early gains nothing.
    if (!(device_.is_cpu() && memory_.is_cpu()) && place < places_.size()) start_back(places_[place]);
}

void Shelf::start_back(Place& place) const {
    if (!place.kept.defined() || place.here.defined()) return;
    const OpScope scope("offload");
    place.here = Tensor::empty(place.kept.shape(), {place.kept.dtype(), device_});
    place.coming = copy_async(place.kept, place.here);
}

Tensor Shelf::get(std::size_t place) {
    if (device_ == memory_) return places_[place].kept.detach();
    Place& one = places_[place];
    start_back(one);
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
