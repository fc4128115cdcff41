// Several loops over one loader, loops that end early or outlive it, and loaders that read a share of every batch.

#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/factories.h"
#include "data/loader.h"
#include "tests/expect_error.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;
using Items = std::vector<std::int64_t>;

namespace {

/// Every item is (index, a random integer below a million drawn from its key).
data::FunctionDataset drawing(std::int64_t size) {
    return data::FunctionDataset(size, [](std::int64_t index, RandomKey key) {
        Generator generator = data::generator_of(key);
        const auto number = randint(0, 1'000'000, {}, {DType::i64}, &generator).item<std::int64_t>();
        return data::Example{tensor(std::vector<std::int64_t>{index, number}, {2}), {}};
    });
}

data::TensorDataset numbered(std::int64_t size) { return data::TensorDataset(arange(0, size)); }

Items items_of(const data::Batch& batch) {
    return batch.inputs.defined() ? batch.inputs.to_vector<std::int64_t>() : Items{};
}

template <class Range>
Items read(Range&& range) {
    Items items;
    for (const data::Batch& batch : range)
        for (const std::int64_t item : items_of(batch)) items.push_back(item);
    return items;
}

void append(Items& items, const Items& more) { items.insert(items.end(), more.begin(), more.end()); }

}  // namespace

TEST_CASE("loader: a loop within a loop over the same loader") {
    for (const int workers : {0, 2}) {
        data::Loader loader(numbered(6), {.batch = 2, .shuffle = true, .workers = workers, .seed = 4});
        Items outer;
        int pairs = 0;
        std::int64_t epoch = 1;
        for (const data::Batch& batch : loader) {
            append(outer, items_of(batch));
            Items inner;
            for (const data::Batch& other : loader) {
                append(inner, items_of(other));
                ++pairs;
            }
            CHECK(inner == data::shuffled_order(6, 4, epoch++));
        }
        CHECK(pairs == 9);
        CHECK(outer == data::shuffled_order(6, 4, 0));
        CHECK(loader.state() == data::LoaderState{4, 4, 0, 6});  // epochs 0 to 3 were taken
        CHECK(read(loader) == data::shuffled_order(6, 4, 4));
    }
}

TEST_CASE(
    "loader: two iterators at once have a whole epoch each, and the state is where the last batch ends") {
    for (const int workers : {0, 3}) {
        data::Loader loader(numbered(6), {.batch = 2, .shuffle = true, .workers = workers});
        std::array<Items, 2> seen;
        std::array<int, 2> batches{};
        auto first = loader.begin();
        auto second = loader.begin();
        while (first != loader.end() || second != loader.end()) {
            if (first != loader.end()) append(seen[0], items_of(*first)), ++batches[0], ++first;
            if (second != loader.end()) append(seen[1], items_of(*second)), ++batches[1], ++second;
        }
        CHECK(batches == std::array<int, 2>{3, 3});
        CHECK(seen[0] == data::shuffled_order(6, 0, 0));
        CHECK(seen[1] == data::shuffled_order(6, 0, 1));

        data::Loader again(numbered(6), {.batch = 2, .shuffle = true, .workers = workers});
        auto third = again.begin();
        auto fourth = again.begin();
        CHECK(again.state() == data::LoaderState{0, 1, 2, 6});
        ++third;
        CHECK(again.state() == data::LoaderState{0, 0, 4, 6});
    }
}

TEST_CASE(
    "loader: a pass is in order, repeats itself, and changes nothing of the training, anywhere within it") {
    for (const int workers : {0, 2}) {
        const data::LoaderOptions options{.batch = 3, .shuffle = true, .workers = workers, .seed = 6};
        data::Loader undisturbed(drawing(11), options);
        std::vector<Items> epochs;
        std::vector<data::LoaderState> states;
        for (int epoch = 0; epoch < 3; ++epoch) {
            epochs.emplace_back();
            for (const data::Batch& batch : undisturbed) {
                append(epochs.back(), items_of(batch));
                states.push_back(undisturbed.state());
            }
        }
        data::Loader loader(drawing(11), options);
        const auto pass = loader.pass();
        const Items expected = read(pass);
        for (std::size_t item = 0; item < 11; ++item)
            CHECK(expected[2 * item] == static_cast<std::int64_t>(item));
        std::size_t number = 0;
        for (const Items& epoch : epochs) {
            Items seen;
            for (const data::Batch& batch : loader) {
                append(seen, items_of(batch));
                CHECK(loader.state() == states[number]);
                CHECK(read(number % 2 == 0 ? loader.pass() : pass) == expected);
                for (const data::Batch& left : loader.pass()) {
                    CHECK(left.inputs.size(0) == 3);
                    break;
                }
                CHECK(loader.state() == states[number++]);
            }
            CHECK(seen == epoch);
        }
        // Also between calls of next(), and in a dataset that drops its last batch.
        data::Loader nexts(drawing(11), options);
        Items seen;
        for (int batch = 0; batch < 4; ++batch) {
            append(seen, items_of(nexts.next()));
            CHECK(read(nexts.pass()) == expected);
        }
        CHECK(seen == epochs[0]);
        data::Loader dropping(numbered(11), {.batch = 3, .drop_last = true});
        CHECK(read(dropping.pass()).size() == 9);
    }
}

TEST_CASE("loader: a second resume within one epoch") {
    for (const int workers : {0, 2}) {
        const data::LoaderOptions options{.batch = 2, .shuffle = true, .workers = workers, .seed = 5};
        const Items whole = data::shuffled_order(14, 5, 0);
        Items seen;
        data::LoaderState state;
        {
            data::Loader loader(numbered(14), options);
            append(seen, items_of(loader.next()));
            state = loader.state();
        }
        for (int resume = 0; resume < 3; ++resume) {  // in a new loader
            data::Loader loader(numbered(14), options);
            loader.set_state(state);
            CHECK(loader.state() == state);
            for (const data::Batch& batch : loader) {
                append(seen, items_of(batch));
                break;
            }
            state = loader.state();
            loader.set_state(state);  // and in the same loader
            append(seen, items_of(resume == 1 ? loader.next() : *loader.begin()));
            state = loader.state();
        }
        CHECK(seen == whole);
        CHECK(state == data::LoaderState{5, 1, 0, 14});
    }
}

TEST_CASE("loader: loops from before set_state() read on, and do not move the state") {
    data::Loader loader(numbered(8), {.batch = 2});
    Items seen;
    int batches = 0;
    for (const data::Batch& batch : loader) {
        append(seen, items_of(batch));
        if (++batches == 2) loader.set_state({0, 7, 2, 8});
        if (batches > 2) CHECK(loader.state() == data::LoaderState{0, 7, 2, 8});
    }
    CHECK(seen == Items{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(read(loader) == Items{2, 3, 4, 5, 6, 7});
    CHECK(loader.state() == data::LoaderState{0, 8, 0, 8});
}

TEST_CASE("loader: iterators go on when their loader is moved, assigned to or destroyed") {
    for (const int workers : {0, 2}) {
        const data::LoaderOptions options{.batch = 2, .workers = workers};
        auto loader = std::make_unique<data::Loader>(numbered(10), options);
        auto iterator = loader->begin();
        const auto next = [&] {
            ++iterator;
            return items_of(*iterator);
        };
        data::Loader moved = std::move(*loader);
        CHECK(next() == Items{2, 3});
        CHECK(moved.state().item == 4);
        loader.reset();
        CHECK(next() == Items{4, 5});
        moved = data::Loader(numbered(3));
        CHECK(next() == Items{6, 7});
        CHECK(moved.state() == data::LoaderState{0, 0, 0, 3});
        auto pass = std::make_unique<data::Loader>(numbered(3), options)->pass();
        CHECK(read(pass) == Items{0, 1, 2});
        const auto copy = iterator;
        CHECK(next() == Items{8, 9});
        ++iterator;
        CHECK(iterator == std::default_sentinel);
        CHECK(contains(error_of([&] { *iterator; }), "at its end"));
        CHECK(contains(error_of([&] { ++iterator; }), "at its end"));
    }
}

TEST_CASE("loader: what was moved from gives errors, and may be assigned to") {
    data::Loader loader(numbered(4), {.batch = 2});
    data::Loader other = std::move(loader);
    const std::vector<std::function<void()>> uses = {
        [&] { loader.begin(); },       [&] { loader.next(); },  [&] { loader.pass(); },
        [&] { loader.batches(); },     [&] { loader.size(); },  [&] { loader.options(); },
        [&] { loader.dataset(); },     [&] { loader.state(); }, [&] { loader.set_state({}); },
        [&] { loader.set_share({}); },
    };
    for (const auto& use : uses) CHECK(contains(error_of(use), "moved from"));
    auto pass = other.pass();
    auto taken = std::move(pass);
    CHECK(contains(error_of([&] { pass.begin(); }), "moved from"));
    auto iterator = other.begin();
    auto heir = std::move(iterator);
    CHECK(contains(error_of([&] { *iterator; }), "moved from"));
    CHECK(contains(error_of([&] { ++iterator; }), "moved from"));
    iterator = std::move(heir);
    CHECK(items_of(*iterator) == Items{0, 1});
    pass = std::move(taken);
    loader = std::move(other);
    CHECK(read(pass) == Items{0, 1, 2, 3});
    CHECK(read(loader) == Items{0, 1, 2, 3});
    data::Batch batch = loader.next();
    const data::Batch kept = std::move(batch);
    CHECK_FALSE(batch.inputs.defined());
    CHECK(kept.inputs.defined());
}

TEST_CASE("loader: shares together read what one loader reads, batch by batch") {
    using Shares = std::vector<data::Share>;
    for (const Shares& shares : {Shares{{0, 13}, {13, 12}, {25, 34}, {59, 5}}, Shares{{0, 0}, {0, 8}}})
        for (const bool shuffle : {false, true})
            for (const bool drop_last : {false, true})
                for (const int workers : {0, 3}) {
                    const std::int64_t global = shares.back().first + shares.back().count;
                    data::LoaderOptions options{.batch = global,
                                                .shuffle = shuffle,
                                                .drop_last = drop_last,
                                                .workers = workers,
                                                .seed = 12};
                    const std::int64_t size = 3 * global + global / 2 + 1;  // an incomplete last batch
                    data::Loader whole(drawing(size), options);
                    std::vector<data::Loader> ranks;
                    for (const data::Share& share : shares) {
                        options.share = share;
                        ranks.emplace_back(drawing(size), options);
                    }
                    for (int batch = 0; batch < 10; ++batch) {
                        if (batch == 2 ||
                            batch == 6)  // continue from the state, in the middle and in a second epoch
                            for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
                                const data::LoaderState state = ranks[1 - rank % 2].state();
                                ranks[rank].set_state(state);
                            }
                        const data::Batch expected = whole.next();
                        CHECK(expected.share == data::Share{0, expected.inputs.size(0)});
                        CHECK(expected.global_count == expected.inputs.size(0));
                        Items seen;
                        std::int64_t rows = 0;
                        for (data::Loader& rank : ranks) {
                            const data::Batch part = rank.next();
                            CHECK(part.global_count == expected.global_count);
                            CHECK(part.share.first == rows);
                            CHECK((part.share.count > 0) == part.inputs.defined());
                            if (part.inputs.defined()) CHECK(part.inputs.size(0) == part.share.count);
                            rows += part.share.count;
                            append(seen, items_of(part));
                            CHECK(rank.state() == whole.state());
                        }
                        CHECK(rows == expected.global_count);
                        CHECK(seen == items_of(expected));
                    }
                }
}

TEST_CASE("loader: the share may change between batches, in a running loop too, without changing the order") {
    for (const int workers : {0, 1, 4})
        for (const bool drop_last : {false, true}) {
            const data::LoaderOptions options{.batch = 8,
                                              .shuffle = true,
                                              .drop_last = drop_last,
                                              .workers = workers,
                                              .read_ahead = 3,
                                              .seed = 9};
            data::Loader whole(drawing(61), options);
            data::Loader left(drawing(61), options), right(drawing(61), options);
            const std::vector<std::int64_t> cuts = {0, 3, 3, 8, 5, 1, 8, 0};
            auto from_left = left.begin();  // with all of the first batch
            auto from_right = right.begin();
            std::size_t number = 0;
            for (const data::Batch& expected : whole) {
                Items seen = items_of(*from_left);
                if (number == 0) {
                    CHECK(seen == items_of(*from_right));
                } else {
                    append(seen, items_of(*from_right));
                }
                CHECK(seen == items_of(expected));
                CHECK(left.state() == whole.state());
                const std::int64_t cut = cuts[number++];
                left.set_share(data::Share{0, cut});
                right.set_share(data::Share{cut, 8 - cut});
                CHECK(left.options().share == data::Share{0, cut});
                ++from_left;
                ++from_right;
            }
            CHECK(from_left == left.end());
            CHECK(from_right == right.end());
            left.set_share({});
            CHECK(read(left) == read(whole));
        }
}

TEST_CASE("loader: a change of the share, with workers in the midst of items of the old one") {
    for (int round = 0; round < 20; ++round) {
        data::Loader loader(numbered(400), {.batch = 20, .workers = 3, .read_ahead = 4});
        std::int64_t number = 0;
        for (const data::Batch& batch : loader) {
            Items expected;
            for (std::int64_t i = 0; i < batch.share.count; ++i)
                expected.push_back(20 * number + batch.share.first + i);
            CHECK(items_of(batch) == expected);
            if (number > 0) CHECK(batch.share == data::Share{number % 7, 20 - 2 * (number % 7)});
            ++number;
            loader.set_share(data::Share{number % 7, 20 - 2 * (number % 7)});
        }
        CHECK(number == 20);
    }
}

TEST_CASE("loader: an item outside of the share is not read, and an error of a share names its item") {
    const data::FunctionDataset failing(20, [](std::int64_t index, RandomKey) {
        if (index == 13) throw Error("soup", "too hot.");
        return data::Example{tensor(std::vector<std::int64_t>{index}, {}), {}};
    });
    for (const int workers : {0, 2}) {
        data::Loader spared(failing, {.batch = 10, .workers = workers, .share = data::Share{4, 6}});
        CHECK(read(spared) == Items{4, 5, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19});
        data::Loader met(failing, {.batch = 10, .workers = workers, .share = data::Share{0, 4}});
        CHECK(contains(error_of([&] { read(met); }), "item 13 of epoch 0"));
        CHECK(met.state() == data::LoaderState{0, 0, 10, 20});
        CHECK(contains(error_of([&] { read(met.pass()); }), "item 13 failed"));
        met.set_share(data::Share{4, 6});
        CHECK(items_of(met.next()) == Items{14, 15, 16, 17, 18, 19});
    }
}

TEST_CASE("loader: a share outside of the batch is refused") {
    for (const data::Share& share : {data::Share{-1, 2}, {0, -1}, {3, 3}, {0, 6}, {6, 0}, {1, INT64_MAX}}) {
        CAPTURE(share.first);
        data::Loader loader(numbered(9), {.batch = 5});
        CHECK(contains(error_of([&] { loader.set_share(share); }), "global batch of 5"));
        CHECK(contains(error_of([&] { data::Loader(numbered(9), {.batch = 5, .share = share}); }),
                       "global batch of 5"));
        CHECK(read(loader).size() == 9);
    }
    data::Loader nothing(numbered(9), {.batch = 5, .share = data::Share{5, 0}});
    int batches = 0;
    for (auto [x, y] : nothing) {
        CHECK_FALSE(x.defined());
        ++batches;
    }
    CHECK(batches == 2);
}
