#include "autograd/ops/embedding.h"

#include <doctest/doctest.h>

#include "core/backend.h"
#include "core/factories.h"
#include "tests/expect_error.h"
#include "tests/ops/table.h"

namespace potluck::test {

std::vector<Row> embedding_rows() {
    Row row{.op = "embedding", .twice_differentiable = true};
    for (const auto& [rows, width, ids, dtype] :
         {std::tuple<std::int64_t, std::int64_t, Shape, DType>{10, 5, {3}, DType::i64},
          {10, 5, {}, DType::i64},
          {10, 1, {2, 3}, DType::i64},
          {4, 3, {0}, DType::i64},
          {3, 17, {2, 4}, DType::i32},
          {2, 0, {3}, DType::i64},
          {7, 1300, {200}, DType::i64},
          {300, 24, {2500}, DType::i64}}) {  // on a GPU: rows in packs, and more ids than one block sorts
        row.cases.push_back(
            {.inputs = {{.shape = {rows, width}},
                        {.shape = ids, .low = 0.0, .high = static_cast<double>(rows), .dtype = dtype}},
             .call =
                 call([](const Tensor& weight, const Tensor& chosen) { return embedding(weight, chosen); }),
             .reference = reference([width = width](const Array& weight, const Array& chosen) {
                 Array result{chosen.shape, {}};
                 result.shape.push_back(width);
                 for (const double id : chosen.values)
                     for (std::int64_t i = 0; i < width; ++i)
                         result.values.push_back(weight.values[static_cast<std::size_t>(
                             static_cast<std::int64_t>(id) * width + i)]);
                 return result;
             })});
    }
    const auto ids = [](const std::vector<std::int64_t>& values) {
        return tensor(values, {static_cast<std::int64_t>(values.size())});
    };
    row.refusals = {
        {[=] {
             embedding(ones({10, 2}), ids({3, 10}));
         },
         {"[embedding]", "10", "position 1"}},
        {[=] {
             embedding(ones({10, 2}), ids({-1}));
         },
         {"[embedding]", "-1", "position 0"}},
        {[=] {
             embedding(ones({10, 2}), ids({std::int64_t{1} << 31}));
         },
         {"[embedding]", "2147483648"}},
        {[=] {
             embedding(ones({10, 2}), ones({3}));
         },
         {"[embedding]", "f32"}},
        {[=] { embedding(ones({10}), ids({3})); }, {"[embedding]", "(10)"}},
        {[=] {
             embedding(ones({0, 2}), ids({0}));
         },
         {"[embedding]"}},
    };
    return {row};
}
const RowsOfFamily embedding_family(embedding_rows);

TEST_CASE("embedding: gradients of one row add up, in half types before they are rounded") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
            Tensor weight = zeros({3, 700}, {dtype});
            weight.set_requires_grad();
            embedding(weight, ones({8192}, {DType::i64})).sum().backward();
            CHECK(weight.grad()[0].sum().item() == 0.0);
            CHECK(weight.grad()[1].to_vector() == std::vector<double>(700, 8192.0));
        }
    });
}

TEST_CASE(
    "embedding: an id outside the table is named by every device in the same words, and the device goes on") {
    std::vector<std::string> texts;
    on_each_device([&] {
        Tensor weight = ones({100, 8});
        weight.set_requires_grad();
        std::string all;
        for (const std::int64_t bad : {std::int64_t{100}, std::int64_t{-1}, std::int64_t{1} << 31}) {
            const Tensor ids = tensor(std::vector<std::int64_t>{5, 99, bad, 0, bad}, {5});
            all += error_of([&] { embedding(weight, ids); }) + "\n";
            const Tensor good = embedding(weight, tensor(std::vector<std::int64_t>{5, 99}, {2}));
            CHECK(good.to_vector() == std::vector<double>(16, 1.0));
            // Nothing is added for a bad id; where it is reported immediately, nothing at all is added.
            Tensor sums = zeros({100, 8});
            all += error_of([&] {
                       backend(test_device()).embedding_backward(ids, ones({5, 8}), sums);
                   }) +
                   "\n";
            CHECK(sums.sum().item() == (test_device() == Device::cpu() ? 0.0 : 24.0));
        }
        texts.push_back(all);
    });
    CHECK(
        contains(texts[0], "[embedding] id 100 at position 2 is outside 0..99, the 100 rows of the weight."));
    CHECK(contains(texts[0], "id 2147483648 at position 2"));
    for (const std::string& text : texts) CHECK(text == texts[0]);
}

TEST_CASE("embedding: the gradient has the same bits on every device, and every time") {
    Generator generator(8);
    const Tensor ids = randint(0, 60, {5000}, {DType::i64}, &generator);
    std::vector<std::vector<double>> results;
    for (const std::int64_t width : {64, 3}) {
        const Tensor dy = randn({5000, width}, {}, &generator);
        results.clear();
        on_each_device([&] {
            for (int time = 0; time < 2; ++time) {
                Tensor sums = ones({60, width});
                backend(test_device()).embedding_backward(ids.to(test_device()), dy.to(test_device()), sums);
                results.push_back(sums.to_vector());
            }
        });
        for (const auto& result : results) CHECK(result == results.front());
    }
}

TEST_CASE("embedding: rows of every dtype and width are copied whole") {
    on_each_device([] {
        for (const DType dtype : all_dtypes()) {
            for (const std::int64_t width : {1, 6, 16, 20}) {
                const Tensor weight = arange(0, 4 * width).to(dtype).reshape({4, width});
                const Tensor rows = embedding(weight, tensor(std::vector<std::int64_t>{3, 1}, {2}));
                CHECK(rows.select(0, 0).to_vector() == weight.select(0, 3).to_vector());
                CHECK(rows.select(0, 1).to_vector() == weight.select(0, 1).to_vector());
            }
        }
    });
}

}  // namespace potluck::test
