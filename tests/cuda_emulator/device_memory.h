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
    std::uint64_t reserved = 0;  // used, and kept for later
    std::uint64_t most_used = 0;
    std::uint64_t most_reserved = 0;
    std::uint64_t release_threshold = 0;  // more than this is given back at a synchronisation
    int reuse_flags[3] = {1, 1, 1};
    std::set<int> open_to{};  // other devices whose copies reach it
};

namespace potluck::emulator {

struct Allocation {
    std::uint64_t offset = 0;            // in the device's stretch of addresses
    std::uint64_t bytes = 0;             // as asked for
    std::uint64_t extent = 0;            // with the gap behind it
    const char* op = "";                 // who asked
    CUmemPoolHandle_st* pool = nullptr;  // none: cudaMalloc
    std::uint64_t number = 0;            // counts allocations of the process
    const char* freed_by = "";
};

/// Stretches of free addresses. Neighbours are joined.
class FreeAddresses {
public:
    void add(std::uint64_t offset, std::uint64_t size);
    /// The begin of the smallest stretch that is large enough, cut to size; false when there is none.
    bool take(std::uint64_t size, std::uint64_t& offset);
    const std::map<std::uint64_t, std::uint64_t>& stretches() const { return by_offset_; }

private:
    std::map<std::uint64_t, std::uint64_t> by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
};

class DeviceMemory {
public:
    DeviceMemory(int device, std::uint64_t bytes) : device_(device), total_(bytes) {}

    /// nullptr when the device has no memory left. Without a pool the memory is the caller's alone.
    void* allocate(std::uint64_t bytes, CUmemPoolHandle_st* pool, const char* op);
    /// False for an address that is not the begin of a live allocation.
    bool release(std::uintptr_t address, const char* op);
    /// The live allocation that has this address; nullptr for none.
    const Allocation* find(std::uintptr_t address) const;
    const Allocation* find_freed(std::uintptr_t address) const;
    /// In words, where the address lies: in which allocation, or near which.
    std::string describe(std::uintptr_t address) const;

    /// Marks the bytes of an allocation as not there (memory of a graph that does not run) or as never written.
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
    // Freed addresses rest for a while, so that a late use is seen.
    std::map<std::uint64_t, Allocation> resting_;
    std::deque<std::uint64_t> resting_order_;
    std::uint64_t resting_bytes_ = 0;
    FreeAddresses free_;
    std::uint64_t idle_ = 0;        // became free since pages were given back to the system
    std::uint64_t frontier_ = 256;  // never used beyond; address 0 of the stretch stays unused
};

}  // namespace potluck::emulator
