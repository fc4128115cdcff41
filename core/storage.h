#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/device.h"
#include "core/stream.h"

namespace potluck {

/// A block of bytes on one device that all views of it share, with a version that counts in-place changes.
class Storage {
public:
    /// Allocates uninitialised bytes, counted under the running op. Pinned bytes are page-locked host memory of a CPU
    /// device that GPUs can copy from and to asynchronously. Throws OutOfMemory.
    Storage(Device device, std::int64_t bytes, bool pinned = false);
    /// Wraps bytes with another owner (a mapped file, a user's array); `release` is called once at the end.
    Storage(Device device, void* data, std::int64_t bytes, std::function<void()> release);
    ~Storage();
    Storage(const Storage&) = delete;
    Storage& operator=(const Storage&) = delete;

    Device device() const { return device_; }
    std::int64_t bytes() const { return bytes_; }
    std::byte* data() const { return data_; }
    /// False when the bytes have another owner (a mapped file, a user's array).
    bool owns_memory() const { return !release_; }
    bool is_pinned() const { return pinned_; }
    /// Whether a leaf that collects gradients lies (or lay) here: what is made of it is worth keeping, since it is used again.
    bool is_parameter() const { return is_parameter_.load(std::memory_order_relaxed); }
    void mark_parameter() { is_parameter_.store(true, std::memory_order_relaxed); }
    /// Delays the reuse of the bytes, or their return to their owner, until this work has ended.
    void keep_until(std::shared_ptr<const PendingWork> work);
    /// Call before the bytes are written in place: what the compute stream is given from now on comes after the copies that
    /// still use them (on a CPU device the host waits for these).
    void write_after_uses();

    /// Increases by one with every in-place change through any view. Backward compares it with the version at the time
    /// of saving.
    std::uint64_t version() const { return version_.load(std::memory_order_relaxed); }
    /// Continues the version count of the block that this one replaces.
    void succeed(const Storage& before) { version_.store(std::max(before.version(), version()) + 1); }
    void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

private:
    Device device_;
    std::int64_t bytes_;
    std::byte* data_ = nullptr;
    const char* op_ = "";  // the op that allocated the block
    bool pinned_ = false;
    std::mutex uses_mutex_;
    PendingWorks uses_;
    std::function<void()> release_;  // set when the bytes have another owner
    std::atomic<std::uint64_t> version_{0};
    std::atomic<bool> is_parameter_{false};
};

}  // namespace potluck
