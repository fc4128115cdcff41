#include "data/dataset.h"

#include <doctest/doctest.h>

#include <set>

#include "core/factories.h"
#include "tests/expect_error.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;

TEST_CASE("tensor dataset: items are the rows, without a copy") {
    const Tensor inputs = tensor({{1, 2}, {3, 4}, {5, 6}});
    const Tensor targets = tensor(std::vector<std::int64_t>{7, 8, 9}, {3});
    const data::TensorDataset dataset(inputs, targets);
    CHECK(dataset.size() == 3);
    const data::Example item = dataset.get(1, {});
    CHECK(item.input.shape() == Shape{2});
    CHECK(item.input.to_vector() == std::vector<double>{3, 4});
    CHECK(item.target.shape() == Shape{});
    CHECK(item.target.item<std::int64_t>() == 8);
    CHECK(item.input.storage() == inputs.storage());
}

TEST_CASE("tensor dataset: rows of a strided tensor, and inputs alone") {
    const Tensor columns = tensor({{1, 2, 3}, {4, 5, 6}}).alias({3, 2}, {1, 3}, 0);  // transposed
    const data::TensorDataset dataset(columns);
    CHECK(dataset.size() == 3);
    CHECK(dataset.get(2, {}).input.to_vector() == std::vector<double>{3, 6});
    CHECK_FALSE(dataset.get(2, {}).target.defined());
}

TEST_CASE("tensor dataset: refuses what has no rows or other numbers of rows") {
    CHECK(contains(error_of([] { data::TensorDataset dataset{Tensor()}; }), "undefined"));
    CHECK(contains(error_of([] { data::TensorDataset dataset(tensor(1.0)); }), "scalar"));
    const std::string text = error_of([] { data::TensorDataset dataset(zeros({3, 2}), zeros({4})); });
    CHECK(contains(text, "(3, 2)"));
    CHECK(contains(text, "(4)"));
    CHECK(contains(text, "[TensorDataset]"));
    const data::TensorDataset dataset(zeros({3, 2}));
    CHECK(contains(error_of([&] { dataset.get(3, {}); }), "3 of 3"));
    CHECK(contains(error_of([&] { dataset.get(-1, {}); }), "-1"));
}

TEST_CASE("function dataset: calls the function with index and key") {
    const data::FunctionDataset dataset(10, [](std::int64_t index, RandomKey key) {
        return data::Example{tensor({static_cast<double>(index), static_cast<double>(key.offset)}), {}};
    });
    CHECK(dataset.size() == 10);
    CHECK(dataset.get(4, {1, 6}).input.to_vector() == std::vector<double>{4, 6});
    CHECK(contains(
        error_of([] { data::FunctionDataset negative(-1, [](auto, auto) { return data::Example{}; }); }),
        "-1"));
    CHECK(contains(error_of([] { data::FunctionDataset nothing(1, nullptr); }), "empty"));
}

TEST_CASE("item keys differ by seed, epoch and index, and are pure functions of them") {
    std::set<std::uint64_t> seen;
    for (std::uint64_t seed : {0u, 1u, 42u})
        for (std::int64_t epoch = 0; epoch < 5; ++epoch)
            for (std::int64_t index = 0; index < 200; ++index) {
                const RandomKey key = data::item_key(seed, epoch, index);
                seen.insert(key.seed);
                CHECK(key.seed == data::item_key(seed, epoch, index).seed);
                CHECK(key.offset == 0);
            }
    CHECK(seen.size() == 3 * 5 * 200);
}

TEST_CASE("generator_of starts at the key") {
    Generator first = data::generator_of({5, 3}), second = data::generator_of({5, 3}),
              other = data::generator_of({6, 3});
    const auto draw = [](Generator& generator) { return rand({4}, {}, &generator).to_vector(); };
    const auto numbers = draw(first);
    CHECK(numbers == draw(second));
    CHECK(numbers != draw(other));
}
