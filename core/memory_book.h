#pragma once

// Internal: the memory accounting of one device. Users see core/memory.h.

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/stream.h"

namespace potluck {

class Backend;

/// Allocates blocks on one device: counts them by op, enforces a cap, and keeps freed blocks for the next request of
/// the same size. Training requests the same sizes again and again, and fresh pages cost more than used ones.
/// Live and cached blocks together never take more than an eighth above what live blocks took at their peak.
class MemoryBook {
public:
    MemoryBook(Device device, Backend& backend) : device_(device), backend_(backend) {}

    /// `pinned`: see Storage.
    void* allocate(std::int64_t bytes, const char* op, bool pinned = false);
    /// `uses`: copies that may still access the block; it is not reused before they have ended.
    void free(void* data, std::int64_t bytes, const char* op, bool pinned = false,
              PendingWorks uses = {}) noexcept;

    MemoryStatistics statistics() const;
    void reset_peak();
    /// Between the two the peak stays as it is. Calls nest.
    void pause_peak();
    void resume_peak() noexcept;
    /// Throws Error(op, ...) when it is negative.
    void set_cap(std::int64_t bytes, const char* op = "set_memory_cap");
    void release_cached();

private:
    using Holding = std::pair<const char*, std::int64_t>;                // an op and the bytes it holds
    using Cache = std::unordered_map<std::int64_t, std::vector<void*>>;  // by size of the block
    /// A block that was freed while copies were still accessing it.
    struct Waiting {
        void* data;
        std::int64_t block;
        bool pinned;
        PendingWorks uses;
    };

    void count(const char* op, std::int64_t bytes);
    void keep_peak_holdings() noexcept;
    void* take_cached(std::int64_t block, bool pinned);
    void* take_fresh(std::int64_t block, bool pinned);
    /// Caches a block that is no longer in use, or returns it to the device.
    void put_away(void* data, std::int64_t block, bool pinned) noexcept;
    void give_back(void* data, std::int64_t block, bool pinned) noexcept;
    /// Does this with the waiting blocks whose copies have ended; if `all`, waits for the others, too.
    void put_away_waiting(bool all) noexcept;
    /// The limit for live and cached blocks together.
    std::int64_t footprint_limit() const;
    void shrink_cache(std::int64_t limit) noexcept;
    [[noreturn]] void throw_out_of_memory(std::int64_t bytes, const char* op, bool by_cap) const;

    Device device_;
    Backend& backend_;
    mutable std::mutex mutex_;
    std::int64_t current_ = 0;
    std::int64_t peak_ = 0;
    std::int64_t live_blocks_ = 0;  // like current_, but in whole blocks
    std::int64_t high_water_ = 0;   // peak of live_blocks_, which limits the cache
    std::int64_t cap_ = 0;
    std::vector<Holding> held_;       // ops are distinguished by the address of their name
    std::vector<Holding> peak_held_;  // a copy of held_ at the peak ...
    bool at_peak_ = true;             // ... taken when the first block is freed after it
    int peak_pauses_ = 0;
    std::int64_t cached_ = 0;
    std::array<Cache, 2> cache_;  // plain, pinned
    std::vector<Waiting> waiting_;
};

}  // namespace potluck
