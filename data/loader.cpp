#include "data/loader.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "core/device.h"
#include "core/format.h"
#include "core/trace.h"
#include "data/fetcher.h"

namespace potluck::data {

namespace {

void check_share(const std::optional<Share>& share, std::int64_t batch) {
    if (share && (share->first < 0 || share->count < 0 || share->first > batch - share->count))
        throw Error("Loader",
                    fmt::format("the share of {} items from item {} on does not lie in a global batch of {}. "
                                "First and count must not be negative, and their sum at most the batch.",
                                share->count, share->first, batch));
}

/// Adds the seconds of its life to a sum.
class AddedSeconds {
public:
    explicit AddedSeconds(double& sum) : sum_(sum) {}
    ~AddedSeconds() { sum_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    AddedSeconds(const AddedSeconds&) = delete;
    AddedSeconds& operator=(const AddedSeconds&) = delete;

private:
    using Clock = std::chrono::steady_clock;
    double& sum_;
    Clock::time_point start_ = Clock::now();
};

}  // namespace

std::vector<std::int64_t> shuffled_order(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
    if (size < 0)
        throw Error("shuffled_order", fmt::format("the size is {}. It must not be negative.", size));
    std::vector<std::int64_t> order;
    try {
        order.resize(static_cast<std::size_t>(size));
    } catch (const std::exception&) {
        throw Error("shuffled_order", fmt::format("there is no memory to shuffle {} items. Read them "
                                                  "unshuffled, or cut the dataset into parts.",
                                                  size));
    }
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
    constexpr std::uint64_t orders = 0x6f7264657273ULL;  // distinct from other uses of the same seed
    const auto key_numbers = philox({seed ^ orders, 0}, static_cast<std::uint64_t>(epoch));
    const RandomKey key{(static_cast<std::uint64_t>(key_numbers[0]) << 32) | key_numbers[1], 0};
    // Fisher-Yates shuffle: from the back, every position gets one of the items not yet placed.
    for (std::size_t i = order.size(); i > 1; --i) {
        const auto numbers = philox(key, i);
        const std::uint64_t number = (static_cast<std::uint64_t>(numbers[0]) << 32) | numbers[1];
        std::swap(order[i - 1], order[number % i]);
    }
    return order;
}

/// The state that a loader shares with its loops.
struct Loader::Core {
    std::shared_ptr<const Dataset> dataset;
    LoaderOptions options;
    LoaderState cursor;
    std::int64_t next_epoch = 0;  // the first epoch that no loop has taken yet
    bool resumed = false;         // the cursor is in an epoch that set_state() chose and no loop has taken
    std::int64_t jumps = 0;       // set_state() calls: older loops no longer move the cursor
    std::unique_ptr<Fetcher> running;  // the fetcher of next()
    double waiting_seconds = 0.0;

    /// The end of the last batch that can be made of the items from `item` on.
    std::int64_t end_from(std::int64_t item) const {
        const std::int64_t left = cursor.size - item;
        return options.drop_last ? item + left / options.batch * options.batch : cursor.size;
    }

    /// The rest of the epoch in which the cursor is.
    EpochPass rest() const {
        EpochPass pass;
        pass.dataset = dataset;
        pass.first = cursor.item;
        pass.end = end_from(cursor.item);
        pass.batch = options.batch;
        pass.seed = cursor.seed;
        pass.epoch = cursor.epoch;
        if (options.shuffle) pass.order = shuffled_order(cursor.size, cursor.seed, cursor.epoch);
        return pass;
    }

    void take_next_epoch() {
        cursor.epoch = next_epoch++;
        cursor.item = 0;
    }

    /// Of the rest of the epoch.
    std::unique_ptr<Fetcher> make_fetcher() {
        const AddedSeconds waiting(waiting_seconds);
        return std::make_unique<Fetcher>(rest(), options);
    }

    /// Receives the next batch of a fetcher, and moves the cursor if `moves_cursor`.
    Batch receive(Fetcher& fetcher, bool moves_cursor) {
        const AddedSeconds waiting(waiting_seconds);
        const std::int64_t start = trace::now_ns();
        Batch batch = fetcher.receive(options.share);
        const std::int64_t end = trace::now_ns();
        if (is_tracing()) trace::record("loader: wait", start, end);
        if (moves_cursor) {
            cursor.epoch = fetcher.is_done() ? next_epoch : fetcher.pass().epoch;
            cursor.item = fetcher.is_done() ? 0 : fetcher.position();
        }
        return batch;
    }
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : core_(std::make_shared<Core>()) {
    if (!dataset) throw Error("Loader", "there is no dataset.");
    const auto refuse = [](const char* name, const auto& value, const char* rule) {
        throw Error("Loader", fmt::format("{} is {}. It must be {}.", name, value, rule));
    };
    if (options.batch < 1) refuse("batch", options.batch, "at least 1");
    if (options.workers < 0 || options.workers > 1024) refuse("workers", options.workers, "0 to 1024");
    if (options.read_ahead < 1 || options.read_ahead > 1'000'000)
        refuse("read_ahead", options.read_ahead, "1 to 1000000");
    if (!(options.timeout_seconds > 0 && options.timeout_seconds <= 1e8))
        refuse("timeout_seconds", options.timeout_seconds, "above 0 and at most 1e8");
    check_share(options.share, options.batch);
    if (options.device) backend(*options.device);  // throws where there is no such device
    const std::int64_t size = dataset->size();
    if (size < 1) throw Error("Loader", "the dataset is empty: it has 0 items. Give at least one.");
    if (options.drop_last && size < options.batch)
        throw Error(
            "Loader",
            fmt::format("no batch can be made: the dataset has {} items, a batch is {}, and drop_last "
                        "leaves out incomplete batches. Use a smaller batch or keep the last one.",
                        size, options.batch));
    core_->dataset = std::move(dataset);
    core_->options = options;
    core_->cursor = {.seed = options.seed, .size = size};
}

Loader::Core& Loader::core() const {
    if (!core_) throw Error("Loader", "this loader was moved from. Use the one that it was moved to.");
    return *core_;
}

std::int64_t Loader::batches() const {
    const Core& core = this->core();
    return (core.end_from(0) + core.options.batch - 1) / core.options.batch;
}

std::int64_t Loader::size() const { return core().cursor.size; }

const LoaderOptions& Loader::options() const { return core().options; }

const Dataset& Loader::dataset() const { return *core().dataset; }

LoaderState Loader::state() const { return core().cursor; }

void Loader::check_state(const LoaderState& state) const {
    const Core& core = this->core();
    if (state.size != core.cursor.size)
        throw Error(
            "Loader",
            fmt::format("the state belongs to a dataset of {} items, this one has {}. Resume with the "
                        "same data.",
                        state.size, core.cursor.size));
    constexpr std::int64_t most_epochs =
        std::numeric_limits<std::int64_t>::max() / 2;  // others come after it
    if (state.epoch < 0 || state.epoch > most_epochs || state.item < 0 || state.item > state.size)
        throw Error("Loader",
                    fmt::format("the state (epoch {}, item {}) does not exist in a dataset of {} items.",
                                state.epoch, state.item, state.size));
}

void Loader::set_state(const LoaderState& state) {
    Core& core = this->core();
    check_state(state);
    core.running.reset();
    ++core.jumps;
    core.options.seed = state.seed;
    core.cursor = state;
    if (core.end_from(state.item) == state.item) {  // the end of an epoch is the start of the next
        ++core.cursor.epoch;
        core.cursor.item = 0;
    }
    core.resumed = core.cursor.item > 0;
    core.next_epoch = core.cursor.epoch + (core.resumed ? 1 : 0);
}

double Loader::waiting_seconds() const { return core().waiting_seconds; }

void Loader::set_share(std::optional<Share> share) {
    Core& core = this->core();
    check_share(share, core.options.batch);
    core.options.share = share;
}

Loader::Iterator Loader::begin() {
    Core& core = this->core();
    core.running.reset();  // its position is no longer the cursor's: first stop its workers
    if (!std::exchange(core.resumed, false)) core.take_next_epoch();
    return {core_, core.make_fetcher(), true};
}

Batch Loader::next() {
    Core& core = this->core();
    const bool in_epoch = core.cursor.epoch < core.next_epoch;
    const bool goes_on = core.running && in_epoch && core.running->pass().epoch == core.cursor.epoch &&
                         core.running->position() == core.cursor.item;
    if (!goes_on) {
        core.running.reset();
        core.resumed = false;
        if (!in_epoch) core.take_next_epoch();
        core.running = core.make_fetcher();
    }
    std::unique_ptr<Fetcher> fetcher = std::move(core.running);  // destroyed after an error and at the end
    Batch batch = core.receive(*fetcher, true);
    if (!fetcher->is_done()) core.running = std::move(fetcher);
    return batch;
}

Loader::Pass Loader::pass() const {
    core();
    return Pass(core_);
}

Loader::Iterator Loader::Pass::begin() const {
    if (!core_) throw Error("Loader", "this pass was moved from. Use the one that it was moved to.");
    EpochPass pass;
    pass.dataset = core_->dataset;
    pass.end = core_->end_from(0);
    pass.batch = core_->options.batch;
    pass.seed = core_->options.seed;
    pass.epoch = -1;  // no epoch has this number, so the random numbers are different ones
    return {core_, std::make_shared<Fetcher>(std::move(pass), core_->options), false};
}

Loader::Iterator::Iterator(std::shared_ptr<Core> core, std::shared_ptr<Fetcher> fetcher, bool moves_state)
    : core_(std::move(core)), fetcher_(std::move(fetcher)), jumps_(core_->jumps), moves_state_(moves_state) {
    advance();
}

void Loader::Iterator::check() const {
    if (at_end_) throw Error("Loader", "the loop is at its end: there is no batch any more.");
    if (!core_) throw Error("Loader", "this iterator was moved from. Use the one that it was moved to.");
}

Batch& Loader::Iterator::operator*() {
    check();
    return batch_;
}

Loader::Iterator& Loader::Iterator::operator++() {
    check();
    advance();
    return *this;
}

void Loader::Iterator::advance() {
    at_end_ = true;  // also after an error
    batch_ = {};
    const std::shared_ptr<Fetcher> fetcher = std::move(fetcher_);  // destroyed with its workers on return
    if (fetcher->is_done()) return;
    batch_ = core_->receive(*fetcher, moves_state_ && jumps_ == core_->jumps);
    fetcher_ = fetcher;
    at_end_ = false;
}

}  // namespace potluck::data
