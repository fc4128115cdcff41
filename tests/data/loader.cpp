#include "data/loader.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <set>
#include <thread>

#include "core/factories.h"
#include "tests/expect_error.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;
using Items = std::vector<std::int64_t>;

namespace {

/// Items 0 .. size-1; the target is 10 times the input.
data::TensorDataset numbered(std::int64_t size) {
    const Tensor inputs = arange(0, size);
    std::vector<std::int64_t> targets = inputs.to_vector<std::int64_t>();
    for (std::int64_t& target : targets) target *= 10;
    return data::TensorDataset(inputs, tensor(targets, {size}));
}

/// Every item is (index, a random integer below a million drawn from its key).
data::FunctionDataset drawing(std::int64_t size) {
    return data::FunctionDataset(size, [](std::int64_t index, RandomKey key) {
        Generator generator = data::generator_of(key);
        const auto number = randint(0, 1'000'000, {}, {DType::i64}, &generator).item<std::int64_t>();
        return data::Example{tensor(std::vector<std::int64_t>{index, number}, {2}), {}};
    });
}

Items read_epoch(data::Loader& loader) {
    Items items;
    for (auto [x, y] : loader)
        for (std::int64_t item : x.to_vector<std::int64_t>()) items.push_back(item);
    return items;
}

Items sorted(Items items) {
    std::sort(items.begin(), items.end());
    return items;
}

Items up_to(std::int64_t count) {
    Items items(static_cast<std::size_t>(count));
    std::iota(items.begin(), items.end(), 0);
    return items;
}

}  // namespace

TEST_CASE("loader: the short form of the loop") {
    std::vector<Shape> shapes;
    for (auto [x, y] : data::Loader(data::TensorDataset(zeros({10, 3}), zeros({10})),
                                    {.batch = 4, .shuffle = true, .workers = 2})) {
        shapes.push_back(x.shape());
        CHECK(y.shape() == Shape{x.size(0)});
    }
    CHECK(shapes == std::vector<Shape>{{4, 3}, {4, 3}, {2, 3}});
}

TEST_CASE("loader: without shuffle, items come as numbered and targets stay with their inputs") {
    data::Loader loader(numbered(7), {.batch = 3});
    CHECK(loader.batches() == 3);
    std::vector<Items> batches;
    for (auto [x, y] : loader) {
        batches.push_back(x.to_vector<std::int64_t>());
        Items expected = batches.back();
        for (std::int64_t& value : expected) value *= 10;
        CHECK(y.to_vector<std::int64_t>() == expected);
        CHECK(x.dtype() == DType::i64);
    }
    CHECK(batches == std::vector<Items>{{0, 1, 2}, {3, 4, 5}, {6}});
    CHECK(read_epoch(loader) == up_to(7));  // and again in the next loop
}

TEST_CASE("loader: drop_last leaves out the incomplete batch") {
    data::Loader loader(numbered(7), {.batch = 3, .drop_last = true});
    CHECK(loader.batches() == 2);
    CHECK(read_epoch(loader) == up_to(6));
    CHECK(read_epoch(loader) == up_to(6));
    CHECK(loader.state().epoch == 2);
}

TEST_CASE(
    "loader: every shuffled epoch has another order, visits every item once, and follows from seed and "
    "epoch") {
    data::Loader loader(numbered(22), {.batch = 5, .shuffle = true, .seed = 3});
    std::set<Items> orders;
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
        const Items order = read_epoch(loader);
        CHECK(sorted(order) == up_to(22));
        CHECK(order == data::shuffled_order(22, 3, epoch));
        orders.insert(order);
    }
    CHECK(orders.size() == 3);
    data::Loader again(numbered(22), {.batch = 5, .shuffle = true, .seed = 3});
    CHECK(read_epoch(again) == data::shuffled_order(22, 3, 0));
    data::Loader other(numbered(22), {.batch = 5, .shuffle = true, .seed = 4});
    CHECK(read_epoch(other) != data::shuffled_order(22, 3, 0));
}

TEST_CASE("shuffled order: a permutation, fair, for every size") {
    CHECK(data::shuffled_order(0, 1, 0).empty());
    CHECK(data::shuffled_order(1, 1, 0) == Items{0});
    CHECK(sorted(data::shuffled_order(1000, 9, 4)) == up_to(1000));
    // Every item is equally frequent at every position: 4000 draws, expected 1000 each, standard deviation about 27.
    std::vector<std::vector<int>> counts(4, std::vector<int>(4, 0));
    for (std::int64_t epoch = 0; epoch < 4000; ++epoch) {
        const Items order = data::shuffled_order(4, 7, epoch);
        for (std::size_t place = 0; place < 4; ++place)
            ++counts[place][static_cast<std::size_t>(order[place])];
    }
    for (const auto& row : counts)
        for (int count : row) CHECK(std::abs(count - 1000) < 150);
    CHECK(contains(error_of([] { data::shuffled_order(-1, 0, 0); }), "-1"));
}

TEST_CASE("loader: the same batches for any number of workers and any read-ahead") {
    const auto table = [](int workers, std::int64_t read_ahead) {
        data::Loader loader(
            drawing(33),
            {.batch = 4, .shuffle = true, .workers = workers, .read_ahead = read_ahead, .seed = 11});
        std::vector<Items> epochs;
        for (int epoch = 0; epoch < 2; ++epoch) epochs.push_back(read_epoch(loader));
        return epochs;
    };
    const auto expected = table(0, 1);
    for (int workers : {1, 4, 16})
        for (std::int64_t read_ahead : {1, 8}) CHECK(table(workers, read_ahead) == expected);
}

TEST_CASE(
    "loader: random numbers of items differ between items and between epochs, and repeat with the seed") {
    const auto table = [](std::uint64_t seed, int workers) {
        data::Loader loader(drawing(20), {.batch = 3, .workers = workers, .seed = seed});
        std::vector<Items> epochs;
        for (int epoch = 0; epoch < 3; ++epoch) {
            Items numbers;
            for (auto [x, y] : loader) {
                const Items pairs = x.to_vector<std::int64_t>();
                for (std::size_t i = 1; i < pairs.size(); i += 2) numbers.push_back(pairs[i]);
            }
            epochs.push_back(numbers);
        }
        return epochs;
    };
    const auto epochs = table(5, 0);
    for (const Items& numbers : epochs)
        CHECK(std::set<std::int64_t>(numbers.begin(), numbers.end()).size() == 20);
    for (std::size_t item = 0; item < 20; ++item) {
        CHECK(epochs[0][item] != epochs[1][item]);
        CHECK(epochs[1][item] != epochs[2][item]);
        CHECK(epochs[0][item] != epochs[2][item]);
    }
    for (int workers : {0, 1, 4}) CHECK(table(5, workers) == epochs);
    CHECK(table(6, 4) != epochs);
}

TEST_CASE("loader: resumed in the middle of an epoch it goes on exactly, also with read-ahead") {
    for (int workers : {0, 3}) {
        const data::LoaderOptions options{
            .batch = 4, .shuffle = true, .workers = workers, .read_ahead = 8, .seed = 2};
        data::Loader unbroken(numbered(64), options);
        const Items first = read_epoch(unbroken), second = read_epoch(unbroken), third = read_epoch(unbroken);

        data::Loader before(numbered(64), options);
        read_epoch(before);
        data::LoaderState state;
        Items seen;
        int count = 0;
        for (auto [x, y] : before) {
            for (std::int64_t item : x.to_vector<std::int64_t>()) seen.push_back(item);
            state = before.state();
            if (++count == 5) break;
        }
        CHECK(state == data::LoaderState{2, 1, 20, 64});

        // The state contains the seed.
        data::Loader after(numbered(64),
                           {.batch = 4, .shuffle = true, .workers = workers, .read_ahead = 8, .seed = 99});
        after.set_state(state);
        const Items rest = read_epoch(after);
        CHECK(rest.size() == 44);
        seen.insert(seen.end(), rest.begin(), rest.end());
        CHECK(seen == second);
        CHECK(read_epoch(after) == third);
        CHECK(third != second);
        CHECK(first != second);
    }
}

TEST_CASE("loader: the state at the border of epochs, and next() goes over it") {
    data::Loader loader(numbered(5), {.batch = 2, .shuffle = true, .seed = 8});
    Items items;
    for (int batch = 0; batch < 7; ++batch)
        for (std::int64_t item : loader.next().inputs.to_vector<std::int64_t>()) items.push_back(item);
    Items expected = data::shuffled_order(5, 8, 0);
    for (std::int64_t epoch : {1, 2})
        for (std::int64_t item : data::shuffled_order(5, 8, epoch)) expected.push_back(item);
    expected.resize(12);
    CHECK(items == expected);
    CHECK(loader.state() == data::LoaderState{8, 2, 2, 5});
    loader.next();
    loader.next();
    CHECK(loader.state() == data::LoaderState{8, 3, 0, 5});
    CHECK(read_epoch(loader) == data::shuffled_order(5, 8, 3));
}

TEST_CASE("loader: a loop that was left early is followed by the next epoch, whole") {
    data::Loader loader(numbered(9), {.batch = 2, .shuffle = true});
    for (auto [x, y] : loader) break;
    CHECK(read_epoch(loader) == data::shuffled_order(9, 0, 1));
}

TEST_CASE("loader: the state of another dataset, or outside of an epoch, is refused") {
    data::Loader loader(numbered(10), {.batch = 2});
    const std::string text = error_of([&] { loader.set_state({0, 0, 0, 12}); });
    CHECK(contains(text, "12"));
    CHECK(contains(text, "10"));
    CHECK(contains(error_of([&] { loader.set_state({0, -1, 0, 10}); }), "epoch -1"));
    CHECK(contains(error_of([&] { loader.set_state({0, 0, 11, 10}); }), "item 11"));
    constexpr std::int64_t last = std::numeric_limits<std::int64_t>::max();
    CHECK(contains(error_of([&] { loader.set_state({0, last, 10, 10}); }), "epoch 9223372036854775807"));
    CHECK(contains(error_of([&] { loader.set_state({0, last - 1, 0, 10}); }), "does not exist"));
    CHECK(read_epoch(loader) == up_to(10));
    loader.set_state({0, 4, 10, 10});  // the end of an epoch is the start of the next
    CHECK(read_epoch(loader) == up_to(10));
    CHECK(loader.state().epoch == 6);
}

TEST_CASE("loader: a dataset that gives no batch is an error before the first one") {
    const std::string text =
        error_of([] { data::Loader loader(numbered(3), {.batch = 4, .drop_last = true}); });
    CHECK(contains(text, "3 items"));
    CHECK(contains(text, "4"));
    data::Loader small(numbered(3), {.batch = 4});
    CHECK(small.batches() == 1);
    CHECK(read_epoch(small) == up_to(3));
    CHECK(contains(error_of([] { data::Loader loader(data::TensorDataset(zeros({0, 2}))); }), "0 items"));
    CHECK(contains(error_of([] { data::Loader loader(std::shared_ptr<const data::Dataset>{}); }),
                   "no dataset"));
}

TEST_CASE("loader: options out of range are refused by name and value") {
    const auto refused = [](data::LoaderOptions options) {
        return error_of([&] { data::Loader loader(numbered(3), options); });
    };
    CHECK(contains(refused({.batch = 0}), "batch is 0"));
    CHECK(contains(refused({.batch = -5}), "batch is -5"));
    CHECK(contains(refused({.workers = -1}), "workers is -1"));
    CHECK(contains(refused({.workers = 100000}), "workers is 100000"));
    CHECK(contains(refused({.read_ahead = 0}), "read_ahead is 0"));
    CHECK(contains(refused({.timeout_seconds = 0}), "timeout_seconds is 0"));
}

TEST_CASE("loader: an order too large for the memory is refused") {
    CHECK(
        contains(error_of([] { data::shuffled_order(std::int64_t{1} << 60, 0, 0); }), "1152921504606846976"));
}

TEST_CASE("loader: items that do not fit together are refused with both shapes") {
    const auto text_of = [](data::FunctionDataset::Function function, int workers) {
        return error_of([&] {
            data::Loader(data::FunctionDataset(4, function), {.batch = 4, .workers = workers}).next();
        });
    };
    for (int workers : {0, 2}) {
        std::string text = text_of(
            [](std::int64_t i, RandomKey) {
                return data::Example{zeros({i == 2 ? 5 : 3}), {}};
            },
            workers);
        CHECK(contains(text, "items 0 and 2"));
        CHECK(contains(text, "(3)"));
        CHECK(contains(text, "(5)"));
        text = text_of(
            [](std::int64_t i, RandomKey) {
                return data::Example{zeros({3}, {i == 1 ? DType::f64 : DType::f32}), {}};
            },
            workers);
        CHECK(contains(text, "f64"));
        text = text_of(
            [](std::int64_t i, RandomKey) {
                return data::Example{zeros({3}), i == 3 ? zeros({1}) : Tensor()};
            },
            workers);
        CHECK(contains(text, "targets are undefined"));
        text = text_of([](std::int64_t, RandomKey) { return data::Example{}; }, workers);
        CHECK(contains(text, "input is undefined"));
    }
}

TEST_CASE("loader: items of any strides, and of no elements") {
    const Tensor wide = tensor({{1, 2, 3}, {4, 5, 6}});
    data::Loader columns(data::TensorDataset(wide.alias({3, 2}, {1, 3}, 0)), {.batch = 3});
    CHECK(columns.next().inputs.to_vector() == std::vector<double>{1, 4, 2, 5, 3, 6});
    data::Loader nothing(data::TensorDataset(zeros({3, 0})), {.batch = 2});
    CHECK(nothing.next().inputs.shape() == Shape{2, 0});
}

TEST_CASE("loader: moved while it stands in an epoch, it goes on") {
    data::Loader first(numbered(8), {.batch = 2, .workers = 2});
    first.next();
    data::Loader second = std::move(first);
    CHECK(second.next().inputs.to_vector<std::int64_t>() == Items{2, 3});
    CHECK(second.state().item == 4);
}

TEST_CASE("loader: the seconds that it keeps a loop waiting add up") {
    const auto pause = std::chrono::milliseconds(20);
    const data::FunctionDataset slow(4, [=](std::int64_t index, RandomKey) {
        std::this_thread::sleep_for(pause);
        return data::Example{tensor(static_cast<double>(index)), {}};
    });
    data::Loader loader(slow, {.batch = 2});
    CHECK(loader.waiting_seconds() == 0.0);
    double least = 0.0;
    const auto waited_for = [&](int items) {
        least += 0.020 * items;
        CHECK(loader.waiting_seconds() >= least);
        CHECK(loader.waiting_seconds() < least + 10.0);
    };
    loader.next();
    waited_for(2);
    for (auto [x, y] : loader) {
    }
    waited_for(4);
    for (auto [x, y] : loader.pass()) {
    }
    waited_for(4);

    // What workers do while the loop is busy keeps nobody waiting.
    data::Loader ahead(slow, {.batch = 2, .workers = 1, .read_ahead = 2});
    ahead.next();
    std::this_thread::sleep_for(20 * pause);
    const double before = ahead.waiting_seconds();
    CHECK(before > 0.0);
    ahead.next();
    CHECK(ahead.waiting_seconds() - before < 0.020);
}
