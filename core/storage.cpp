#include "core/storage.h"

#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/op_scope.h"

namespace potluck {

Storage::Storage(Device device, std::int64_t bytes) : device_(device), bytes_(bytes) {
    if (bytes < 0) throw Error(OpScope::current(), fmt::format("a storage of {} bytes cannot be.", bytes));
    data_ = static_cast<std::byte*>(allocate_bytes(device, bytes, op_));
}

Storage::Storage(Device device, void* data, std::int64_t bytes, std::function<void()> release)
    : device_(device), bytes_(bytes), data_(static_cast<std::byte*>(data)) {
    if (bytes < 0) throw Error(OpScope::current(), fmt::format("a storage of {} bytes cannot be.", bytes));
    if (data == nullptr && bytes > 0)
        throw Error(OpScope::current(), "a storage over a null pointer cannot be.");
    release_ = release ? std::move(release) : [] {};
}

Storage::~Storage() {
    if (release_)
        release_();
    else
        free_bytes(device_, data_, bytes_, op_);
}

}  // namespace potluck
