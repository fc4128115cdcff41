#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/device.h"
#include "core/stream.h"

namespace potluck {

/// Memory usage of one device by its tensors, in bytes.
struct MemoryStatistics {
    std::int64_t current = 0;  // held by live tensors
    std::int64_t peak = 0;     // the most that live tensors held since the start or reset_peak_memory()
    std::int64_t cached = 0;   // freed by tensors, kept for the next allocation of the same size
    std::int64_t cap = 0;      // limit for current; 0 means no limit
    std::map<std::string, std::int64_t> current_by_op;  // held now, by the op that allocated it
    std::map<std::string, std::int64_t> peak_by_op;     // held at the moment of the peak
};

MemoryStatistics memory_statistics(Device device = Device::cpu());
void reset_peak_memory(Device device = Device::cpu());
/// While it lives, what tensors hold on `device`, those of other threads included, does not raise its peak: for what a
/// program measures and does not need.
class PausedPeak {
public:
    explicit PausedPeak(Device device = Device::cpu());
    ~PausedPeak();
    PausedPeak(const PausedPeak&) = delete;
    PausedPeak& operator=(const PausedPeak&) = delete;

private:
    Device device_;
};
/// Limits the bytes that live tensors may hold on `device`; 0 removes the limit. An allocation beyond it throws
/// OutOfMemory and changes nothing.
void set_memory_cap(std::int64_t bytes, Device device = Device::cpu());
/// Returns cached memory to the system.
void release_cached_memory(Device device = Device::cpu());
/// A readable report: current, peak, and the ops that hold the most.
std::string memory_report(Device device = Device::cpu());

/// Allocates through the device's cache and counts the memory under the name of the running op. Throws OutOfMemory.
/// At least 64-byte aligned. `bytes` 0 gives nullptr. Used by Storage.
void* allocate_bytes(Device device, std::int64_t bytes, const char*& op, bool pinned = false);
/// `uses`: copies that may still access the memory.
void free_bytes(Device device, void* data, std::int64_t bytes, const char* op, bool pinned = false,
                PendingWorks uses = {}) noexcept;

}  // namespace potluck
