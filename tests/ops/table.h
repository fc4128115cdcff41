#pragma once

// The op table: one row for each public function of autograd/ops/. For each row these properties are tested:
//
//   forward     every dtype of the row against a reference in f64 on the same (rounded) inputs
//   gradcheck   the gradient in f64 against finite differences; for composed ops also the second derivative
//   gradient    in every floating dtype of the row, against the f64 gradient on the same inputs
//   strides     transposed, spaced and broadcast inputs give what their contiguous copies give
//   threads     the same bits with one thread and with two, in forward and backward
//   refusals    bad input throws an Error that names the values
//
// on every device of devices(). The factories in rows and tests create their tensors on the device under test: see
// tests/on_device.h. The modes are in modes.cpp; the rows are grouped by family in tests/ops/<family>.cpp, and each
// file adds its own to the table by a RowsOfFamily. An op without a row fails the suite.
//
// POTLUCK_OP=name runs the modes for one op only.

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "tests/on_device.h"

namespace potluck::test {

/// A tensor in the form of the references: plain numbers in row-major order.
struct Array {
    Shape shape;
    std::vector<double> values;
};

/// How an input is generated. Integer dtypes get the random numbers rounded down, u8 their magnitude, and bool whether
/// they are above 0.
struct Input {
    Shape shape;
    double low = -2.0;
    double high = 2.0;
    std::optional<DType> dtype =
        std::nullopt;                 // in every mode (indices, masks); otherwise the dtype under test
    std::vector<double> values = {};  // instead of random ones
    bool differentiable = true;
    bool whole = false;  // integers: produces ties and zeros
};

using Call = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;
using Reference = std::function<std::vector<Array>(const std::vector<Array>&)>;

/// One set of inputs, the call of the op with its options, and the expected result.
struct Case {
    std::vector<Input> inputs = {};
    Call call;
    Reference reference = {};  // empty for random ops: their values are tested elsewhere
    std::string note = {};     // printed on failure, beside the shapes
};

/// Bad input: the call must throw an Error whose message contains every one of the texts.
struct Refusal {
    std::function<void()> call;
    std::vector<std::string> texts;
};

using ResultDType = DType (*)(DType);
DType same_dtype(DType dtype);
DType boolean_dtype(DType dtype);
DType i64_dtype(DType dtype);
DType f32_dtype(DType dtype);
/// Integers and bool give f32, floating dtypes are kept.
DType floating_result(DType dtype);
/// Integers and bool give i64, floating dtypes are kept.
DType sum_result(DType dtype);
/// f64 for f64, else f32: for losses and statistics.
DType statistics_dtype(DType dtype);

std::vector<DType> floating_dtypes();  // f64 f32 f16 bf16
std::vector<DType> number_dtypes();    // these and i64 i32 u8
std::vector<DType> all_dtypes();       // these and bool

struct Row {
    std::string op;  // the public function
    std::vector<Case> cases = {};
    std::vector<DType> dtypes = floating_dtypes();
    std::vector<ResultDType> results = {
        same_dtype};  // of each output; the last one applies to all further outputs
    bool differentiable = true;
    bool twice_differentiable = true;
    bool gradcheck = true;            // false where rounding makes finite differences useless
    double tolerance = 1.0;           // factor of tolerance_of(dtype)
    double gradient_tolerance = 1.0;  // factor of gradient_tolerance_of(dtype)
    std::vector<Refusal> refusals = {};
};

/// Values may deviate by absolute + relative * |expected|.
struct Tolerance {
    double relative;
    double absolute;
};
/// The tolerances of all ops, in one place: for results, which are rounded once, and for gradients, whose backward
/// rounds intermediate results (in half types also terms that then cancel).
Tolerance tolerance_of(DType dtype);
Tolerance gradient_tolerance_of(DType dtype);
/// Whether got equals expected within the tolerance. NaN equals NaN.
bool is_close(double got, double expected, Tolerance tolerance);
/// An empty text when all values and the shape agree, else a line that says where they do not.
std::string difference(const Tensor& got, const Array& expected, Tolerance tolerance);

// ---- making cases ----

/// Wraps a function of tensors, `call([](const Tensor& x, const Tensor& y) { return x + y; })`, that returns a tensor,
/// a pair of tensors, or a vector of tensors.
inline std::vector<Tensor> as_list(Tensor x) { return {std::move(x)}; }
inline std::vector<Tensor> as_list(std::pair<Tensor, Tensor> pair) { return {pair.first, pair.second}; }
inline std::vector<Tensor> as_list(std::vector<Tensor> list) { return list; }

template <class Function>
Call call(Function function) {
    return [function](const std::vector<Tensor>& x) {
        if constexpr (std::is_invocable_v<Function, Tensor, Tensor, Tensor, Tensor>)
            return as_list(function(x[0], x[1], x[2], x[3]));
        else if constexpr (std::is_invocable_v<Function, Tensor, Tensor, Tensor>)
            return as_list(function(x[0], x[1], x[2]));
        else if constexpr (std::is_invocable_v<Function, Tensor, Tensor>)
            return as_list(function(x[0], x[1]));
        else
            return as_list(function(x[0]));
    };
}
/// The same for references: wraps a function of arrays that returns one array.
template <class Function>
Reference reference(Function function) {
    return [function](const std::vector<Array>& x) -> std::vector<Array> {
        if constexpr (std::is_invocable_v<Function, Array, Array, Array, Array>)
            return {function(x[0], x[1], x[2], x[3])};
        else if constexpr (std::is_invocable_v<Function, Array, Array, Array>)
            return {function(x[0], x[1], x[2])};
        else if constexpr (std::is_invocable_v<Function, Array, Array>)
            return {function(x[0], x[1])};
        else
            return {function(x[0])};
    };
}

/// Shapes for every op that accepts any shape: scalar, empty, odd sizes, and one that several threads share.
std::vector<Shape> usual_shapes();
/// Pairs of shapes that broadcast.
std::vector<std::pair<Shape, Shape>> usual_shape_pairs();

// ---- naive arithmetic on arrays ----

/// Indices of the element at row-major position `position`, and back.
std::vector<std::int64_t> indices_at(const Shape& shape, std::int64_t position);
std::int64_t position_at(const Shape& shape, const std::vector<std::int64_t>& indices);
/// An array from its indices: values[i] = function(indices).
Array from_indices(const Shape& shape,
                   const std::function<double(const std::vector<std::int64_t>&)>& function);
Array map(const Array& x, const std::function<double(double)>& function);
Array broadcast(const Array& x, const Shape& shape);
/// Applies a function element by element, with broadcasting.
Array map(const Array& x, const Array& y, const std::function<double(double, double)>& function);
/// Passes each slice over `axes` (none: all; negative: from the back) to `function` in row-major order.
Array fold_slices(const Array& x, const std::vector<std::int64_t>& axes, bool keep_axes,
                  const std::function<double(const std::vector<double>&)>& function);

// ---- the rows, by family ----

/// The rows of every family whose file is linked, in the order of the files.
std::vector<Row> all_rows();

/// A variable of this type adds the rows that `rows` returns to the table: one in each file of a family.
class RowsOfFamily {
public:
    explicit RowsOfFamily(std::vector<Row> (*rows)());
};

}  // namespace potluck::test
