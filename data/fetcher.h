#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "data/batch_copy.h"
#include "data/loader.h"

namespace potluck::data {

/// What one pass over the rest of an epoch reads, and how it is divided into global batches. Immutable.
struct EpochPass {
    std::shared_ptr<const Dataset> dataset;
    std::vector<std::int64_t> order;  // empty: in the dataset's order
    std::int64_t first = 0, end = 0;  // positions in the order
    std::int64_t batch = 1;           // items per global batch
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;

    std::int64_t batches() const { return (end - first + batch - 1) / batch; }
    /// Number of items of global batch `number`: smaller for an incomplete last one.
    std::int64_t items_of(std::int64_t number) const;
};

/// Fetches the batches of one pass in order, with or without workers.
class Fetcher {
public:
    Fetcher(EpochPass pass, const LoaderOptions& options);
    ~Fetcher();
    Fetcher(const Fetcher&) = delete;
    Fetcher& operator=(const Fetcher&) = delete;

    const EpochPass& pass() const;
    bool is_done() const { return next_ == pass().batches(); }
    /// Position in the order at which the next batch starts.
    std::int64_t position() const;

    /// Returns the next batch: those of its items that `share` contains. Batches that workers have prefetched for
    /// another share are discarded. After an error the pass is over.
    Batch receive(std::optional<Share> share);

private:
    struct Shared;
    static void work(const std::stop_token& stop, Shared& shared, std::size_t worker);
    Batch receive_from_workers(std::int64_t number, std::optional<Share> share);
    void copy_ahead();
    std::chrono::steady_clock::time_point look_again(std::int64_t number) const;

    std::chrono::steady_clock::duration timeout_;
    std::optional<Device> device_;    // where batches are handed out
    std::optional<BatchCopy> ahead_;  // of the batch that is received next, when it is on its way already
    std::shared_ptr<Shared> shared_;  // shared with the workers, so that one that hangs can be abandoned
    std::vector<std::jthread> threads_;
    std::int64_t next_ = 0;  // number of the batch that is received next
};

}  // namespace potluck::data
