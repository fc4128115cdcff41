#include "autograd/ops/index.h"

#include <doctest/doctest.h>

#include "core/factories.h"
#include "tests/expect_error.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

Tensor indices(const std::vector<std::int64_t>& values, const Shape& shape) { return tensor(values, shape); }

struct Pick {
    Shape shape;
    std::int64_t axis;
    Shape index;
};
std::vector<Pick> picks() {
    return {{{5}, 0, {8}},
            {{4, 3}, 0, {2, 3}},
            {{4, 3}, 1, {4, 7}},
            {{2, 5, 3}, 1, {2, 9, 3}},
            {{2, 5, 3}, 1, {1, 2, 2}},
            {{4, 3}, -1, {0, 2}},
            {{3, 17}, 1, {3, 12001}}};
}

std::size_t from_front(const Pick& pick) {
    return static_cast<std::size_t>(pick.axis < 0 ? pick.axis + static_cast<std::int64_t>(pick.shape.size())
                                                  : pick.axis);
}

Input index_input(const Pick& pick) {
    return {.shape = pick.index,
            .low = 0.0,
            .high = static_cast<double>(pick.shape[from_front(pick)]),
            .dtype = DType::i64};
}

}  // namespace

std::vector<Row> index_rows() {
    Row gather_row{.op = "gather", .dtypes = all_dtypes()};
    Row scatter_row{.op = "scatter_add", .dtypes = number_dtypes(), .tolerance = 2.0};
    for (const Pick& pick : picks()) {
        const std::string note = "axis " + std::to_string(pick.axis);
        const std::size_t axis = from_front(pick);
        gather_row.cases.push_back(
            {.inputs = {{.shape = pick.shape}, index_input(pick)},
             .call = call([=](const Tensor& x, const Tensor& index) { return gather(x, pick.axis, index); }),
             .reference = reference([=](const Array& x, const Array& index) {
                 return from_indices(index.shape, [&](std::vector<std::int64_t> place) {
                     place[axis] = static_cast<std::int64_t>(
                         index.values[static_cast<std::size_t>(position_at(index.shape, place))]);
                     return x.values[static_cast<std::size_t>(position_at(x.shape, place))];
                 });
             }),
             .note = note});
        scatter_row.cases.push_back(
            {.inputs = {{.shape = pick.shape}, index_input(pick), {.shape = pick.index}},
             .call = call([=](const Tensor& x, const Tensor& index, const Tensor& source) {
                 return scatter_add(x, pick.axis, index, source);
             }),
             .reference = reference([=](Array x, const Array& index, const Array& source) {
                 for (std::size_t i = 0; i < index.values.size(); ++i) {
                     std::vector<std::int64_t> place = indices_at(index.shape, static_cast<std::int64_t>(i));
                     place[axis] = static_cast<std::int64_t>(index.values[i]);
                     x.values[static_cast<std::size_t>(position_at(x.shape, place))] += source.values[i];
                 }
                 return x;
             }),
             .note = note});
    }
    gather_row.refusals = {
        {[] {
             gather(ones({2, 3}), 1, indices({0, 3}, {2, 1}));
         },
         {"[gather]", "3", "(1, 0)"}},
        {[] {
             gather(ones({2, 3}), 1, indices({0, -1}, {2, 1}));
         },
         {"[gather]", "-1", "(1, 0)"}},
        {[] {
             gather(ones({2, 3}), 1, indices({0}, {1}));
         },
         {"[gather]", "(1)", "(2, 3)"}},
        {[] {
             gather(ones({2, 3}), 1, indices({0, 0, 0}, {3, 1}));
         },
         {"[gather]", "(3, 1)"}},
        {[] {
             gather(ones({2, 3}), 1, ones({2, 1}));
         },
         {"[gather]", "i64"}},
        {[] {
             gather(ones({2, 3}), 2, indices({0, 0}, {2, 1}));
         },
         {"[gather]", "2"}},
        {[] {
             gather(ones({0, 3}), 0, indices({0, 0, 0}, {1, 3}));
         },
         {"[gather]"}},
    };
    scatter_row.refusals = {
        {[] {
             scatter_add(ones({2, 3}), 1, indices({0, 3}, {2, 1}), ones({2, 1}));
         },
         {"[scatter_add]", "3"}},
        {[] {
             scatter_add(ones({2, 3}), 1, indices({0, 0}, {2, 1}), ones({2, 2}));
         },
         {"[scatter_add]", "(2, 2)"}},
    };

    Row tril_row{.op = "tril", .dtypes = all_dtypes()};
    for (const Shape& shape : {Shape{4, 4}, Shape{3, 17}, Shape{17, 3}, Shape{2, 3, 5}, Shape{1, 1},
                               Shape{0, 3}, Shape{2, 3, 0}, Shape{130, 129}})
        for (const std::int64_t diagonal : {0, 1, -2, 1000, -1000})
            tril_row.cases.push_back(
                {.inputs = {{.shape = shape}},
                 .call = call([diagonal](const Tensor& x) { return tril(x, diagonal); }),
                 .reference = reference([diagonal](const Array& x) {
                     return from_indices(x.shape, [&](const std::vector<std::int64_t>& place) {
                         const std::size_t last = place.size() - 1;
                         return place[last] <= place[last - 1] + diagonal
                                    ? x.values[static_cast<std::size_t>(position_at(x.shape, place))]
                                    : 0.0;
                     });
                 }),
                 .note = "diagonal " + std::to_string(diagonal)});
    tril_row.refusals = {{[] { tril(ones({3})); }, {"[tril]"}}};
    return {gather_row, scatter_row, tril_row};
}
const RowsOfFamily index_family(index_rows);

TEST_CASE("index: scatter_add into half types adds up before it rounds") {
    on_each_device([] {
        for (const DType dtype : {DType::f16, DType::bf16}) {
            const Tensor y =
                scatter_add(zeros({3}, {dtype}), 0, zeros({8192}, {DType::i64}), ones({8192}, {dtype}));
            CHECK(y.to_vector() == std::vector<double>{8192.0, 0.0, 0.0});
        }
    });
}

TEST_CASE("index: a refused scatter_add leaves everything as it was") {
    on_each_device([] {
        const Tensor x = ones({3});
        CHECK(contains(error_of([&] {
                           scatter_add(x, 0, indices({0, 7}, {2}), ones({2}));
                       }),
                       "index 7 at position 1"));
        CHECK(x.to_vector() == std::vector<double>(3, 1.0));
    });
}

TEST_CASE("index: places that are hit often get the same sum on every device, in order") {
    Generator generator(15);
    for (const std::int64_t length :
         {20, 3000}) {  // on a GPU: lines that are searched, and lines that are sorted
        const Tensor index = randint(0, 7, {3, length}, {DType::i64}, &generator);
        const Tensor source = randn({3, length}, {}, &generator);
        std::vector<std::vector<double>> results;
        on_each_device([&] {
            const Tensor to = index.to(test_device()), from = source.to(test_device());
            for (const bool columns : {false, true})
                results.push_back(
                    columns
                        ? scatter_add(zeros({7, 3}, {DType::f64}), 0, to.transpose(0, 1),
                                      from.to(DType::f64).transpose(0, 1))
                              .transpose(0, 1)
                              .to_vector()
                        : scatter_add(zeros({3, 7}, {DType::f64}), 1, to, from.to(DType::f64)).to_vector());
        });
        for (const auto& result : results) CHECK(result == results.front());
    }
}

TEST_CASE("index: an index that names nothing is named by every device in the same words") {
    std::vector<std::string> texts;
    on_each_device([&] {
        std::string all;
        for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-1}, std::int64_t{1} << 40}) {
            const Tensor index = indices({0, 1, bad, 2, bad, 0}, {3, 2}).transpose(0, 1);
            all += error_of([&] { gather(ones({2, 3}), 1, index); }) + "\n";
            all += error_of([&] { scatter_add(ones({2, 3}), 1, index, ones({2, 3})); }) + "\n";
            CHECK(gather(ones({2, 3}), 1, indices({2, 0}, {2, 1})).to_vector() == std::vector<double>{1, 1});
        }
        texts.push_back(all);
    });
    CHECK(contains(texts[0], "[gather] index 3 at position (0, 1) is outside 0..2"));
    CHECK(contains(texts[0], "[scatter_add] index -1 at position (0, 1)"));
    for (const std::string& text : texts) CHECK(text == texts[0]);
}

}  // namespace potluck::test
