#include "autograd/ops/copy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/view.h"
#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

const Reference same_values = [](const std::vector<Array>& x) { return x; };

template <class Function>
std::vector<Case> copy_cases(Function function, double low = -3.0) {
    std::vector<Case> cases;
    for (const Shape& shape : usual_shapes())
        cases.push_back({.inputs = {{.shape = shape, .low = low, .high = 4.0}},
                         .call = call(function),
                         .reference = same_values});
    return cases;
}

template <DType dtype>
DType constant(DType) {
    return dtype;
}

/// Conversion to one dtype, from all.
template <DType target>
Row to_row() {
    // u8 has no negative numbers: floating ones become 0, integers wrap around. Tested below.
    Row row{
        .op = "to",
        .cases = copy_cases([](const Tensor& x) { return to(x, target); }, target == DType::u8 ? 0.0 : -3.0),
        .dtypes = all_dtypes(),
        .results = {constant<target>},
        .differentiable = is_floating(target),
        .gradcheck = target == DType::f64};
    for (Case& sample : row.cases) {
        sample.note = "to " + std::string(name_of(target));
        if (!is_floating(target) && target != DType::boolean)
            sample.reference =
                reference([](const Array& x) { return map(x, [](double v) { return std::trunc(v); }); });
    }
    return row;
}

}  // namespace

std::vector<Row> copy_rows() {
    Row move_row{.op = "to",
                 .cases = copy_cases([](const Tensor& x) { return to(x, test_device()); }),
                 .dtypes = all_dtypes()};
    return {{.op = "contiguous",
             .cases = copy_cases([](const Tensor& x) { return contiguous(x); }),
             .dtypes = all_dtypes()},
            {.op = "clone",
             .cases = copy_cases([](const Tensor& x) { return clone(x); }),
             .dtypes = all_dtypes()},
            move_row,
            to_row<DType::f64>(),
            to_row<DType::f32>(),
            to_row<DType::f16>(),
            to_row<DType::bf16>(),
            to_row<DType::i64>(),
            to_row<DType::i32>(),
            to_row<DType::u8>(),
            to_row<DType::boolean>()};
}
const RowsOfFamily copy_family(copy_rows);

TEST_CASE("copy: contiguous and to give x itself where nothing is to do, clone never does") {
    on_each_device([] {
        const Tensor x = ones({2, 3});
        CHECK(contiguous(x).is_same(x));
        CHECK(to(x, DType::f32).is_same(x));
        CHECK(to(x, test_device()).is_same(x));
        CHECK(!clone(x).is_same(x));
        CHECK(clone(x).storage() != x.storage());
        CHECK(contiguous(transpose(x, 0, 1)).is_contiguous());
    });
}

TEST_CASE("copy: tensors move between the CPU and any device, values, dtype and gradient") {
    on_each_device([] {
        for (const DType dtype : all_dtypes()) {
            const Tensor x = potluck::tensor({{0, 1, 1}, {1, 0, 1}}, {dtype});
            for (const Tensor& y : {x, transpose(x, 0, 1), narrow(x, 1, 1, 2), x[1].expand({3, 3})}) {
                const Tensor moved = to(y, test_device());
                CHECK(moved.device() == test_device());
                CHECK(name_of(moved.dtype()) == name_of(dtype));
                CHECK(moved.to_vector() == y.to_vector());
                CHECK(to(moved, Device::cpu()).to_vector() == y.to_vector());
                CHECK(to(transpose(moved, 0, 1), Device::cpu()).to_vector() ==
                      transpose(y, 0, 1).to_vector());
            }
        }
        Tensor x = potluck::ones({3});
        x.set_requires_grad();
        multiply(to(x, test_device()), tensor({1, 2, 3})).sum().backward();
        CHECK(x.grad().device() == Device::cpu());
        CHECK(x.grad().to_vector() == std::vector<double>{1, 2, 3});
    });
}

TEST_CASE("copy: conversion from floating to integers cuts towards zero and stops at the limits") {
    on_each_device([] {
        const Tensor x = tensor({-1.9, 1.9, 300.0, -5.0, std::nan("")});
        CHECK(to(x, DType::i32).to_vector() == std::vector<double>{-1, 1, 300, -5, 0});
        CHECK(to(x, DType::u8).to_vector() == std::vector<double>{0, 1, 255, 0, 0});
        CHECK(to(x, DType::boolean).to_vector() == std::vector<double>{1, 1, 1, 1, 1});
        CHECK(to(tensor(std::vector<std::int64_t>{-1, 256, 257}, {3}), DType::u8).to_vector() ==
              std::vector<double>{255, 0, 1});
    });
}

}  // namespace potluck::test
