#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/options.h"
#include "core/tensor.h"
#include "data/dataset.h"

namespace potluck::data {

/// The items of a global batch that a process reads: items first .. first + count - 1; count may be 0.
struct Share {
    std::int64_t first = 0, count = 0;

    friend bool operator==(const Share&, const Share&) = default;
};

/// Examples stacked along a new first axis: `auto [x, y] = batch` gives inputs and targets. `targets` is undefined when
/// the examples have none; both are undefined when the share contains no item of this batch.
struct Batch {
    Tensor inputs = {}, targets = {};
    Share share = {};               // the rows within the global batch: row i is item share.first + i of it
    std::int64_t global_count = 0;  // items of the global batch, to weight results of this share
    /// The targets on the CPU, where the loader handed out a copy on another device: to read them waits for nothing.
    Tensor host_targets = {};
};

/// Supports `auto [x, y] = batch`.
template <std::size_t index, class AnyBatch>
requires std::same_as<std::remove_cvref_t<AnyBatch>, Batch>
auto&& get(AnyBatch&& batch) {
    if constexpr (index == 0)
        return std::forward<AnyBatch>(batch).inputs;
    else
        return std::forward<AnyBatch>(batch).targets;
}

struct LoaderOptions {
    std::int64_t batch = 1;        // items per global batch; the last batch of an epoch may be smaller
    bool shuffle = false;          // a new order in every epoch, a pure function of (seed, epoch)
    bool drop_last = false;        // leave out an incomplete last batch
    int workers = 0;               // threads that prefetch; 0 fetches in the calling thread
    std::int64_t read_ahead = 2;   // batches that every worker may prefetch
    std::uint64_t seed = 0;        // for the order and for the items' random numbers
    double timeout_seconds = 300;  // with workers: how long one item may take before the loop gets an Error
    std::optional<Share> share = {};    // what this process reads of every global batch; none: all of it
    std::optional<Device> device = {};  // where batches are handed out; none: where the items are
};

/// The position of a training in its data, from which it can be resumed exactly, with any share. It counts the items of
/// the global batches that a loop has received; prefetched batches do not count.
struct LoaderState {
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;  // from 0
    std::int64_t item = 0;   // items of this epoch that were delivered, to all shares together
    std::int64_t size = 0;   // of the dataset, to detect another one

    friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// The order of a shuffled epoch: a permutation of 0 .. size-1 that depends only on (size, seed, epoch).
std::vector<std::int64_t> shuffled_order(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

class Fetcher;

/// Turns a dataset into batches:
///
///     for (auto [x, y] : data::Loader(images, {.batch = 64, .shuffle = true, .workers = 2})) ...
///     for (auto [x, y] : loader.pass()) ...  // to validate
///
/// One loop is one epoch; the next loop is the next epoch, with another order when shuffled. The batches are the same,
/// in the same order, for any number of workers. A loop may be left early; the next one then starts the next epoch.
///
/// Every loop has a position of its own, so that several may run at once: each begin() takes the next epoch number. A
/// pass() takes none and leaves the state alone: whoever validates with it, how often he likes, also with the training
/// loader itself, does not change the training. state() is the training cursor: where the batch that begin()'s loops or
/// next() received last ends.
///
/// Of every global batch the loader reads a share, by default all of it. The order, the cut into global batches, the
/// random numbers of items and the state do not depend on the share: loaders with the shares {0, 13}, {13, 12}, {25, 39}
/// read together what one with a batch of 64 reads. In an incomplete last batch a share holds those of its places that
/// exist, maybe none.
///
/// With a `device`, inputs and targets are handed out there. Batches are then put together in pinned memory, and with
/// workers the next one, as soon as it is ready when a batch is handed out, is copied while the device computes on that
/// batch. The host waits for no copy: ops that are given such a tensor begin when its elements are there. A GPU holds one
/// batch more, for which `read_ahead` makes no difference.
///
/// Errors of an item reach the loop as an Error that names the item and holds the original text, and end the loop. Every
/// error leaves the loader usable: its state is that of the last batch that was received.
///
/// A loader and its loops belong to one thread. A loop goes on when the loader is moved or destroyed meanwhile.
///
/// A thread that hangs in get() cannot be stopped from outside. After the timeout the loop gets an Error that names the
/// item; when a loop ends it waits at most a second for its workers and lets those that still hang run on detached. They
/// own everything they may touch (the dataset too) and end with their item or with the program.
class Loader {
    struct Core;

public:
    class Iterator;
    class Pass;

    /// Keeps a copy of the dataset (cheap: datasets hold tensors, which are handles). Throws Error when the dataset is
    /// empty, when no batch can be formed (drop_last with fewer items than a batch), and for options out of range.
    template <std::derived_from<Dataset> AnyDataset>
    explicit Loader(AnyDataset dataset, LoaderOptions options = {})
        : Loader(std::make_shared<const AnyDataset>(std::move(dataset)), options) {}
    /// Shares the dataset.
    explicit Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options = {});
    template <std::size_t N>
    Loader(const Dataset&, MistypedOptions<N>, Refused<"no such option: see LoaderOptions", N> = {});
    Loader(Loader&&) noexcept = default;
    Loader& operator=(Loader&&) noexcept = default;

    /// Starts an epoch: the rest of the one that set_state() chose, else a new one.
    Iterator begin();
    std::default_sentinel_t end() const { return {}; }

    /// The next batch without a loop: continues at state(), and from the end of an epoch in the next one.
    Batch next();

    /// All batches once in the dataset's order, even if `shuffle` is set, with the same random numbers every time.
    /// Takes no epoch number and does not change state(). Each begin() of the result starts from the beginning.
    Pass pass() const;

    /// Number of global batches in an epoch.
    std::int64_t batches() const;
    std::int64_t size() const;
    const LoaderOptions& options() const;
    const Dataset& dataset() const;

    /// Seconds that next() and all loops, passes included, have waited for a batch since the loader was made: for workers,
    /// or, without any, for the items themselves. A training whose input is fast enough waits for next to nothing.
    double waiting_seconds() const;

    LoaderState state() const;
    /// Continues where `state` was taken, with its seed; the next loop reads the rest of that epoch. Loops that are
    /// already running continue unchanged, but no longer move state(). Throws Error when the state belongs to a dataset
    /// of another size or is outside of an epoch.
    void set_state(const LoaderState& state);
    /// Throws the Error that set_state() would, and changes nothing.
    void check_state(const LoaderState& state) const;

    /// Sets the part of every global batch that is read from the next one on, in running loops too; none: all of it.
    /// Prefetched batches are fetched again. Throws Error for a share outside of the batch.
    void set_share(std::optional<Share> share);

private:
    Core& core() const;  // throws Error when the loader was moved from

    std::shared_ptr<Core> core_;  // shared with its iterators
};

/// One loop. Copies share its position.
class Loader::Iterator {
public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    /// Both throw Error at the end of the loop and when the iterator was moved from.
    Batch& operator*();
    Batch* operator->() { return &**this; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return iterator.at_end_; }

private:
    friend class Loader;
    friend class Pass;
    Iterator(std::shared_ptr<Core> core, std::shared_ptr<Fetcher> fetcher, bool moves_state);
    void advance();
    void check() const;

    std::shared_ptr<Core> core_;
    std::shared_ptr<Fetcher> fetcher_;
    std::int64_t jumps_ = 0;    // of the core when this loop began
    bool moves_state_ = false;  // false for a pass
    bool at_end_ = false;
    Batch batch_;
};

class Loader::Pass {
public:
    Iterator begin() const;
    std::default_sentinel_t end() const { return {}; }

private:
    friend class Loader;
    explicit Pass(std::shared_ptr<Core> core) : core_(std::move(core)) {}

    std::shared_ptr<Core> core_;
};

}  // namespace potluck::data

template <>
struct std::tuple_size<potluck::data::Batch> : std::integral_constant<std::size_t, 2> {};
template <std::size_t index>
struct std::tuple_element<index, potluck::data::Batch> {
    using type = potluck::Tensor;
};
