#include "nn/train/offload_store.h"

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

void OffloadStore::put(std::size_t place, const Tensor& x) {
    if (place >= entries_.size()) entries_.resize(place + 1);
    if (device_ == memory_) {
        entries_[place] = {x.detach()};
        return;
    }
    CopyHandle going;  // dropped: the device's memory is free as soon as the copy has ended
    entries_[place] = {copied_to(memory_, x, going)};
}

void OffloadStore::prefetch(std::size_t place) {
    // Between CPU devices a copy is done at once, so starting early gains nothing.
    if (!(device_.is_cpu() && memory_.is_cpu()) && place < entries_.size()) start_back(entries_[place]);
}

void OffloadStore::start_back(Entry& entry) const {
    if (!entry.kept.defined() || entry.here.defined()) return;
    const OpScope scope("offload");
    entry.here = Tensor::empty(entry.kept.shape(), {entry.kept.dtype(), device_});
    entry.coming = copy_async(entry.kept, entry.here);
}

Tensor OffloadStore::get(std::size_t place) {
    if (device_ == memory_) return entries_[place].kept.detach();
    Entry& one = entries_[place];
    start_back(one);
    one.coming.wait_on(StreamKind::compute);
    one.coming = CopyHandle();
    return std::exchange(one.here, Tensor());
}

Tensor OffloadStore::take(std::size_t place) {
    const Tensor x = get(place);
    entries_[place] = Entry();
    return x;
}

}  // namespace potluck
