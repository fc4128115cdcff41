#include "core/storage.h"

#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/op_scope.h"

namespace potluck {

Storage::Storage(Device device, std::int64_t bytes, bool pinned)
    : device_(device), bytes_(bytes), pinned_(pinned) {
    if (pinned && !device.is_cpu())
        throw Error(OpScope::current(),
                    fmt::format("memory of {} cannot be pinned: only host memory can. Ask for it on a "
                                "CPU device.",
                                device));
    if (bytes < 0) throw Error(OpScope::current(), fmt::format("a storage cannot have {} bytes.", bytes));
    data_ = static_cast<std::byte*>(allocate_bytes(device, bytes, op_, pinned));
}

Storage::Storage(Device device, void* data, std::int64_t bytes, std::function<void()> release)
    : device_(device), bytes_(bytes), data_(static_cast<std::byte*>(data)) {
    if (bytes < 0) throw Error(OpScope::current(), fmt::format("a storage cannot have {} bytes.", bytes));
    if (data == nullptr && bytes > 0)
        throw Error(OpScope::current(), "a storage cannot wrap a null pointer.");
    release_ = release ? std::move(release) : [] {};
}

void Storage::keep_until(std::shared_ptr<const PendingWork> work) {
    const std::lock_guard lock(uses_mutex_);
    std::erase_if(uses_, [](const auto& use) { return use->is_done(); });
    uses_.push_back(std::move(work));
}

void Storage::write_after_uses() {
    PendingWorks uses;
    {
        const std::lock_guard lock(uses_mutex_);
        if (uses_.empty()) return;
        std::erase_if(uses_, [](const auto& use) { return use->is_done(); });
        uses = uses_;
    }
    for (const auto& use : uses) {
        if (device_.is_cpu())
            use->wait();
        else
            use->block(device_, StreamKind::compute);
    }
}

Storage::~Storage() {
    std::erase_if(uses_, [](const auto& use) { return use->is_done(); });
    if (!release_) {
        free_bytes(device_, data_, bytes_, op_, pinned_, std::move(uses_));
        return;
    }
    for (const auto& use : uses_) {
        try {
            use->wait();
        } catch (...) {  // failed work no longer uses the memory
        }
    }
    release_();
}

}  // namespace potluck
