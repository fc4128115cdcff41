#include "autograd/ops/matmul.h"

#include <algorithm>

#include "autograd/autocast.h"
#include "autograd/ops/activation.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

using detail::as_rows;
using detail::cast;
using detail::keep_if;
using detail::needs_gradient;
using detail::transposed_alias;

namespace {

/// The shape of x as rows along the last axis: (rows, n).
Shape rows_of(const Tensor& x) {
    return {element_count(Shape(x.shape().begin(), x.shape().end() - 1)), x.size(-1)};
}

/// Whether x is the transpose of a row-major matrix.
bool is_column_major(const Tensor& x) {
    return x.ndim() == 2 && !x.is_contiguous() && transposed_alias(x).is_contiguous();
}

/// Adds the product a b, in the shape of input `index`, to that input's gradient, without a temporary. The gradient is
/// column-major if the input is and nothing was accumulated for it yet: a transposed weight comes from a row-major
/// leaf.
void add_product(Gradients& dx, std::size_t index, const Tensor& given_a, const Tensor& given_b,
                 const Shape& shape, bool by_columns = false) {
    const DType dtype = promote(given_a.dtype(), given_b.dtype());
    const Tensor a = cast(given_a, dtype), b = cast(given_b, dtype);
    Shape product(a.shape().begin(), a.shape().end() - 1);
    product.push_back(b.size(-1));
    Backend& device = backend(a.device());
    const DType sum = dx.dtype(index);
    const bool wider = sum == DType::f32 && is_half(dtype);
    if (by_columns && product.size() == 2 && !dx.collected(index)) {
        Tensor y = Tensor::empty({product[1], product[0]}, {dtype, a.device()});
        device.matmul(transposed_alias(b), transposed_alias(a), y, /*accumulate=*/false);
        y = transposed_alias(y);
        dx.add(index, y);
    } else if ((sum == dtype || wider) && element_count(product) == element_count(shape)) {
        const auto [memory, accumulate] = dx.destination(index);
        Tensor seen = memory.alias(product, contiguous_strides(product), memory.offset());
        device.matmul(a, b, seen, accumulate);
    } else {
        Tensor y = Tensor::empty(product, {wider ? sum : dtype, a.device()});
        device.matmul(a, b, y, /*accumulate=*/false);
        dx.add(index, element_count(shape) == y.count() ? detail::reshaped(y, shape) : y);
    }
}

/// Throws Error when the inner sizes or the batches of a product do not match.
void require_fit(const Tensor& a, const Tensor& b) {
    const std::int64_t inner = a.size(-1), other = b.ndim() == 1 ? b.size(0) : b.size(-2);
    if (inner != other) {
        const bool matrices = a.ndim() > 1 && b.ndim() > 1;
        const char* way_out = " The last size of the first must be the last but one of the second.";
        if (!matrices) way_out = " A vector must be as long as the axis that it meets.";
        if (matrices && a.size(-2) == b.size(-2)) way_out = " Did you mean to transpose the first?";
        if (matrices && a.size(-1) == b.size(-1)) way_out = " Did you mean to transpose the second?";
        throw Error("matmul", fmt::format("inner sizes differ: {} x {}.{}", pretty(a.shape()),
                                          pretty(b.shape()), way_out));
    }
    for (std::int64_t axis = -3; axis >= -std::min(a.ndim(), b.ndim()); --axis) {
        const std::int64_t one = a.size(axis), two = b.size(axis);
        if (one != two && one != 1 && two != 1)
            throw Error(
                "matmul",
                fmt::format("the batches of {} and {} do not broadcast: counted from the end, axis {} has "
                            "sizes {} and {}. They must be equal, or one of them 1.",
                            pretty(a.shape()), pretty(b.shape()), -axis, one, two));
    }
}

/// (.., m, k) x (.., k, n), both with two axes or more.
Tensor matrix_product(const Tensor& given_a, const Tensor& given_b) {
    detail::require_same_device("matmul", {given_a, given_b});
    const auto [a, b] = detail::autocast_operands(given_a, given_b);
    const DType dtype = promote(a.dtype(), b.dtype());
    if (dtype == DType::boolean)
        throw Error("matmul", "bool tensors have no product. Convert one with .to(DType::f32).");
    const Tensor left = cast(a, dtype), right = cast(b, dtype);
    const std::int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
    const Shape a_batch(a.shape().begin(), a.shape().end() - 2),
        b_batch(b.shape().begin(), b.shape().end() - 2);
    Shape batch = broadcast_shapes("matmul", a_batch, b_batch);
    const auto with = [](Shape shape, std::int64_t rows, std::int64_t columns) {
        shape.push_back(rows);
        shape.push_back(columns);
        return shape;
    };
    const Shape shape = with(batch, m, n);
    Tensor y = Tensor::empty(shape, {dtype, a.device()});

    // One matrix on the right: all batches on the left become rows of one product, if the strides allow it.
    const Shape rows{element_count(a_batch) * m, k};
    const bool folds =
        b.ndim() == 2 && a.ndim() > 2 && detail::view_strides(a.shape(), a.strides(), rows).has_value();
    if (folds) {
        Tensor flat = y.alias({rows[0], n}, {n, 1}, 0);
        backend(a.device()).matmul(detail::reshaped(left, rows), right, flat, false);
    } else {
        backend(a.device())
            .matmul(left.broadcast_alias("matmul", with(batch, m, k)),
                    right.broadcast_alias("matmul", with(batch, k, n)), y, false);
    }
    return record("matmul", y, {a, b}, {keep_if(needs_gradient(b), a), keep_if(needs_gradient(a), b)},
                  [batch, a_shape = a.shape(), b_shape = b.shape(), by_columns = is_column_major(b), with](
                      const Saved& saved, const Tensor& dy, Gradients& dx) {
                      if (is_grad_enabled()) {
                          if (dx.wants(0)) dx.add(0, matmul(dy, transpose(saved[1])));
                          if (dx.wants(1)) dx.add(1, matmul(transpose(saved[0]), dy));
                          return;
                      }
                      // Batches that share the right matrix are rows of a single product in both gradients.
                      const bool shared = b_shape.size() == 2;
                      const auto whole = [&](const Tensor& x) {  // with all batches
                          return x.broadcast_alias("matmul", with(batch, x.size(-2), x.size(-1)));
                      };
                      if (dx.wants(0)) {
                          const Tensor right = transposed_alias(saved[1]);
                          if (shared)
                              add_product(dx, 0, as_rows(dy), right, a_shape);
                          else
                              add_product(dx, 0, dy, whole(right), a_shape);
                      }
                      if (dx.wants(1)) {
                          const Tensor left = saved[0];
                          if (shared)
                              add_product(dx, 1, transposed_alias(as_rows(left)), as_rows(dy), b_shape,
                                          by_columns);
                          else
                              add_product(dx, 1, transposed_alias(whole(left)), dy, b_shape);
                      }
                  });
}

/// The operands as the device multiplies them: all of one dtype.
struct LinearOperands {
    Tensor rows, weight, bias;  // (rows, in), (out, in), (out) or undefined
    Shape shape;                // of the result

    Tensor empty_result() const {
        return Tensor::empty({rows.size(0), weight.size(0)}, {rows.dtype(), rows.device()});
    }
    Tensor in_shape(const Tensor& y) const { return y.alias(shape, contiguous_strides(shape), 0); }
};

/// Throws Error when the operands do not match.
LinearOperands linear_operands(const Tensor& x, const Tensor& given_weight, const Tensor& bias,
                               WeightLayout layout) {
    detail::require_defined("linear", x, "x");
    detail::require_defined("linear", given_weight, "the weight");
    detail::require_same_device("linear", {x, given_weight, bias});
    detail::require_rank("linear", x, "x", 1);
    const bool in_first = layout == WeightLayout::in_out;
    const std::int64_t in = x.size(-1);
    if (given_weight.ndim() != 2 || given_weight.size(in_first ? 0 : 1) != in) {
        const bool turned = given_weight.ndim() == 2 && given_weight.size(in_first ? 1 : 0) == in;
        throw Error(
            "linear",
            fmt::format("x {} needs a weight {}, but it is {}.{}", pretty(x.shape()),
                        in_first ? fmt::format("({}, out)", in) : fmt::format("(out, {})", in),
                        pretty(given_weight.shape()), turned ? " Did you mean to transpose it?" : ""));
    }
    const Tensor weight = in_first ? transposed_alias(given_weight) : given_weight;
    const std::int64_t out = weight.size(0);
    if (bias.defined() && bias.shape() != Shape{out})
        throw Error("linear", fmt::format("the weight {} needs a bias ({}), but it is {}.",
                                          pretty(given_weight.shape()), out, pretty(bias.shape())));
    DType dtype = promote(x.dtype(), weight.dtype());
    if (bias.defined()) dtype = promote(dtype, bias.dtype());
    if (dtype == DType::boolean)
        throw Error("linear", "bool tensors have no product. Convert one with .to(DType::f32).");

    Shape shape = x.shape();
    shape.back() = out;
    return {cast(as_rows(x), dtype), cast(weight, dtype), detail::cast_or_none(bias, dtype),
            std::move(shape)};
}

/// Records y = x weight^T + bias (x weight + bias) on the tape. Returns y.
Tensor record_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
                     const Tensor& y) {
    return record(
        "linear", y, {x, weight, bias},
        {keep_if(needs_gradient(weight), x), keep_if(needs_gradient(x), weight)},
        [in_first = layout == WeightLayout::in_out, by_columns = is_column_major(weight)](
            const Saved& saved, const Tensor& dy, Gradients& dx) {
            if (is_grad_enabled()) {
                const Tensor dy_rows = reshape(dy, rows_of(dy));
                if (dx.wants(0)) dx.add(0, matmul(dy, in_first ? transpose(saved[1]) : saved[1]));
                if (dx.wants(1)) {
                    const Tensor x = saved[0], x_rows = reshape(x, rows_of(x));
                    dx.add(1, in_first ? matmul(transpose(x_rows), dy_rows)
                                       : matmul(transpose(dy_rows), x_rows));
                }
                if (dx.wants(2)) dx.add(2, sum(dy_rows, {0}));
                return;
            }
            const Tensor dy_rows = as_rows(dy);  // (rows, out)
            if (dx.wants(0)) {
                const Tensor weight = in_first ? transposed_alias(saved[1]) : saved[1];  // (out, in)
                Shape shape = dy.shape();
                shape.back() = weight.size(1);
                add_product(dx, 0, dy_rows, weight, shape);
            }
            if (dx.wants(1)) {
                const Tensor x_rows = as_rows(saved[0]);
                const Tensor& left = in_first ? x_rows : dy_rows;
                const Tensor& right = in_first ? dy_rows : x_rows;
                add_product(dx, 1, transposed_alias(left), right, {left.size(1), right.size(1)}, by_columns);
            }
            if (dx.wants(2)) {
                // A product with ones would round intermediate sums of half types; reduce() sums them in f32.
                Tensor total = detail::empty_gradient(dx, 2, {dy.size(-1)}, dy);
                backend(dy.device()).reduce(ReduceOp::sum, transposed_alias(dy_rows), 1, total);
                dx.add(2, total);
            }
        });
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
    const OpScope scope("matmul");
    detail::require_defined("matmul", a, "the first operand");
    detail::require_defined("matmul", b, "the second operand");
    if (a.ndim() == 0 || b.ndim() == 0)
        throw Error("matmul",
                    fmt::format("a tensor without axes has no matrix product: {} x {}. Use * to scale.",
                                pretty(a.shape()), pretty(b.shape())));
    require_fit(a, b);
    if (a.ndim() > 1 && b.ndim() > 1) return matrix_product(a, b);
    if (a.ndim() == 1 && b.ndim() == 1) return reshape(matrix_product(unsqueeze(a, 0), unsqueeze(b, 1)), {});
    if (a.ndim() == 1) return squeeze(matrix_product(unsqueeze(a, 0), b), -2);
    return squeeze(matrix_product(a, unsqueeze(b, 1)), -1);
}

Tensor linear(const Tensor& given_x, const Tensor& given_weight, const Tensor& given_bias,
              WeightLayout layout) {
    const OpScope scope("linear");
    const auto [x, weight, bias] = detail::autocast_operands(given_x, given_weight, given_bias);
    const LinearOperands operands = linear_operands(x, weight, bias, layout);
    Tensor y = operands.empty_result();
    if (bias.defined())
        backend(x.device()).linear(operands.rows, operands.weight, operands.bias, y);
    else
        backend(x.device()).matmul(operands.rows, transposed_alias(operands.weight), y, /*accumulate=*/false);
    return record_linear(x, weight, bias, layout, operands.in_shape(y));
}

Tensor linear_gelu(const Tensor& given_x, const Tensor& given_weight, const Tensor& given_bias,
                   WeightLayout layout) {
    const OpScope scope("linear");
    const auto [x, weight, bias] = detail::autocast_operands(given_x, given_weight, given_bias);
    const LinearOperands operands = linear_operands(x, weight, bias, layout);
    if (!bias.defined() || !is_floating(operands.rows.dtype()))
        return gelu(linear(x, weight, bias, layout), GeluKind::tanh);
    Tensor before = operands.empty_result(), y = operands.empty_result();
    backend(x.device()).linear_gelu(operands.rows, operands.weight, operands.bias, before, y);
    // The tape shows the two ops of which it is composed.
    return detail::record_gelu(record_linear(x, weight, bias, layout, operands.in_shape(before)),
                               operands.in_shape(y), GeluKind::tanh);
}

}  // namespace potluck
