#pragma once

// Internal: the memory of a piece of work, step by step.

#include <cstdint>
#include <vector>

#include "core/device.h"

namespace potluck {

/// Writes down while it lives what tensors of this thread allocate and free on a device. Traces nest: each sees all.
class MemoryTrace {
public:
    explicit MemoryTrace(Device device) noexcept;
    ~MemoryTrace();
    MemoryTrace(const MemoryTrace&) = delete;
    MemoryTrace& operator=(const MemoryTrace&) = delete;

    /// Bytes that are held more than at the start, after each allocation in turn.
    const std::vector<std::int64_t>& after_allocations() const { return after_allocations_; }
    /// Bytes that are held more than at the start, now.
    std::int64_t held() const { return held_; }

    /// Called by core/memory.cpp for each allocation (bytes above 0) and each release (below 0).
    static void count(Device device, std::int64_t bytes) noexcept;

private:
    Device device_;
    MemoryTrace* outer_;
    std::int64_t held_ = 0;
    std::vector<std::int64_t> after_allocations_;
};

}  // namespace potluck
