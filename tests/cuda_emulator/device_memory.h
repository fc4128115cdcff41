#pragma once

// Internal: allocations in the memory of one device.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>

/// A memory pool of the runtime.
struct CUmemPoolHandle_st {
    int device = 0;
    std::uint64_t used = 0;
    std::uint64_t reserved = 0;  // in use, or kept for reuse
    std::uint64_t most_used = 0;
    std::uint64_t most_reserved = 0;
    std::uint64_t release_threshold = 0;  // a synchronisation frees what exceeds this
    int reuse_flags[3] = {1, 1, 1};
    std::set<int> open_to{};  // other devices that can copy to and from it
};

namespace potluck::emulator {

struct Allocation {
    std::uint64_t offset = 0;            // in the device's range of addresses
    std::uint64_t bytes = 0;             // as requested
    std::uint64_t extent = 0;            // including the gap after it
    const char* op = "";                 // the op that allocated it
    CUmemPoolHandle_st* pool = nullptr;  // null: cudaMalloc
    std::uint64_t number = 0;            // counts allocations of the process
    const char* freed_by = "";
};

/// Ranges of free addresses. Neighbouring ranges are merged.
class FreeAddresses {
public:
    void add(std::uint64_t offset, std::uint64_t size);
    /// Takes the start of the smallest range that is large enough; false when there is none.
    bool take(std::uint64_t size, std::uint64_t& offset);
    const std::map<std::uint64_t, std::uint64_t>& stretches() const { return by_offset_; }

private:
    std::map<std::uint64_t, std::uint64_t> by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
};

class DeviceMemory {
public:
    DeviceMemory(int device, std::uint64_t bytes) : device_(device), total_(bytes) {}

    /// nullptr when the device has no memory left. Without a pool the memory is not shared with later allocations.
    void* allocate(std::uint64_t bytes, CUmemPoolHandle_st* pool, const char* op);
    /// False for an address that is not the start of a live allocation.
    bool release(std::uintptr_t address, const char* op);
    /// The live allocation that contains this address; nullptr if none does.
    const Allocation* find(std::uintptr_t address) const;
    const Allocation* find_freed(std::uintptr_t address) const;
    /// Describes where the address is: in which allocation, or near which.
    std::string describe(std::uintptr_t address) const;

    /// Marks the bytes of an allocation as not present (memory of a graph that is not running) or as never written.
    void set_present(const Allocation& allocation, bool present);

    void trim(CUmemPoolHandle_st& pool, std::uint64_t keep);
    std::uint64_t total_bytes() const { return total_; }
    std::uint64_t free_bytes() const { return total_ - plain_ - reserved_; }
    /// False when more is in use.
    bool set_total_bytes(std::uint64_t bytes);
    const std::map<std::uint64_t, Allocation>& live() const { return live_; }

private:
    std::uintptr_t address_of(std::uint64_t offset) const;
    std::uint64_t offset_of(std::uintptr_t address) const;
    bool reserve(std::uint64_t bytes, CUmemPoolHandle_st* pool);

    int device_;
    std::uint64_t total_;
    std::uint64_t plain_ = 0;     // cudaMalloc
    std::uint64_t reserved_ = 0;  // by all pools
    std::map<std::uint64_t, Allocation> live_;
    // Freed addresses are not reused for a while, so that late accesses are detected.
    std::map<std::uint64_t, Allocation> resting_;
    std::deque<std::uint64_t> resting_order_;
    std::uint64_t resting_bytes_ = 0;
    FreeAddresses free_;
    std::uint64_t idle_ = 0;        // freed since pages were last returned to the system
    std::uint64_t frontier_ = 256;  // never used beyond; address 0 of the range stays unused
};

}  // namespace potluck::emulator
