// The default implementations of a device's functions.

#include "core/backend.h"

#include <cstdlib>

#include "core/error.h"
#include "core/op_scope.h"

namespace potluck {

void Backend::release_after(void* data, std::int64_t bytes, const PendingWorks& uses) noexcept {
    for (const auto& use : uses) {
        try {
            use->wait();
        } catch (...) {  // failed work no longer uses the memory
        }
    }
    release(data, bytes);
}

void* Backend::allocate_pinned(std::int64_t bytes) {
    return std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64));
}

void Backend::release_pinned(void* data, std::int64_t) noexcept { std::free(data); }

std::shared_ptr<const PendingWork> Backend::start_copy(const Tensor& from, Tensor& to, StreamKind) {
    if (from.device().is_cpu()) {
        backend(to.device()).copy_from_host(to.raw_data(), from.raw_data(), from.bytes());
    } else if (to.device().is_cpu()) {
        backend(from.device()).copy_to_host(to.raw_data(), from.raw_data(), from.bytes());
    } else {
        const Tensor host = Tensor::empty(from.shape(), {from.dtype(), Device::cpu(), /*pinned=*/true});
        backend(from.device()).copy_to_host(host.raw_data(), from.raw_data(), from.bytes());
        backend(to.device()).copy_from_host(to.raw_data(), host.raw_data(), from.bytes());
    }
    return nullptr;
}

}  // namespace potluck
