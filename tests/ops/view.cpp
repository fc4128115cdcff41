#include "autograd/ops/view.h"

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

template <class Function>
Case view_case(const Shape& shape, Function function, const Reference& expected,
               const std::string& note = {}) {
    return {.inputs = {{.shape = shape}}, .call = call(function), .reference = expected, .note = note};
}

/// The same elements in the same order, in another shape.
Reference shaped(const Shape& shape) {
    return reference([shape](const Array& x) { return Array{shape, x.values}; });
}

/// Element `indices` of the result is element from(indices) of x.
template <class From>
Reference picked(const Shape& shape, From from) {
    return reference([shape, from](const Array& x) {
        return from_indices(shape, [&](const std::vector<std::int64_t>& indices) {
            return x.values[static_cast<std::size_t>(position_at(x.shape, from(indices)))];
        });
    });
}

using Indices = std::vector<std::int64_t>;

/// Pieces along axis 0 of a (5, 3) array.
Reference pieces(const std::vector<std::int64_t>& sizes) {
    return [sizes](const std::vector<Array>& x) {
        std::vector<Array> result;
        std::size_t row = 0;
        for (const std::int64_t size : sizes) {
            Array piece{{size, 3}, {}};
            const auto begin = x[0].values.begin() + static_cast<std::ptrdiff_t>(row * 3);
            piece.values.assign(begin, begin + static_cast<std::ptrdiff_t>(size * 3));
            row += static_cast<std::size_t>(size);
            result.push_back(piece);
        }
        return result;
    };
}

std::vector<Row> shape_rows() {
    Row reshape_row{.op = "reshape", .dtypes = all_dtypes()};
    for (const auto& [from, wanted, result] : {std::tuple<Shape, Shape, Shape>{{2, 6}, {3, 4}, {3, 4}},
                                               {{2, 6}, {-1}, {12}},
                                               {{12}, {2, -1, 3}, {2, 2, 3}},
                                               {{}, {1, 1}, {1, 1}},
                                               {{1}, {}, {}},
                                               {{0, 3}, {3, 0, 2}, {3, 0, 2}},
                                               {{2, 3, 4}, {6, -1}, {6, 4}}})
        reshape_row.cases.push_back(view_case(
            from, [wanted](const Tensor& x) { return reshape(x, wanted); }, shaped(result),
            "to " + to_string(result)));
    reshape_row.refusals = {
        {[] {
             reshape(ones({2, 3}), {4, 2});
         },
         {"[reshape]", "(2, 3)", "(4, 2)"}},
        {[] {
             reshape(ones({2, 3}), {-1, -1});
         },
         {"[reshape]", "-1"}},
        {[] {
             reshape(ones({2, 3}), {-1, 4});
         },
         {"[reshape]", "4"}},
        {[] {
             reshape(ones({0, 3}), {-1, 0});
         },
         {"[reshape]"}},
    };

    Row view_row{.op = "view", .dtypes = all_dtypes()};
    for (const auto& [from, wanted] : {std::pair<Shape, Shape>{{6}, {2, 3}},
                                       {{4, 6}, {4, 2, 3}},
                                       {{}, {1}},
                                       {{3, 4}, {3, 1, 4}},
                                       {{0, 4}, {0, 2, 2}}})
        view_row.cases.push_back(view_case(
            from, [wanted](const Tensor& x) { return view(x, wanted); }, shaped(wanted)));
    view_row.refusals = {{[] { view(transpose(ones({2, 3})), {6}); }, {"[view]", "(3, 2)", "(6)"}}};

    Row flatten_row{.op = "flatten", .dtypes = all_dtypes()};
    flatten_row.cases = {
        view_case(
            {2, 3, 4}, [](const Tensor& x) { return flatten(x); }, shaped({24})),
        view_case(
            {2, 3, 4}, [](const Tensor& x) { return flatten(x, 1); }, shaped({2, 12})),
        view_case(
            {2, 3, 4}, [](const Tensor& x) { return flatten(x, 0, -2); }, shaped({6, 4})),
        view_case(
            {}, [](const Tensor& x) { return flatten(x); }, shaped({1})),
        view_case(
            {2, 0}, [](const Tensor& x) { return flatten(x); }, shaped({0})),
    };
    flatten_row.refusals = {{[] { flatten(ones({2, 3}), 1, 0); }, {"[flatten]"}}};

    Row unsqueeze_row{.op = "unsqueeze", .dtypes = all_dtypes()};
    unsqueeze_row.cases = {
        view_case(
            {2, 3}, [](const Tensor& x) { return unsqueeze(x, 0); }, shaped({1, 2, 3})),
        view_case(
            {2, 3}, [](const Tensor& x) { return unsqueeze(x, -1); }, shaped({2, 3, 1})),
        view_case(
            {}, [](const Tensor& x) { return unsqueeze(x, 0); }, shaped({1})),
        view_case(
            {0}, [](const Tensor& x) { return unsqueeze(x, 1); }, shaped({0, 1})),
    };
    unsqueeze_row.refusals = {{[] { unsqueeze(ones({2, 3}), 3); }, {"[unsqueeze]", "3"}}};

    Row squeeze_row{.op = "squeeze", .dtypes = all_dtypes()};
    squeeze_row.cases = {
        view_case(
            {2, 1, 3}, [](const Tensor& x) { return squeeze(x, 1); }, shaped({2, 3})),
        view_case(
            {2, 3, 1}, [](const Tensor& x) { return squeeze(x, -1); }, shaped({2, 3})),
        view_case(
            {1, 2, 1, 3, 1}, [](const Tensor& x) { return squeeze(x); }, shaped({2, 3})),
        view_case(
            {1, 1}, [](const Tensor& x) { return squeeze(x); }, shaped({})),
        view_case(
            {1, 0}, [](const Tensor& x) { return squeeze(x, 0); }, shaped({0})),
    };
    squeeze_row.refusals = {{[] { squeeze(ones({2, 3}), 1); }, {"[squeeze]", "3"}}};
    return {reshape_row, view_row, flatten_row, unsqueeze_row, squeeze_row};
}

std::vector<Row> order_rows() {
    Row transpose_row{.op = "transpose", .dtypes = all_dtypes()};
    transpose_row.cases = {
        view_case(
            {3, 17}, [](const Tensor& x) { return transpose(x); },
            picked({17, 3},
                   [](const Indices& i) {
                       return Indices{i[1], i[0]};
                   })),
        view_case(
            {2, 3, 4}, [](const Tensor& x) { return transpose(x, 0, 2); },
            picked({4, 3, 2},
                   [](const Indices& i) {
                       return Indices{i[2], i[1], i[0]};
                   })),
        view_case(
            {2, 3, 4}, [](const Tensor& x) { return transpose(x, 1, 1); }, shaped({2, 3, 4})),
        view_case(
            {0, 4}, [](const Tensor& x) { return transpose(x); }, shaped({4, 0})),
    };
    transpose_row.refusals = {{[] { transpose(ones({2, 3}), 0, 2); }, {"[transpose]", "2"}}};

    Row permute_row{.op = "permute", .dtypes = all_dtypes()};
    permute_row.cases = {
        view_case(
            {2, 3, 4},
            [](const Tensor& x) {
                return permute(x, {2, 0, 1});
            },
            picked({4, 2, 3},
                   [](const Indices& i) {
                       return Indices{i[1], i[2], i[0]};
                   })),
        view_case(
            {2, 3, 4},
            [](const Tensor& x) {
                return permute(x, {0, -1, 1});
            },
            picked({2, 4, 3},
                   [](const Indices& i) {
                       return Indices{i[0], i[2], i[1]};
                   })),
        view_case(
            {}, [](const Tensor& x) { return permute(x, {}); }, shaped({})),
    };
    permute_row.refusals = {{[] {
                                 permute(ones({2, 3}), {0, 0});
                             },
                             {"[permute]"}},
                            {[] {
                                 permute(ones({2, 3}), {0});
                             },
                             {"[permute]"}}};

    Row expand_row{.op = "expand", .dtypes = all_dtypes()};
    for (const auto& [from, wanted, result] : {std::tuple<Shape, Shape, Shape>{{3, 1}, {3, 5}, {3, 5}},
                                               {{3, 1}, {2, -1, 5}, {2, 3, 5}},
                                               {{}, {2, 3}, {2, 3}},
                                               {{1}, {0}, {0}},
                                               {{4}, {-1}, {4}}})
        expand_row.cases.push_back(view_case(
            from, [wanted](const Tensor& x) { return expand(x, wanted); },
            reference([result](const Array& x) { return broadcast(x, result); }), to_string(result)));
    expand_row.refusals = {{[] {
                                expand(ones({2, 3}), {2, 4});
                            },
                            {"[expand]", "(2, 3)", "(2, 4)"}},
                           {[] {
                                expand(ones({2}), {-1, 2});
                            },
                            {"[expand]", "-1"}}};
    return {transpose_row, permute_row, expand_row};
}

std::vector<Row> part_rows() {
    Row narrow_row{.op = "narrow", .dtypes = all_dtypes()};
    narrow_row.cases = {
        view_case(
            {0, 3}, [](const Tensor& x) { return narrow(x, 1, 1, 2); }, reference([](const Array&) {
                return Array{{0, 2}, {}};
            })),
        view_case(
            {5, 3}, [](const Tensor& x) { return narrow(x, 0, 1, 3); },
            picked({3, 3},
                   [](const Indices& i) {
                       return Indices{i[0] + 1, i[1]};
                   })),
        view_case(
            {2, 17}, [](const Tensor& x) { return narrow(x, -1, 16, 1); },
            picked({2, 1},
                   [](const Indices& i) {
                       return Indices{i[0], 16};
                   })),
        view_case(
            {4}, [](const Tensor& x) { return narrow(x, 0, 4, 0); }, reference([](const Array&) {
                return Array{{0}, {}};
            })),
    };
    narrow_row.refusals = {{[] {
                                narrow(ones({5, 3}), 0, 3, 3);
                            },
                            {"[narrow]", "5"}},
                           {[] {
                                narrow(ones({5, 3}), 0, -1, 2);
                            },
                            {"[narrow]", "-1"}},
                           {[] {
                                narrow(ones({5, 3}), 0, 1, -1);
                            },
                            {"[narrow]", "-1"}}};

    Row select_row{.op = "select", .dtypes = all_dtypes()};
    select_row.cases = {
        view_case(
            {5, 3}, [](const Tensor& x) { return select(x, 0, 2); },
            picked({3},
                   [](const Indices& i) {
                       return Indices{2, i[0]};
                   })),
        view_case(
            {5, 3}, [](const Tensor& x) { return select(x, 1, -1); },
            picked({5},
                   [](const Indices& i) {
                       return Indices{i[0], 2};
                   })),
        view_case(
            {3}, [](const Tensor& x) { return select(x, 0, 0); },
            picked({}, [](const Indices&) { return Indices{0}; })),
    };
    select_row.refusals = {{[] {
                                select(ones({5, 3}), 0, 5);
                            },
                            {"[select]", "5"}},
                           {[] {
                                select(ones({5, 3}), 0, -6);
                            },
                            {"[select]", "-6"}},
                           {[] { select(ones({}), 0, 0); }, {"[select]"}}};

    Row slice_row{.op = "slice", .dtypes = all_dtypes()};
    slice_row.cases = {
        view_case(
            {7, 2}, [](const Tensor& x) { return slice(x, 0, 1, 6, 2); },
            picked({3, 2},
                   [](const Indices& i) {
                       return Indices{1 + 2 * i[0], i[1]};
                   })),
        view_case(
            {7}, [](const Tensor& x) { return slice(x, 0, -3, 100); },
            picked({3}, [](const Indices& i) { return Indices{4 + i[0]}; })),
        view_case(
            {7}, [](const Tensor& x) { return slice(x, 0, 0, 7, 3); },
            picked({3}, [](const Indices& i) { return Indices{3 * i[0]}; })),
        view_case(
            {7}, [](const Tensor& x) { return slice(x, 0, 5, 2); }, reference([](const Array&) {
                return Array{{0}, {}};
            })),
    };
    slice_row.refusals = {{[] { slice(ones({7}), 0, 0, 7, 0); }, {"[slice]", "0"}},
                          {[] { slice(ones({7}), 0, 0, 7, -1); }, {"[slice]", "-1"}}};

    Row split_row{.op = "split", .dtypes = all_dtypes()};
    split_row.cases = {
        view_case(
            {5, 3}, [](const Tensor& x) { return split(x, 2); }, pieces({2, 2, 1})),
        view_case(
            {5, 3}, [](const Tensor& x) { return split(x, 9); }, pieces({5})),
        view_case(
            {5, 3},
            [](const Tensor& x) {
                return split(x, std::vector<std::int64_t>{1, 0, 4});
            },
            pieces({1, 0, 4})),
    };
    split_row.refusals = {{[] {
                               split(ones({5, 3}), 0);
                           },
                           {"[split]", "0"}},
                          {[] {
                               split(ones({5, 3}), std::vector<std::int64_t>{2, 2});
                           },
                           {"[split]", "5", "(2, 2)"}}};
    return {narrow_row, select_row, slice_row, split_row};
}

}  // namespace

std::vector<Row> view_rows() {
    std::vector<Row> rows = shape_rows();
    for (const auto& more : {order_rows(), part_rows()}) rows.insert(rows.end(), more.begin(), more.end());
    return rows;
}
const RowsOfFamily view_family(view_rows);

TEST_CASE("view: views share the memory of x") {
    on_each_device([] {
        const Tensor x = zeros({4, 6});
        for (const Tensor& y :
             {view(x, {24}), reshape(x, {2, 12}), flatten(x), transpose(x), permute(x, {1, 0}),
              expand(unsqueeze(x, 0), {3, 4, 6}), unsqueeze(x, 1), squeeze(unsqueeze(x, 1), 1),
              narrow(x, 0, 1, 2), select(x, 0, 3), slice(x, 1, 0, 6, 2), split(x, 2)[1]})
            CHECK(y.storage() == x.storage());
        CHECK(reshape(transpose(x), {24}).storage() != x.storage());
    });
}

}  // namespace potluck::test
