#include "core/memory.h"

#include <algorithm>

#include "core/backend.h"
#include "core/cpu/free_memory.h"
#include "core/device_registry.h"
#include "core/error.h"
#include "core/format.h"
#include "core/memory_book.h"
#include "core/memory_limit.h"
#include "core/memory_trace.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

/// Blocks are whole cache lines, large ones whole pages, so that nearly equal sizes can share a cached block.
std::int64_t block_size_of(std::int64_t bytes) {
    const std::int64_t grain = bytes < (std::int64_t{1} << 16) ? 64 : 4096;
    return (bytes + grain - 1) / grain * grain;
}

std::string in_units(std::int64_t bytes) {
    const auto value = static_cast<double>(bytes);
    if (bytes < 1 << 10) return fmt::format("{} bytes", bytes);
    if (bytes < 1 << 20) return fmt::format("{:.1f} KiB", value / 0x1p10);
    if (bytes < 1 << 30) return fmt::format("{:.1f} MiB", value / 0x1p20);
    return fmt::format("{:.2f} GiB", value / 0x1p30);
}

/// "linear 1.20 GiB, gelu 800.0 MiB, ...", largest first.
std::string largest_holdings(const std::map<std::string, std::int64_t>& by_op, std::size_t how_many) {
    std::vector<std::pair<std::string, std::int64_t>> sorted(by_op.begin(), by_op.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    std::string text;
    for (std::size_t i = 0; i < std::min(how_many, sorted.size()); ++i)
        text += fmt::format("{}{} {}", i == 0 ? "" : ", ", sorted[i].first, in_units(sorted[i].second));
    if (sorted.size() > how_many) text += fmt::format(", and {} more", sorted.size() - how_many);
    return text;
}

template <class Holdings>
std::map<std::string, std::int64_t> by_name(const Holdings& holdings) {
    std::map<std::string, std::int64_t> result;
    for (const auto& [op, bytes] : holdings)
        if (bytes != 0) result[op] += bytes;
    return result;
}

}  // namespace

void* MemoryBook::allocate(std::int64_t bytes, const char* op, bool pinned) {
    const std::lock_guard lock(mutex_);
    if (cap_ != 0 && bytes > cap_ - current_) throw_out_of_memory(bytes, op, true);
    held_.reserve(held_.size() + 1);  // count() below must not fail once the block is allocated
    put_away_waiting(false);

    const std::int64_t block = block_size_of(bytes);
    void* data = take_cached(block, pinned);
    if (data == nullptr) {
        shrink_cache(footprint_limit() - live_blocks_ - block);
        data = take_fresh(block, pinned);
    }
    if (data == nullptr) {
        put_away_waiting(true);
        shrink_cache(0);
        backend_.release_pool();
        data = take_fresh(block, pinned);
    }
    if (data == nullptr) throw_out_of_memory(bytes, op, false);

    count(op, bytes);
    live_blocks_ += block;
    high_water_ = std::max(high_water_, live_blocks_);
    if (current_ > peak_ && peak_pauses_ == 0) {
        peak_ = current_;
        at_peak_ = true;
    }
    return data;
}

void MemoryBook::free(void* data, std::int64_t bytes, const char* op, bool pinned,
                      PendingWorks uses) noexcept {
    const std::lock_guard lock(mutex_);
    keep_peak_holdings();
    count(op, -bytes);
    put_away_waiting(false);

    const std::int64_t block = block_size_of(bytes);
    if (uses.empty()) return put_away(data, block, pinned);
    if (backend_.pools_memory()) {
        live_blocks_ -= block;
        return backend_.release_after(data, block, uses);
    }
    try {
        waiting_.push_back({data, block, pinned, {}});
        waiting_.back().uses = std::move(uses);
    } catch (...) {  // no memory for the list: leaking the block is better than using it twice
    }
}

void MemoryBook::keep_peak_holdings() noexcept {
    if (!std::exchange(at_peak_, false)) return;
    try {
        peak_held_ = held_;
    } catch (...) {  // no memory for a statistic: it stays empty
        peak_held_.clear();
    }
}

void MemoryBook::pause_peak() {
    const std::lock_guard lock(mutex_);
    keep_peak_holdings();
    ++peak_pauses_;
}

void MemoryBook::resume_peak() noexcept {
    const std::lock_guard lock(mutex_);
    --peak_pauses_;
}

void MemoryBook::put_away(void* data, std::int64_t block, bool pinned) noexcept {
    live_blocks_ -= block;
    if (!backend_.pools_memory() && live_blocks_ + cached_ + block <= footprint_limit()) {
        try {
            cache_[pinned][block].push_back(data);
            cached_ += block;
            return;
        } catch (...) {  // no memory for the list: return the block to the device
        }
    }
    give_back(data, block, pinned);
}

void MemoryBook::give_back(void* data, std::int64_t block, bool pinned) noexcept {
    if (pinned)
        backend_.release_pinned(data, block);
    else
        backend_.release(data, block);
}

void MemoryBook::put_away_waiting(bool all) noexcept {
    std::erase_if(waiting_, [&](const Waiting& one) {
        for (const auto& use : one.uses) {
            if (use->is_done()) continue;
            if (!all) return false;
            try {
                use->wait();
            } catch (...) {  // failed work no longer uses the memory
            }
        }
        put_away(one.data, one.block, one.pinned);
        return true;
    });
}

void MemoryBook::count(const char* op, std::int64_t bytes) {
    current_ += bytes;
    for (Holding& holding : held_) {
        if (holding.first == op) {
            holding.second += bytes;
            return;
        }
    }
    held_.emplace_back(op, bytes);
}

void* MemoryBook::take_cached(std::int64_t block, bool pinned) {
    Cache& cache = cache_[pinned];
    const auto found = cache.find(block);
    if (found == cache.end() || found->second.empty()) return nullptr;
    void* data = found->second.back();
    found->second.pop_back();
    cached_ -= block;
    return data;
}

void* MemoryBook::take_fresh(std::int64_t block, bool pinned) {
    return pinned ? backend_.allocate_pinned(block) : backend_.allocate(block);
}

std::int64_t MemoryBook::footprint_limit() const {
    // Blocks that are not live at the peak, as the activations of a training step whose gradients are complete, would
    // have to go for every peak, and come back as fresh pages, whose zeroing took a fifth of a step.
    const std::int64_t most = high_water_ + high_water_ / 8;
    return cap_ == 0 ? most : std::min(most, cap_);
}

void MemoryBook::shrink_cache(std::int64_t limit) noexcept {
    limit = std::max(limit, std::int64_t{0});
    for (const bool pinned : {false, true}) {
        Cache& cache = cache_[pinned];
        for (auto entry = cache.begin(); entry != cache.end() && cached_ > limit;) {
            std::vector<void*>& blocks = entry->second;
            while (!blocks.empty() && cached_ > limit) {
                give_back(blocks.back(), entry->first, pinned);
                blocks.pop_back();
                cached_ -= entry->first;
            }
            entry = blocks.empty() ? cache.erase(entry) : std::next(entry);
        }
    }
}

MemoryStatistics MemoryBook::statistics() const {
    const std::lock_guard lock(mutex_);
    const std::int64_t cached = cached_ + backend_.pooled_bytes();
    return {current_, peak_, cached, cap_, by_name(held_), by_name(at_peak_ ? held_ : peak_held_)};
}

void MemoryBook::reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = current_;
    at_peak_ = true;
    if (peak_pauses_ > 0) keep_peak_holdings();
}

void MemoryBook::set_cap(std::int64_t bytes, const char* op) {
    if (bytes < 0)
        throw Error(op, fmt::format("a memory cap of {} bytes. Give a size, or 0 for no cap.", bytes));
    const std::lock_guard lock(mutex_);
    cap_ = bytes;
    shrink_cache(footprint_limit() - live_blocks_);
}

void MemoryBook::release_cached() {
    const std::lock_guard lock(mutex_);
    put_away_waiting(true);
    shrink_cache(0);
    backend_.release_pool();
    high_water_ = live_blocks_;
}

void MemoryBook::throw_out_of_memory(std::int64_t bytes, const char* op, bool by_cap) const {
    std::string text = fmt::format("out of memory on {}: {} asked while tensors hold {}", device_,
                                   in_units(bytes), in_units(current_));
    if (by_cap) {
        text += fmt::format(", which passes the cap of {} by {}. ", in_units(cap_),
                            in_units(bytes - (cap_ - current_)));
    } else {
        text += ", and the system has no more to give. ";
    }
    if (const auto by_op = by_name(held_); !by_op.empty())
        text += fmt::format("Held by op: {}. ", largest_holdings(by_op, 5));
    text += "A smaller batch or shorter sequences need less";
    text += by_cap ? "; set_memory_cap() raises the cap." : "; so do fewer programs beside this one.";
    throw OutOfMemory(op, text, bytes);
}

MemoryStatistics memory_statistics(Device device) { return device_entry(device).memory.statistics(); }

void reset_peak_memory(Device device) { device_entry(device).memory.reset_peak(); }

PausedPeak::PausedPeak(Device device) : device_(device) { device_entry(device).memory.pause_peak(); }

PausedPeak::~PausedPeak() { device_entry(device_).memory.resume_peak(); }

void set_memory_cap(std::int64_t bytes, Device device) { device_entry(device).memory.set_cap(bytes); }

std::int64_t memory_limit(Device device) {
    const MemoryStatistics now = memory_statistics(device);
    std::int64_t free = INT64_MAX;
    if (device.is_cpu())
        free = free_memory_of_host();
    else if (auto* knows = dynamic_cast<KnowsFreeMemory*>(&backend(device)))
        free = knows->free_memory();
    const std::int64_t ours = now.current + now.cached;
    const std::int64_t limit = free > INT64_MAX - ours ? INT64_MAX : ours + free;
    return now.cap == 0 ? limit : std::min(now.cap, limit);
}

void release_cached_memory(Device device) { device_entry(device).memory.release_cached(); }

std::string memory_report(Device device) {
    const MemoryStatistics now = memory_statistics(device);
    std::string text = fmt::format("{}: {} held by tensors, {} at the peak, {} cached, ", device,
                                   in_units(now.current), in_units(now.peak), in_units(now.cached));
    text += now.cap == 0 ? std::string("no cap\n") : fmt::format("cap {}\n", in_units(now.cap));
    constexpr std::size_t lines = 12;
    if (!now.current_by_op.empty())
        text += fmt::format("  now:     {}\n", largest_holdings(now.current_by_op, lines));
    if (!now.peak_by_op.empty())
        text += fmt::format("  at peak: {}\n", largest_holdings(now.peak_by_op, lines));
    return text;
}

void* allocate_bytes(Device device, std::int64_t bytes, const char*& op, bool pinned) {
    op = OpScope::current();
    if (bytes == 0) return nullptr;
    void* data = device_entry(device).memory.allocate(bytes, op, pinned);
    MemoryTrace::count(device, bytes);
    return data;
}

void free_bytes(Device device, void* data, std::int64_t bytes, const char* op, bool pinned,
                PendingWorks uses) noexcept {
    if (data == nullptr) return;
    device_entry(device).memory.free(data, bytes, op, pinned, std::move(uses));
    MemoryTrace::count(device, -bytes);
}

}  // namespace potluck
