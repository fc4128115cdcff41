#include "data/fetcher.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <utility>

#include "core/copies.h"
#include "core/format.h"

namespace potluck::data {

namespace {

using Clock = std::chrono::steady_clock;

/// The tensors of a batch side by side along a new first axis, in pinned memory when they go to another device. `what` is
/// "input" or "target".
Tensor stack(std::string_view what, const std::vector<Tensor>& parts, const std::vector<std::int64_t>& items,
             std::optional<Device> device) {
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
    const bool is_copied = first.device().is_cpu() && device && !device->is_cpu();
    Tensor whole =
        Tensor::empty(shape, {first.dtype(), first.device(), /*pinned=*/is_copied});  // (batch, item...)
    for (std::size_t i = 0; i < parts.size(); ++i) {
        Tensor place = whole.alias(first.shape(), contiguous_strides(first.shape()),
                                   static_cast<std::int64_t>(i) * first.count());
        if (!first.device().is_cpu() || !parts[i].is_contiguous())
            detail::copy_into(parts[i], place);
        else if (first.bytes() > 0)
            std::memcpy(place.raw_data(), parts[i].raw_data(), static_cast<std::size_t>(first.bytes()));
    }
    return whole;
}

/// "item 7 of epoch 2". A pass() is not an epoch and has the number -1.
std::string name_of(const EpochPass& pass, std::int64_t index) {
    return pass.epoch < 0 ? fmt::format("item {}", index)
                          : fmt::format("item {} of epoch {}", index, pass.epoch);
}

Example get(const EpochPass& pass, std::int64_t index) {
    const auto failed = [&](std::string_view text) {
        return Error("Loader", fmt::format("{} failed: {}", name_of(pass, index), text));
    };
    Example example;
    try {
        example = pass.dataset->get(index, item_key(pass.seed, pass.epoch, index));
    } catch (const OutOfMemory&) {
        throw;  // says more than we could, and callers may catch this type
    } catch (const std::exception& error) {
        throw failed(error.what());
    } catch (...) {
        throw failed("it threw something that is no std::exception.");
    }
    if (!example.input.defined()) throw failed("its input is undefined.");
    return example;
}

/// Global batch `number`: the items of it that `share` holds, not yet on `device`. Calls `before_item(index)` before each
/// of them.
template <class BeforeItem>
Batch make(const EpochPass& pass, std::int64_t number, std::optional<Share> share,
           std::optional<Device> device, BeforeItem&& before_item) {
    Batch batch;
    batch.global_count = pass.items_of(number);
    batch.share = share.value_or(Share{0, batch.global_count});
    batch.share.first = std::min(batch.share.first, batch.global_count);
    batch.share.count = std::min(batch.share.count, batch.global_count - batch.share.first);
    if (batch.share.count == 0) return batch;

    std::vector<Tensor> inputs, targets;
    std::vector<std::int64_t> items;
    const std::int64_t start = pass.first + number * pass.batch + batch.share.first;
    for (std::int64_t position = start; position < start + batch.share.count; ++position) {
        const std::int64_t index =
            pass.order.empty() ? position : pass.order[static_cast<std::size_t>(position)];
        before_item(index);
        Example example = get(pass, index);
        inputs.push_back(std::move(example.input));
        targets.push_back(std::move(example.target));
        items.push_back(index);
    }
    batch.inputs = stack("input", inputs, items, device);
    batch.targets = stack("target", targets, items, device);
    return batch;
}

struct Stopped {};

}  // namespace

std::int64_t EpochPass::items_of(std::int64_t number) const {
    return std::min(batch, end - first - number * batch);
}

struct Fetcher::Shared {
    struct Progress {  // of one worker
        std::int64_t batch = -1, item = -1;
        Clock::time_point since;
        bool finished = false;
    };
    struct Result {
        Batch batch;
        std::exception_ptr error;
    };

    EpochPass pass;
    std::int64_t read_ahead = 0;
    std::optional<Device> device;

    std::mutex mutex;
    std::condition_variable_any something_done;  // a batch is complete, or a worker has ended
    std::condition_variable_any room;            // a worker may begin another batch
    std::optional<Share> share;                  // the share that is being fetched
    std::int64_t shares = 0;    // number of earlier shares: work that began under one of them is discarded
    std::int64_t taken = 0;     // batches that a worker has begun
    std::int64_t received = 0;  // batches that the loop has received
    std::map<std::int64_t, Result> results;
    std::vector<Progress> workers;
};

void Fetcher::work(const std::stop_token& stop, Shared& shared, std::size_t worker) {
    std::unique_lock lock(shared.mutex);
    Shared::Progress& progress = shared.workers[worker];
    const std::int64_t batches = shared.pass.batches();
    const auto may_go_on = [&] {
        return shared.taken < batches && shared.taken < shared.received + shared.read_ahead;
    };
    while (shared.room.wait(lock, stop, may_go_on) && !stop.stop_requested()) {
        const std::int64_t number = shared.taken++;
        const std::int64_t shares = shared.shares;
        const std::optional<Share> share = shared.share;
        progress.batch = number;
        progress.since = Clock::now();
        lock.unlock();
        const auto before_item = [&](std::int64_t index) {
            if (stop.stop_requested()) throw Stopped{};
            const std::lock_guard guard(shared.mutex);
            if (shared.shares != shares) throw Stopped{};
            progress.item = index;
            progress.since = Clock::now();
        };
        Shared::Result result;
        try {
            result.batch = make(shared.pass, number, share, shared.device, before_item);
        } catch (const Stopped&) {
            // Nobody waits for this batch: the loop below ends, or continues with the new share.
        } catch (...) {
            result.error = std::current_exception();
        }
        lock.lock();
        progress.batch = -1;
        if (shared.shares != shares || stop.stop_requested()) continue;
        shared.results[number] = std::move(result);
        shared.something_done.notify_all();
    }
    progress.finished = true;
    shared.something_done.notify_all();
}

Fetcher::Fetcher(EpochPass pass, const LoaderOptions& options)
    : timeout_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(options.timeout_seconds))),
      device_(options.device),
      shared_(std::make_shared<Shared>()) {
    shared_->pass = std::move(pass);
    shared_->share = options.share;
    shared_->device = device_;
    const std::int64_t workers = std::min<std::int64_t>(options.workers, shared_->pass.batches());
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

Fetcher::~Fetcher() {
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
    lock.unlock();  // the other workers are joined by their destructor
}

const EpochPass& Fetcher::pass() const { return shared_->pass; }

std::int64_t Fetcher::position() const { return std::min(pass().first + next_ * pass().batch, pass().end); }

Batch Fetcher::receive(std::optional<Share> share) {
    const std::int64_t number = std::exchange(next_, pass().batches());  // after an error the pass is over
    std::optional<BatchCopy> copy = std::exchange(ahead_, std::nullopt);
    if (!copy || share != shared_->share) {
        Batch batch = threads_.empty() ? make(pass(), number, share, device_, [](std::int64_t) {})
                                       : receive_from_workers(number, share);
        if (!device_) {
            next_ = number + 1;
            return batch;
        }
        copy.emplace(std::move(batch), *device_);
    }
    next_ = number + 1;
    if (!threads_.empty() && !device_->is_cpu()) copy_ahead();
    return copy->arrived();
}

/// Starts copying the next batch when the workers have it.
void Fetcher::copy_ahead() {
    Batch batch;
    {
        const std::lock_guard lock(shared_->mutex);
        const auto found = shared_->results.find(next_);
        if (found == shared_->results.end() || found->second.error) return;
        batch = found->second.batch;
    }
    try {
        ahead_.emplace(std::move(batch), *device_);
    } catch (const Error&) {
        return;  // for instance no memory: that is told when this batch's turn comes, if it is so then
    }
    const std::lock_guard lock(shared_->mutex);
    shared_->results.erase(next_);
    shared_->received = next_ + 1;
    shared_->room.notify_all();
}

Batch Fetcher::receive_from_workers(std::int64_t number, std::optional<Share> share) {
    std::unique_lock lock(shared_->mutex);
    if (share != shared_->share) {
        shared_->share = share;
        ++shared_->shares;
        shared_->results.clear();
        shared_->taken = number;
        for (Shared::Progress& worker : shared_->workers)  // the awaited batch may wait for busy workers
            if (worker.batch >= 0) worker.batch = number;
        shared_->room.notify_all();
    }
    for (;;) {
        const auto found = shared_->results.find(number);
        if (found != shared_->results.end()) {
            Shared::Result result = std::move(found->second);
            shared_->results.erase(found);
            shared_->received = number + 1;
            shared_->room.notify_all();
            if (result.error) std::rethrow_exception(result.error);
            return std::move(result.batch);
        }
        shared_->something_done.wait_until(lock, look_again(number));
    }
}

/// The time at which an item of the awaited batch may have timed out. Throws Error if one has.
Clock::time_point Fetcher::look_again(std::int64_t number) const {
    const Clock::time_point now = Clock::now();
    for (std::size_t i = 0; i < shared_->workers.size(); ++i) {
        const Shared::Progress& worker = shared_->workers[i];
        if (worker.batch != number) continue;
        if (now - worker.since < timeout_) return worker.since + timeout_;
        throw Error("Loader", fmt::format("{} did not return within {} s (worker {}). Look for what it waits "
                                          "for, or raise timeout_seconds.",
                                          name_of(pass(), worker.item),
                                          std::chrono::duration<double>(timeout_).count(), i));
    }
    return now + std::chrono::milliseconds(50);  // no worker has begun it yet
}

}  // namespace potluck::data
