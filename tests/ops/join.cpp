#include "autograd/ops/join.h"

#include <doctest/doctest.h>

#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

/// Concatenates arrays that agree in all axes but `axis`.
Array joined(const std::vector<Array>& parts, std::size_t axis) {
    Shape shape = parts[0].shape;
    shape[axis] = 0;
    for (const Array& part : parts) shape[axis] += part.shape[axis];
    return from_indices(shape, [&](std::vector<std::int64_t> indices) {
        std::size_t part = 0;
        while (indices[axis] >= parts[part].shape[axis]) indices[axis] -= parts[part++].shape[axis];
        return parts[part].values[static_cast<std::size_t>(position_at(parts[part].shape, indices))];
    });
}

Case join_case(const std::vector<Shape>& shapes, const Call& function, const Reference& expected,
               const std::string& note) {
    Case sample{.call = function, .reference = expected, .note = note};
    for (const Shape& shape : shapes) sample.inputs.push_back({.shape = shape});
    return sample;
}

}  // namespace

std::vector<Row> join_rows() {
    Row cat_row{.op = "cat", .dtypes = all_dtypes()};
    for (const auto& [shapes, axis] : {std::pair<std::vector<Shape>, std::int64_t>{{{2, 3}, {4, 3}}, 0},
                                       {{{2, 3}, {2, 1}, {2, 17}}, 1},
                                       {{{2, 3, 4}, {2, 5, 4}}, -2},
                                       {{{3}}, 0},
                                       {{{0, 3}, {2, 3}}, 0},
                                       {{{0}, {0}}, 0},
                                       {{{2, 9001}, {2, 300}}, 1}}) {
        const auto from_front = axis < 0 ? axis + static_cast<std::int64_t>(shapes[0].size()) : axis;
        cat_row.cases.push_back(join_case(
            shapes, [axis = axis](const std::vector<Tensor>& x) { return std::vector<Tensor>{cat(x, axis)}; },
            [from_front](const std::vector<Array>& x) {
                return std::vector<Array>{joined(x, static_cast<std::size_t>(from_front))};
            },
            "axis " + std::to_string(axis)));
    }
    cat_row.refusals = {{[] { cat({}); }, {"[cat]"}},
                        {[] {
                             cat({ones({2, 3}), ones({2, 4})});
                         },
                         {"[cat]", "(2, 3)", "(2, 4)"}},
                        {[] {
                             cat({ones({2, 3}), ones({2})});
                         },
                         {"[cat]"}},
                        {[] {
                             cat({ones({2, 3})}, 2);
                         },
                         {"[cat]", "2"}},
                        {[] {
                             cat({ones({}), ones({})});
                         },
                         {"[cat]"}}};

    Row stack_row{.op = "stack", .dtypes = all_dtypes()};
    for (const auto& [shape, axis] :
         {std::pair<Shape, std::int64_t>{{2, 3}, 0}, {{2, 3}, 1}, {{2, 3}, -1}, {{}, 0}, {{0, 3}, 1}}) {
        const auto from_front =
            static_cast<std::size_t>(axis < 0 ? axis + static_cast<std::int64_t>(shape.size()) + 1 : axis);
        stack_row.cases.push_back(join_case(
            {shape, shape, shape},
            [axis = axis](const std::vector<Tensor>& x) { return std::vector<Tensor>{stack(x, axis)}; },
            [from_front](std::vector<Array> x) {
                for (Array& part : x)
                    part.shape.insert(part.shape.begin() + static_cast<std::ptrdiff_t>(from_front), 1);
                return std::vector<Array>{joined(x, from_front)};
            },
            "axis " + std::to_string(axis)));
    }
    stack_row.refusals = {{[] { stack({}); }, {"[stack]"}},
                          {[] {
                               stack({ones({2}), ones({3})});
                           },
                           {"[stack]", "(2)", "(3)"}},
                          {[] { stack({ones({2})}, 2); }, {"[stack]", "2"}}};
    return {cat_row, stack_row};
}
const RowsOfFamily join_family(join_rows);

TEST_CASE("join: dtypes are promoted, and each gradient has its input's dtype") {
    on_each_device([] {
        Tensor a = ones({2}, {DType::f16});
        Tensor b = ones({3}, {DType::f32});
        a.set_requires_grad();
        b.set_requires_grad();
        const Tensor y = cat({a, b, ones({1}, {DType::i32})});
        CHECK(name_of(y.dtype()) == "f32");
        y.sum().backward();
        CHECK(name_of(a.grad().dtype()) == "f16");
        CHECK(name_of(b.grad().dtype()) == "f32");
        CHECK(b.grad().to_vector() == std::vector<double>(3, 1.0));
    });
}

}  // namespace potluck::test
