#include "tests/cuda_emulator/device_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tests/cuda_emulator/arena.h"

namespace potluck::emulator {
namespace {

constexpr std::uint64_t alignment = 256;
constexpr std::uint64_t gap = 256;                               // after each allocation
constexpr std::uint64_t most_resting = std::uint64_t{64} << 20;  // bytes
constexpr std::uint64_t most_idle = std::uint64_t{512} << 20;    // freed since pages were last returned

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

std::uint64_t next_number = 1;

}  // namespace

void FreeAddresses::add(std::uint64_t offset, std::uint64_t size) {
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            offset = before->first;
            size += before->second;
            by_size_.erase({before->second, before->first});
            by_offset_.erase(before);
        }
    }
    if (after != by_offset_.end() && offset + size == after->first) {
        size += after->second;
        by_size_.erase({after->second, after->first});
        by_offset_.erase(after);
    }
    by_offset_.emplace(offset, size);
    by_size_.emplace(size, offset);
}

bool FreeAddresses::take(std::uint64_t size, std::uint64_t& offset) {
    const auto found = by_size_.lower_bound({size, 0});
    if (found == by_size_.end()) return false;
    const auto [found_size, found_offset] = *found;
    by_size_.erase(found);
    by_offset_.erase(found_offset);
    offset = found_offset;
    if (found_size > size) add(found_offset + size, found_size - size);
    return true;
}

std::uintptr_t DeviceMemory::address_of(std::uint64_t offset) const {
    return arena.begin + static_cast<std::uint64_t>(device_) * arena_bytes + offset;
}
std::uint64_t DeviceMemory::offset_of(std::uintptr_t address) const {
    return address - arena.begin - static_cast<std::uint64_t>(device_) * arena_bytes;
}

bool DeviceMemory::reserve(std::uint64_t bytes, CUmemPoolHandle_st* pool) {
    if (pool == nullptr) {
        if (bytes > free_bytes()) return false;
        plain_ += bytes;
        return true;
    }
    if (pool->used + bytes > pool->reserved) {
        const std::uint64_t more = pool->used + bytes - pool->reserved;
        if (more > free_bytes()) return false;
        pool->reserved += more;
        reserved_ += more;
        pool->most_reserved = std::max(pool->most_reserved, pool->reserved);
    }
    pool->used += bytes;
    pool->most_used = std::max(pool->most_used, pool->used);
    return true;
}

void* DeviceMemory::allocate(std::uint64_t bytes, CUmemPoolHandle_st* pool, const char* op) {
    if (bytes > total_) return nullptr;
    const std::uint64_t size = round_up(bytes, alignment);
    if (size + gap > arena_bytes - frontier_ || !reserve(size, pool)) return nullptr;
    Allocation allocation;
    allocation.bytes = bytes;
    allocation.extent = size + gap;
    allocation.op = op;
    allocation.pool = pool;
    allocation.number = next_number++;
    if (!free_.take(allocation.extent, allocation.offset)) {
        allocation.offset = frontier_;
        frontier_ += allocation.extent;
        extend_memory(device_, frontier_);
    }
    set_present(allocation, true);
    live_.emplace(allocation.offset, allocation);
    return reinterpret_cast<void*>(address_of(allocation.offset));
}

void DeviceMemory::set_present(const Allocation& allocation, bool present) {
    std::memset(arena.shadow + (address_of(allocation.offset) - arena.begin),
                present ? (arena.tracks_writes ? allocated : written) : unallocated, allocation.bytes);
}

bool DeviceMemory::release(std::uintptr_t address, const char* op) {
    const auto found = live_.find(offset_of(address));
    if (found == live_.end()) return false;
    Allocation allocation = found->second;
    live_.erase(found);
    set_present(allocation, false);
    const std::uint64_t size = round_up(allocation.bytes, alignment);
    if (allocation.pool == nullptr)
        plain_ -= size;
    else
        allocation.pool->used -= size;

    allocation.freed_by = op;
    resting_bytes_ += allocation.extent;
    resting_order_.push_back(allocation.offset);
    resting_.emplace(allocation.offset, allocation);
    while (resting_bytes_ > most_resting) {
        const auto oldest = resting_.find(resting_order_.front());
        resting_order_.pop_front();
        resting_bytes_ -= oldest->second.extent;
        free_.add(oldest->first, oldest->second.extent);
        idle_ += oldest->second.extent;
        resting_.erase(oldest);
    }
    if (idle_ > most_idle) {
        for (const auto& [offset, extent] : free_.stretches()) drop_pages(address_of(offset), extent);
        idle_ = 0;
    }
    return true;
}

const Allocation* DeviceMemory::find(std::uintptr_t address) const {
    const std::uint64_t offset = offset_of(address);
    auto after = live_.upper_bound(offset);
    if (after == live_.begin()) return nullptr;
    const Allocation& before = std::prev(after)->second;
    return offset < before.offset + before.bytes ? &before : nullptr;
}

const Allocation* DeviceMemory::find_freed(std::uintptr_t address) const {
    const std::uint64_t offset = offset_of(address);
    auto after = resting_.upper_bound(offset);
    if (after == resting_.begin()) return nullptr;
    const Allocation& before = std::prev(after)->second;
    return offset < before.offset + before.bytes ? &before : nullptr;
}

std::string DeviceMemory::describe(std::uintptr_t address) const {
    const std::uint64_t offset = offset_of(address);
    const auto name = [](const Allocation& allocation) {
        return fmt::format("allocation {} ({} bytes, made by {})", allocation.number, allocation.bytes,
                           allocation.op);
    };
    if (const Allocation* inside = find(address))
        return fmt::format("byte {} of {} on cuda:{}", offset - inside->offset, name(*inside), device_);
    if (const Allocation* freed = find_freed(address))
        return fmt::format("byte {} of {} on cuda:{}, which was freed by {}", offset - freed->offset,
                           name(*freed), device_, freed->freed_by);
    const auto after = live_.upper_bound(offset);
    const Allocation* before = after == live_.begin() ? nullptr : &std::prev(after)->second;
    const std::uint64_t behind = before == nullptr ? 0 : offset - before->offset - before->bytes;
    if (before != nullptr && (after == live_.end() || behind <= after->first - offset))
        return fmt::format("{} bytes behind the end of {} on cuda:{}", behind, name(*before), device_);
    if (after != live_.end())
        return fmt::format("{} bytes before the begin of {} on cuda:{}", after->first - offset,
                           name(after->second), device_);
    return fmt::format("no allocation near it on cuda:{}", device_);
}

bool DeviceMemory::set_total_bytes(std::uint64_t bytes) {
    if (bytes < plain_ + reserved_) return false;
    total_ = bytes;
    return true;
}

void DeviceMemory::trim(CUmemPoolHandle_st& pool, std::uint64_t keep) {
    const std::uint64_t target = std::max(pool.used, keep);
    if (target >= pool.reserved) return;
    reserved_ -= pool.reserved - target;
    pool.reserved = target;
}

}  // namespace potluck::emulator
