#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "data/dataset.h"

namespace potluck::data {

/// Examples stacked along a new first axis. `targets` is undefined when the examples have none.
struct Batch {
    Tensor inputs, targets;
};

struct LoaderOptions {
    std::int64_t batch = 1;        // items a batch; the last one of an epoch may be smaller
    bool shuffle = false;          // a new order in every epoch, a pure function of (seed, epoch)
    bool drop_last = false;        // leave out an incomplete last batch
    int workers = 0;               // threads that fetch ahead; 0 fetches in the calling thread
    std::int64_t read_ahead = 2;   // batches that every worker may be ahead of the loop
    std::uint64_t seed = 0;        // of the order and of the items' random numbers
    double timeout_seconds = 300;  // with workers: how long one item may take before the loop gets an Error
};

/// Where a loader stands, to go on exactly there. Read-ahead does not count: only batches that the loop has received.
struct LoaderState {
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;  // from 0
    std::int64_t item = 0;   // items of this epoch that were handed out
    std::int64_t size = 0;   // of the dataset, to notice another one

    friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// The order of a shuffled epoch: a permutation of 0 .. size-1 that depends on nothing but (size, seed, epoch).
std::vector<std::int64_t> shuffled_order(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

/// Turns a dataset into batches:
///
///     for (auto [x, y] : data::Loader(images, {.batch = 64, .shuffle = true, .workers = 2})) ...
///
/// One loop is one epoch; the next loop is the next epoch, with another order when shuffled. The batches are the same,
/// in the same order, for any number of workers. A loop may be left early; the next one then starts the next epoch.
///
/// Errors of an item reach the loop as an Error that names the item and holds the original text. Every error leaves
/// the loader usable: its state is that of the last batch that was received.
///
/// A thread that hangs in get() cannot be stopped from outside. After the timeout the loop gets an Error that names the
/// item; when the loader is destroyed it waits at most a second for its workers and lets those that still hang run on
/// detached. They own everything they may touch (the dataset too) and end with their item or with the program.
class Loader {
    class Epoch;

public:
    class Iterator;

    /// Keeps a copy of the dataset (cheap: datasets hold tensors, which are handles). Throws Error when the dataset is
    /// empty, when no batch can come of it (drop_last with fewer items than a batch), and for options out of range.
    template <std::derived_from<Dataset> AnyDataset>
    explicit Loader(AnyDataset dataset, LoaderOptions options = {})
        : Loader(std::make_shared<const AnyDataset>(std::move(dataset)), options) {}
    /// Shares the dataset.
    explicit Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options = {});
    ~Loader();
    Loader(Loader&&) noexcept;
    Loader& operator=(Loader&&) noexcept;

    /// Starts an epoch: the rest of the one that set_state() went to, else a fresh one.
    Iterator begin();
    std::default_sentinel_t end() const { return {}; }

    /// The next batch without a loop: goes on in the current epoch, and over its end into the next one.
    Batch next();

    /// Batches in an epoch.
    std::int64_t batches() const;
    std::int64_t size() const { return size_; }
    const LoaderOptions& options() const { return options_; }
    const Dataset& dataset() const { return *dataset_; }

    LoaderState state() const { return {options_.seed, epoch_, item_, size_}; }
    /// Goes on where `state` was taken, with its seed; the next loop reads the rest of that epoch. Throws Error when it
    /// belongs to a dataset of another size or lies outside of an epoch.
    void set_state(const LoaderState& state);

private:
    /// Fills `batch`; false at the end of the epoch.
    bool fetch(Batch& batch);
    void start();

    std::shared_ptr<const Dataset> dataset_;
    LoaderOptions options_;
    std::int64_t size_ = 0;
    std::int64_t epoch_ = 0;
    std::int64_t item_ = 0;
    bool resumed_ = false;            // item_ was set by set_state(), not left by a loop
    std::unique_ptr<Epoch> running_;  // the fetching of the current epoch
};

class Loader::Iterator {
public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    Batch& operator*() { return batch_; }
    Batch* operator->() { return &batch_; }
    Iterator& operator++() {
        advance();
        return *this;
    }
    void operator++(int) { advance(); }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return iterator.at_end_; }

private:
    friend class Loader;
    explicit Iterator(Loader& loader) : loader_(&loader) { advance(); }
    void advance() { at_end_ = !loader_->fetch(batch_); }

    Loader* loader_;
    Batch batch_;
    bool at_end_ = false;
};

}  // namespace potluck::data
