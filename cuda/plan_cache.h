#pragma once

// Internal: caches what a library has determined for a shape (descriptors, an algorithm).

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace potluck::cuda {

/// Caches the `most` most recently used plans. Thread-safe.
template <class Key, class Plan>
class PlanCache {
public:
    explicit PlanCache(std::size_t most) : most_(most) {}

    /// The plan of `key`, created by `make()` if it is not cached. It stays valid when the cache evicts it.
    template <class Make>
    std::shared_ptr<Plan> get(const Key& key, const Make& make) {
        const std::lock_guard lock(mutex_);
        if (const auto found = places_.find(key); found != places_.end()) {
            plans_.splice(plans_.begin(), plans_, found->second);
            return plans_.front().second;
        }
        plans_.emplace_front(key, make());
        places_[key] = plans_.begin();
        if (plans_.size() > most_) {
            places_.erase(plans_.back().first);
            plans_.pop_back();
        }
        return plans_.front().second;
    }

    std::size_t size() const {
        const std::lock_guard lock(mutex_);
        return plans_.size();
    }

private:
    using Plans = std::list<std::pair<Key, std::shared_ptr<Plan>>>;

    std::size_t most_;
    mutable std::mutex mutex_;
    Plans plans_;  // most recently used first
    std::map<Key, typename Plans::iterator> places_;
};

}  // namespace potluck::cuda
