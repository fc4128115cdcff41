#include "tests/ops/table.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "core/factories.h"

namespace potluck::test {

DType same_dtype(DType dtype) { return dtype; }
DType boolean_dtype(DType) { return DType::boolean; }
DType i64_dtype(DType) { return DType::i64; }
DType f32_dtype(DType) { return DType::f32; }
DType floating_result(DType dtype) { return is_floating(dtype) ? dtype : DType::f32; }
DType sum_result(DType dtype) { return is_floating(dtype) ? dtype : DType::i64; }
DType statistics_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

std::vector<DType> floating_dtypes() { return {DType::f64, DType::f32, DType::f16, DType::bf16}; }
std::vector<DType> number_dtypes() {
    return {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64, DType::i32, DType::u8};
}
std::vector<DType> all_dtypes() {
    return {DType::f64, DType::f32, DType::f16, DType::bf16,
            DType::i64, DType::i32, DType::u8,  DType::boolean};
}

Tolerance tolerance_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return {1e-12, 1e-12};
        case DType::f32:
            return {2e-6, 1e-6};
        case DType::f16:
            return {1e-3, 1e-4};  // one rounding is 4.9e-4
        case DType::bf16:
            return {8e-3, 1e-3};  // one rounding is 3.9e-3
        default:
            return {0.0, 0.0};
    }
}

Tolerance gradient_tolerance_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return {1e-11, 1e-11};
        case DType::f32:
            return {1e-5, 5e-6};
        case DType::f16:
            return {4e-3, 4e-3};
        case DType::bf16:
            return {3e-2, 3e-2};
        default:
            return {0.0, 0.0};
    }
}

bool is_close(double got, double expected, Tolerance tolerance) {
    if (std::isnan(got) || std::isnan(expected)) return std::isnan(got) && std::isnan(expected);
    if (got == expected) return true;
    if (std::isinf(got) || std::isinf(expected)) return false;
    return std::fabs(got - expected) <= tolerance.absolute + tolerance.relative * std::fabs(expected);
}

namespace {

/// The result of converting a reference value that is out of range of the dtype.
double wrapped(double value, DType dtype) {
    if (dtype == DType::f16 && std::fabs(value) >= 65520.0)
        return std::copysign(std::numeric_limits<double>::infinity(), value);
    if (dtype == DType::boolean) return value != 0.0 ? 1.0 : 0.0;
    if (is_floating(dtype) || dtype == DType::i64) return value;
    const auto wide = static_cast<std::int64_t>(value);
    return dtype == DType::i32 ? static_cast<double>(static_cast<std::int32_t>(wide))
                               : static_cast<double>(static_cast<std::uint8_t>(wide));
}

}  // namespace

std::string difference(const Tensor& got, const Array& expected, Tolerance tolerance) {
    std::ostringstream text;
    text.precision(9);
    if (got.shape() != expected.shape) {
        text << "the shape is " << to_string(got.shape()) << ", expected " << to_string(expected.shape);
        return text.str();
    }
    const std::vector<double> values = got.to_vector();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const double wanted = wrapped(expected.values[i], got.dtype());
        if (is_close(values[i], wanted, tolerance)) continue;
        if (wrong++ == 0)
            text << "element " << to_string(indices_at(got.shape(), static_cast<std::int64_t>(i))) << " of "
                 << to_string(got.shape()) << " is " << values[i] << ", expected " << wanted;
    }
    if (wrong > 1) text << " (and " << wrong - 1 << " more)";
    return text.str();
}

std::vector<Shape> usual_shapes() {
    return {{}, {1}, {0}, {3}, {17}, {2, 0, 3}, {3, 17}, {129, 2}, {2, 3, 5}, {1, 4, 1}, {3, 11003}};
}

std::vector<std::pair<Shape, Shape>> usual_shape_pairs() {
    return {{{}, {}},
            {{3}, {}},
            {{}, {2, 3}},
            {{17}, {17}},
            {{0}, {1}},
            {{2, 0, 3}, {1, 3}},
            {{3, 1}, {1, 5}},
            {{2, 3, 4}, {4}},
            {{4}, {2, 1, 4}},
            {{2, 1, 3, 1}, {5, 1, 4}},
            {{3, 11003}, {3, 1}}};
}

std::vector<std::int64_t> indices_at(const Shape& shape, std::int64_t position) {
    std::vector<std::int64_t> indices(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; position /= shape[i]) indices[i] = position % shape[i];
    return indices;
}

std::int64_t position_at(const Shape& shape, const std::vector<std::int64_t>& indices) {
    std::int64_t position = 0;
    for (std::size_t i = 0; i < shape.size(); ++i) position = position * shape[i] + indices[i];
    return position;
}

namespace {

/// Moves to the next element in row-major order.
void advance(const Shape& shape, std::vector<std::int64_t>& indices) {
    for (std::size_t i = shape.size(); i-- > 0;) {
        if (++indices[i] < shape[i]) return;
        indices[i] = 0;
    }
}

}  // namespace

Array from_indices(const Shape& shape,
                   const std::function<double(const std::vector<std::int64_t>&)>& function) {
    Array result{shape, std::vector<double>(static_cast<std::size_t>(element_count(shape)))};
    std::vector<std::int64_t> indices(shape.size(), 0);
    for (double& value : result.values) {
        value = function(indices);
        advance(shape, indices);
    }
    return result;
}

Array map(const Array& x, const std::function<double(double)>& function) {
    Array result = x;
    for (double& value : result.values) value = function(value);
    return result;
}

Array broadcast(const Array& x, const Shape& shape) {
    const std::size_t added = shape.size() - x.shape.size();
    return from_indices(shape, [&](const std::vector<std::int64_t>& indices) {
        std::int64_t position = 0;
        for (std::size_t i = 0; i < x.shape.size(); ++i)
            position = position * x.shape[i] + (x.shape[i] == 1 ? 0 : indices[added + i]);
        return x.values[static_cast<std::size_t>(position)];
    });
}

Array map(const Array& x, const Array& y, const std::function<double(double, double)>& function) {
    Shape shape(std::max(x.shape.size(), y.shape.size()), 1);
    const auto size_of_axis = [&](const Shape& of, std::size_t axis) {
        const std::size_t missing = shape.size() - of.size();
        return axis < missing ? 1 : of[axis - missing];
    };
    for (std::size_t i = 0; i < shape.size(); ++i) {
        const std::int64_t a = size_of_axis(x.shape, i);
        const std::int64_t b = size_of_axis(y.shape, i);
        shape[i] = a == 1 ? b : a;
    }
    Array result = broadcast(x, shape);
    const Array other = broadcast(y, shape);
    for (std::size_t i = 0; i < result.values.size(); ++i)
        result.values[i] = function(result.values[i], other.values[i]);
    return result;
}

Array fold_slices(const Array& x, const std::vector<std::int64_t>& axes, bool keep_axes,
                  const std::function<double(const std::vector<double>&)>& function) {
    const auto rank = static_cast<std::int64_t>(x.shape.size());
    std::vector<bool> reduced(x.shape.size(), axes.empty());
    for (const std::int64_t axis : axes)
        reduced[static_cast<std::size_t>(axis < 0 ? axis + rank : axis)] = true;
    Shape kept;
    for (std::size_t i = 0; i < x.shape.size(); ++i) kept.push_back(reduced[i] ? 1 : x.shape[i]);
    std::vector<std::vector<double>> slices(static_cast<std::size_t>(element_count(kept)));
    std::vector<std::int64_t> indices(x.shape.size(), 0);
    for (const double value : x.values) {
        std::int64_t position = 0;
        for (std::size_t axis = 0; axis < indices.size(); ++axis)
            position = position * kept[axis] + (reduced[axis] ? 0 : indices[axis]);
        slices[static_cast<std::size_t>(position)].push_back(value);
        advance(x.shape, indices);
    }
    Array result{{}, {}};
    for (std::size_t i = 0; i < x.shape.size(); ++i)
        if (keep_axes || !reduced[i]) result.shape.push_back(kept[i]);
    for (const std::vector<double>& slice : slices) result.values.push_back(function(slice));
    return result;
}

namespace {

/// The rows that the files of the families registered before main() began.
std::vector<std::vector<Row> (*)()>& families() {
    static std::vector<std::vector<Row> (*)()> all;
    return all;
}

}  // namespace

RowsOfFamily::RowsOfFamily(std::vector<Row> (*rows)()) { families().push_back(rows); }

std::vector<Row> all_rows() {
    std::vector<Row> all;
    for (const auto& family : families())
        for (Row& row : family()) all.push_back(std::move(row));
    return all;
}

}  // namespace potluck::test
