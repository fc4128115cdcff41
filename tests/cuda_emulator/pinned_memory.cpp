#include "tests/cuda_emulator/pinned_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

bool overlap(std::uintptr_t a, std::size_t a_bytes, std::uintptr_t b, std::size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

bool PinnedMemory::remove(std::uintptr_t address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return false;
    const std::size_t bytes = found->second.bytes;
    std::erase_if(in_flight_,
                  [&](const Copy& copy) { return overlap(copy.begin, copy.bytes, address, bytes); });
    blocks_.erase(found);
    return true;
}

const PinnedMemory::Block* PinnedMemory::find(std::uintptr_t address) const {
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return nullptr;
    const auto& [begin, block] = *std::prev(after);
    return address - begin < block.bytes ? &block : nullptr;
}

void PinnedMemory::arrive(Copy& copy) {
    if (copy.to_host && !copy.has_arrived)
        std::memcpy(reinterpret_cast<void*>(copy.begin), copy.values.data(), copy.bytes);
    copy.has_arrived = true;
}

void PinnedMemory::follow(std::uintptr_t begin, std::size_t bytes, bool write) {
    for (Copy& copy : in_flight_) {
        if (!overlap(copy.begin, copy.bytes, begin, bytes) || (!write && !copy.to_host)) continue;
        if (running.clock[copy.slot] < copy.serial)
            stop(FaultKind::missing_order,
                 fmt::format(
                     "missing order between streams: {} {} pinned memory that {} {}, and nothing makes "
                     "the one wait for the other",
                     describe_running(), write ? "writes" : "reads", describe_operation(copy.serial),
                     copy.to_host ? "writes" : "reads"));
        arrive(copy);
    }
}

void PinnedMemory::read(const void* from, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    if (find(begin) == nullptr) return;
    follow(begin, bytes, false);
    const auto* values = static_cast<const std::byte*>(from);
    in_flight_.push_back({begin, bytes, running.slot, running.serial, false, {values, values + bytes}});
}

void PinnedMemory::write(void* to, const void* late, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(to);
    if (find(begin) == nullptr) {
        std::memcpy(to, late, bytes);
        return;
    }
    follow(begin, bytes, true);
    const auto* values = static_cast<const std::byte*>(late);
    std::erase_if(in_flight_, [&](const Copy& copy) {  // ordered before this copy, and overwritten by it
        return copy.begin >= begin && copy.begin + copy.bytes <= begin + bytes;
    });
    in_flight_.push_back({begin, bytes, running.slot, running.serial, true, {values, values + bytes}});
    std::memset(to, 0xff, bytes);  // NaN in every floating dtype
}

void PinnedMemory::host_waited() {
    const auto has_ended = [&host = state().host_clock](const Copy& copy) {
        return copy.slot < host.size() && host[copy.slot] >= copy.serial;
    };
    for (Copy& copy : in_flight_) {
        if (!has_ended(copy)) continue;
        const bool is_overwritten = std::any_of(in_flight_.begin(), in_flight_.end(), [&](const Copy& other) {
            return other.to_host && other.serial > copy.serial &&
                   overlap(other.begin, other.bytes, copy.begin, copy.bytes);
        });
        if (!copy.to_host && !is_overwritten &&
            std::memcmp(reinterpret_cast<const void*>(copy.begin), copy.values.data(), copy.bytes) != 0)
            report(FaultKind::missing_order,
                   fmt::format("missing order: the host changed pinned memory before it waited for {}, which "
                               "reads it",
                               describe_operation(copy.serial)));
        arrive(copy);
    }
    std::erase_if(in_flight_, has_ended);
}

std::uint32_t PinnedMemory::copy_in_flight(std::uintptr_t address) const {
    const Block* block = find(address);
    if (block == nullptr) return 0;
    std::uint32_t newest = 0;
    for (const Copy& copy : in_flight_)
        if (overlap(copy.begin, copy.bytes, address, block->bytes)) newest = std::max(newest, copy.serial);
    return newest;
}

}  // namespace potluck::emulator
