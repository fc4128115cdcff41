#include "autograd/ops/embedding.h"

#include <doctest/doctest.h>

#include "core/factories.h"
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
          {7, 1300, {200}, DType::i64}}) {
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

}  // namespace potluck::test
