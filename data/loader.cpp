#include "data/loader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <stop_token>
#include <system_error>
#include <thread>

#include "core/backend.h"
#include "core/format.h"

namespace potluck::data {

namespace {

using Clock = std::chrono::steady_clock;

/// The tensors of a batch side by side along a new first axis. `what` is "input" or "target".
Tensor stack(std::string_view what, const std::vector<Tensor>& parts,
             const std::vector<std::int64_t>& items) {
    const Tensor& first = parts.front();
    for (std::size_t i = 1; i < parts.size(); ++i) {
        const Tensor& part = parts[i];
        const auto describe = [](const Tensor& tensor) {
            return tensor.defined() ? fmt::format("{} of {} on {}", pretty(tensor.shape()), tensor.dtype(),
                                                  tensor.device())
                                    : std::string("undefined");
        };
        if (part.defined() == first.defined() &&
            (!part.defined() || (part.shape() == first.shape() && part.dtype() == first.dtype() &&
                                 part.device() == first.device())))
            continue;
        throw Error("Loader",
                    fmt::format("items {} and {} cannot be in one batch: their {}s are {} and {}. Make all "
                                "items alike (pad or cut them), or use a batch of 1.",
                                items.front(), items[i], what, describe(first), describe(part)));
    }
    if (!first.defined()) return {};

    Shape shape = first.shape();
    shape.insert(shape.begin(), static_cast<std::int64_t>(parts.size()));
    Tensor whole = Tensor::empty(shape, {first.dtype(), first.device()});  // (batch, item...)
    for (std::size_t i = 0; i < parts.size(); ++i) {
        Tensor place = whole.alias(first.shape(), contiguous_strides(first.shape()),
                                   static_cast<std::int64_t>(i) * first.count());
        if (first.device() != Device::cpu() || !parts[i].is_contiguous())
            backend(first.device()).copy(parts[i], place);
        else if (first.bytes() > 0)
            std::memcpy(place.raw_data(), parts[i].raw_data(), static_cast<std::size_t>(first.bytes()));
    }
    return whole;
}

/// What the items of one epoch are and how they are cut in batches. Never changed once made.
struct Plan {
    std::shared_ptr<const Dataset> dataset;
    std::vector<std::int64_t> order;  // empty: as numbered
    std::int64_t first = 0, end = 0;  // positions in the order
    std::int64_t batch = 1;
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;

    std::int64_t batches() const { return (end - first + batch - 1) / batch; }
    std::int64_t items_of(std::int64_t number) const { return std::min(batch, end - first - number * batch); }

    /// Calls `before_item(index)` before every item.
    template <class BeforeItem>
    Batch make(std::int64_t number, BeforeItem&& before_item) const {
        std::vector<Tensor> inputs, targets;
        std::vector<std::int64_t> items;
        const std::int64_t start = first + number * batch;
        for (std::int64_t position = start; position < start + items_of(number); ++position) {
            const std::int64_t index = order.empty() ? position : order[static_cast<std::size_t>(position)];
            before_item(index);
            Example example = get(index);
            inputs.push_back(std::move(example.input));
            targets.push_back(std::move(example.target));
            items.push_back(index);
        }
        return {stack("input", inputs, items), stack("target", targets, items)};
    }

private:
    Example get(std::int64_t index) const {
        const auto failed = [&](std::string_view text) {
            return Error("Loader", fmt::format("item {} of epoch {} failed: {}", index, epoch, text));
        };
        try {
            Example example = dataset->get(index, item_key(seed, epoch, index));
            if (!example.input.defined()) throw failed("its input is undefined.");
            return example;
        } catch (const OutOfMemory&) {
            throw;  // says more than we could, and callers react to the type
        } catch (const std::exception& error) {
            throw failed(error.what());
        } catch (...) {
            throw failed("it threw something that is no std::exception.");
        }
    }
};

/// What the workers and the loop share. Workers own it too, so that one that hangs can be left behind.
struct Shared {
    struct Progress {  // of one worker
        std::int64_t batch = -1, item = -1;
        Clock::time_point since;
        bool finished = false;
    };
    struct Result {
        Batch batch;
        std::exception_ptr error;
    };

    Plan plan;
    std::int64_t read_ahead = 0;

    std::mutex mutex;
    std::condition_variable_any something_done;  // a batch, or a worker
    std::condition_variable_any room;            // for another batch
    std::int64_t taken = 0;                      // batches that a worker has begun
    std::int64_t received = 0;                   // batches that the loop has
    std::map<std::int64_t, Result> results;
    std::vector<Progress> workers;
};

struct Stopped {};

void work(const std::stop_token& stop, Shared& shared, std::size_t worker) {
    std::unique_lock lock(shared.mutex);
    Shared::Progress& progress = shared.workers[worker];
    const auto before_item = [&](std::int64_t index) {
        if (stop.stop_requested()) throw Stopped{};
        const std::lock_guard guard(shared.mutex);
        progress.item = index;
        progress.since = Clock::now();
    };
    const std::int64_t batches = shared.plan.batches();
    const auto may_go_on = [&] {
        return shared.taken == batches || shared.taken < shared.received + shared.read_ahead;
    };
    while (shared.room.wait(lock, stop, may_go_on) && !stop.stop_requested() && shared.taken < batches) {
        const std::int64_t number = shared.taken++;
        progress.batch = number;
        progress.since = Clock::now();
        lock.unlock();
        Shared::Result result;
        bool stopped = false;
        try {
            result.batch = shared.plan.make(number, before_item);
        } catch (const Stopped&) {
            stopped = true;
        } catch (...) {
            result.error = std::current_exception();
        }
        lock.lock();
        progress.batch = -1;
        if (stopped) break;
        shared.results[number] = std::move(result);
        shared.something_done.notify_all();
    }
    progress.finished = true;
    shared.something_done.notify_all();
}

}  // namespace

/// One pass over (the rest of) an epoch, with or without workers.
class Loader::Epoch {
public:
    Epoch(Plan plan, const LoaderOptions& options)
        : timeout_(std::chrono::duration_cast<Clock::duration>(
              std::chrono::duration<double>(options.timeout_seconds))),
          shared_(std::make_shared<Shared>()) {
        shared_->plan = std::move(plan);
        const std::int64_t workers = std::min<std::int64_t>(options.workers, shared_->plan.batches());
        shared_->read_ahead = options.read_ahead * std::max<std::int64_t>(workers, 1);
        shared_->workers.resize(static_cast<std::size_t>(workers));
        try {
            for (std::size_t worker = 0; worker < shared_->workers.size(); ++worker)
                threads_.emplace_back(
                    [shared = shared_, worker](const std::stop_token& stop) { work(stop, *shared, worker); });
        } catch (const std::system_error& error) {
            throw Error("Loader", fmt::format("cannot start worker thread {} of {}: {}. Use fewer workers.",
                                              threads_.size() + 1, workers, error.what()));
        }
    }

    ~Epoch() {
        for (std::jthread& thread : threads_) thread.request_stop();
        constexpr std::chrono::seconds patience(1);
        std::unique_lock lock(shared_->mutex);
        const auto& workers = shared_->workers;
        shared_->something_done.wait_for(lock, patience, [&] {
            return std::all_of(workers.begin(), workers.end(),
                               [](const auto& worker) { return worker.finished; });
        });
        for (std::size_t i = 0; i < threads_.size(); ++i)
            if (!workers[i].finished) threads_[i].detach();
        lock.unlock();  // the others are joined by their destructor
    }

    std::int64_t batches() const { return shared_->plan.batches(); }
    std::int64_t next_number() const { return next_; }
    std::int64_t items_of(std::int64_t number) const { return shared_->plan.items_of(number); }

    Batch receive() {
        Batch batch =
            threads_.empty() ? shared_->plan.make(next_, [](std::int64_t) {}) : receive_from_workers();
        ++next_;
        return batch;
    }

private:
    Batch receive_from_workers() {
        std::unique_lock lock(shared_->mutex);
        for (;;) {
            const auto found = shared_->results.find(next_);
            if (found != shared_->results.end()) {
                Shared::Result result = std::move(found->second);
                shared_->results.erase(found);
                shared_->received = next_ + 1;
                shared_->room.notify_all();
                if (result.error) std::rethrow_exception(result.error);
                return std::move(result.batch);
            }
            shared_->something_done.wait_until(lock, look_again());
        }
    }

    /// When an item of the awaited batch may have hung. Throws Error when it has.
    Clock::time_point look_again() const {
        const Clock::time_point now = Clock::now();
        for (std::size_t i = 0; i < shared_->workers.size(); ++i) {
            const Shared::Progress& worker = shared_->workers[i];
            if (worker.batch != next_) continue;
            if (now - worker.since < timeout_) return worker.since + timeout_;
            throw Error(
                "Loader",
                fmt::format(
                    "item {} of epoch {} did not return within {} s (worker {}). Look for what it waits "
                    "for, or raise timeout_seconds.",
                    worker.item, shared_->plan.epoch, std::chrono::duration<double>(timeout_).count(), i));
        }
        return now + std::chrono::milliseconds(50);  // no worker has begun it yet
    }

    Clock::duration timeout_;
    std::shared_ptr<Shared> shared_;
    std::vector<std::jthread> threads_;
    std::int64_t next_ = 0;
};

std::vector<std::int64_t> shuffled_order(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
    if (size < 0)
        throw Error("shuffled_order", fmt::format("the size is {}. It must not be negative.", size));
    std::vector<std::int64_t> order;
    try {
        order.resize(static_cast<std::size_t>(size));
    } catch (const std::exception&) {
        throw Error("shuffled_order", fmt::format("there is no memory for an order of {} items. Read them "
                                                  "unshuffled, or cut the dataset into parts.",
                                                  size));
    }
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
    constexpr std::uint64_t orders = 0x6f7264657273ULL;  // apart from other users of the same seed
    const auto key_numbers = philox({seed ^ orders, 0}, static_cast<std::uint64_t>(epoch));
    const RandomKey key{(static_cast<std::uint64_t>(key_numbers[0]) << 32) | key_numbers[1], 0};
    // Fisher and Yates: from the back, every place gets one of those not yet placed.
    for (std::size_t i = order.size(); i > 1; --i) {
        const auto numbers = philox(key, i);
        const std::uint64_t number = (static_cast<std::uint64_t>(numbers[0]) << 32) | numbers[1];
        std::swap(order[i - 1], order[number % i]);
    }
    return order;
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : dataset_(std::move(dataset)), options_(options) {
    if (!dataset_) throw Error("Loader", "there is no dataset.");
    const auto refuse = [](const char* name, const auto& value, const char* rule) {
        throw Error("Loader", fmt::format("{} is {}. It must be {}.", name, value, rule));
    };
    if (options_.batch < 1) refuse("batch", options_.batch, "at least 1");
    if (options_.workers < 0 || options_.workers > 1024) refuse("workers", options_.workers, "0 to 1024");
    if (options_.read_ahead < 1 || options_.read_ahead > 1'000'000)
        refuse("read_ahead", options_.read_ahead, "1 to 1000000");
    if (!(options_.timeout_seconds > 0 && options_.timeout_seconds <= 1e8))
        refuse("timeout_seconds", options_.timeout_seconds, "above 0 and at most 1e8");
    size_ = dataset_->size();
    if (size_ < 1) throw Error("Loader", "the dataset is empty: it has 0 items. Give at least one.");
    if (options_.drop_last && size_ < options_.batch)
        throw Error(
            "Loader",
            fmt::format("no batch can be made: the dataset has {} items, a batch is {}, and drop_last "
                        "leaves out incomplete batches. Use a smaller batch or keep the last one.",
                        size_, options_.batch));
}

Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

std::int64_t Loader::batches() const {
    return options_.drop_last ? size_ / options_.batch : (size_ + options_.batch - 1) / options_.batch;
}

void Loader::set_state(const LoaderState& state) {
    if (state.size != size_)
        throw Error(
            "Loader",
            fmt::format("the state belongs to a dataset of {} items, this one has {}. Resume with the "
                        "same data.",
                        state.size, size_));
    if (state.epoch < 0 || state.item < 0 || state.item > size_)
        throw Error("Loader",
                    fmt::format("the state (epoch {}, item {}) does not exist in a dataset of {} items.",
                                state.epoch, state.item, size_));
    running_.reset();
    options_.seed = state.seed;
    epoch_ = state.epoch;
    item_ = state.item;
    resumed_ = true;
}

void Loader::start() {
    if (!dataset_) throw Error("Loader", "this loader was moved from. Use the one that it was moved to.");
    resumed_ = false;
    running_.reset();  // first let the old workers go
    const auto end = [&] {
        return options_.drop_last ? item_ + (size_ - item_) / options_.batch * options_.batch : size_;
    };
    if (end() == item_) {  // a state from the very end of an epoch
        ++epoch_;
        item_ = 0;
    }
    Plan plan{dataset_, {}, item_, end(), options_.batch, options_.seed, epoch_};
    if (options_.shuffle) plan.order = shuffled_order(size_, options_.seed, epoch_);
    running_ = std::make_unique<Epoch>(std::move(plan), options_);
}

Loader::Iterator Loader::begin() {
    if (item_ > 0 && !resumed_) {
        ++epoch_;
        item_ = 0;
    }
    start();
    return Iterator(*this);
}

Batch Loader::next() {
    Batch batch;
    do
        if (!running_) start();
    while (!fetch(batch));
    return batch;
}

bool Loader::fetch(Batch& batch) {
    if (!running_) return false;
    const std::int64_t number = running_->next_number();
    if (number == running_->batches()) {
        running_.reset();
        return false;
    }
    try {
        batch = running_->receive();
    } catch (...) {
        running_.reset();
        throw;
    }
    item_ += running_->items_of(number);
    if (number + 1 == running_->batches()) {
        ++epoch_;
        item_ = 0;
    }
    return true;
}

}  // namespace potluck::data
