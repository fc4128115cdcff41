#include "autograd/ops/norm.h"

#include "autograd/autocast.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

using detail::as_rows;
using detail::cast;
using detail::cast_or_none;
using detail::empty_gradient;

namespace {

/// The checks that both norms share. Returns the dtype of the result.
DType check(const char* name, const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
    detail::require_defined(name, x, "x");
    detail::require_rank(name, x, "x", 1);
    detail::require_floating(name, x, "x");
    detail::require_same_device(name, {x, weight, bias});
    if (!(epsilon >= 0.0))
        throw Error(name, fmt::format("epsilon is {}, but it must be 0 or more.", epsilon));
    DType dtype = x.dtype();
    for (const Tensor* parameter : {&weight, &bias}) {
        if (!parameter->defined()) continue;
        const char* what = parameter == &weight ? "weight" : "bias";
        detail::require_floating(name, *parameter, what);
        if (parameter->shape() != Shape{x.size(-1)})
            throw Error(name, fmt::format("x {} needs a {} ({}), but it is {}.", pretty(x.shape()), what,
                                          x.size(-1), pretty(parameter->shape())));
        dtype = promote(dtype, parameter->dtype());
    }
    // Under Autocast f32 parameters do not widen what flows through.
    return dtype == DType::f32 && x.dtype() == Autocast::dtype() ? x.dtype() : dtype;
}

Tensor empty_rows(const Tensor& rows, DType dtype) {
    return Tensor::empty({rows.size(0)}, {accumulation_dtype(dtype), rows.device()});
}

/// All axes but the last.
Axes leading_axes(const Tensor& x) {
    Axes axes;
    for (std::int64_t axis = 0; axis + 1 < x.ndim(); ++axis) axes.push_back(axis);
    return axes;
}

/// Sums over the rows; without leading axes there is one row.
Tensor sum_rows(const Tensor& x) { return x.ndim() == 1 ? x : sum(x, leading_axes(x)); }

/// The gradients of y = normalised * weight + bias, composed of ops on the tape, for second derivatives. `normalised`
/// is (x - mean) * scale (mean 0 for rms_norm), where `scale` depends on x.
void composed_backward(const Tensor& normalised, const Tensor& scale, bool centre, const Tensor& weight,
                       const Tensor& dy, Gradients& dx, std::size_t inputs) {
    if (dx.wants(0)) {
        const Tensor slope = weight.defined() ? dy * weight : dy;
        Tensor inner = slope - normalised * mean(slope * normalised, {-1}, true);
        if (centre) inner = inner - mean(slope, {-1}, true);
        dx.add(0, inner * scale);
    }
    if (inputs > 1 && dx.wants(1)) dx.add(1, sum_rows(dy * normalised));
    if (inputs > 2 && dx.wants(2)) dx.add(2, sum_rows(dy));
}

/// The destination of the gradient of x, seen as (rows, width): added to what other ops have accumulated (in a
/// transformer: the gradient of the residual branch), or in new memory. Undefined when it is not needed.
struct RowsGradient {
    Tensor rows = {};
    bool accumulate = false;
    bool in_place = false;

    RowsGradient(Gradients& dx, const Tensor& x, const Tensor& dy) {
        if (!dx.wants(0)) return;
        in_place = dx.dtype(0) == dy.dtype();
        Tensor memory;
        if (in_place) {
            const Gradients::Destination destination = dx.destination(0);
            memory = destination.memory;
            accumulate = destination.accumulate;
        } else {
            memory = Tensor::empty(x.shape(), {dy.dtype(), dy.device()});
        }
        rows = as_rows(memory);
    }
    void add_to(Gradients& dx, const Tensor& x) const {
        if (rows.defined() && !in_place) dx.add(0, rows.alias(x.shape(), contiguous_strides(x.shape()), 0));
    }
};

/// Records sum = x + residual, of one dtype, on the tape.
Tensor record_sum(const Tensor& sum, const Tensor& x, const Tensor& residual) {
    return record("add", sum, {x, residual}, {}, [](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, dy);
        dx.add(1, dy);
    });
}

Tensor record_layer_norm(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         double epsilon, const Tensor& mean_of_rows, const Tensor& rstd) {
    return record(
        "layer_norm", y, {x, weight, bias}, {x, weight, mean_of_rows, rstd},
        [epsilon](const Saved& saved, const Tensor& dy, Gradients& dx) {
            const Tensor x = saved[0], weight = saved[1];
            if (is_grad_enabled()) {
                const Tensor wide = to(x, promote(x.dtype(), DType::f32));
                const Tensor centred = wide - mean(wide, {-1}, true);
                const Tensor scale = detail::reciprocal_root_mean_square(centred, {-1}, epsilon);
                return composed_backward(centred * scale, scale, /*centre=*/true, weight, dy, dx, 3);
            }
            RowsGradient dx_of(dx, x, dy);
            Tensor dweight = empty_gradient(dx, 1, {x.size(-1)}, dy);
            Tensor dbias = empty_gradient(dx, 2, {x.size(-1)}, dy);
            backend(x.device())
                .layer_norm_backward(cast(as_rows(x), dy.dtype()), cast_or_none(weight, dy.dtype()), saved[2],
                                     saved[3], as_rows(dy), dx_of.accumulate, dx_of.rows, dweight, dbias);
            dx_of.add_to(dx, x);
            if (dweight.defined()) dx.add(1, dweight);
            if (dbias.defined()) dx.add(2, dbias);
        });
}

Tensor record_rms_norm(const Tensor& y, const Tensor& x, const Tensor& weight, double epsilon,
                       const Tensor& rrms) {
    return record("rms_norm", y, {x, weight}, {x, weight, rrms},
                  [epsilon](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], weight = saved[1];
                      if (is_grad_enabled()) {
                          const Tensor wide = to(x, promote(x.dtype(), DType::f32));
                          const Tensor scale = detail::reciprocal_root_mean_square(wide, {-1}, epsilon);
                          return composed_backward(wide * scale, scale, /*centre=*/false, weight, dy, dx, 2);
                      }
                      RowsGradient dx_of(dx, x, dy);
                      Tensor dweight = empty_gradient(dx, 1, {x.size(-1)}, dy);
                      backend(x.device())
                          .rms_norm_backward(cast(as_rows(x), dy.dtype()), cast_or_none(weight, dy.dtype()),
                                             saved[2], as_rows(dy), dx_of.accumulate, dx_of.rows, dweight);
                      dx_of.add_to(dx, x);
                      if (dweight.defined()) dx.add(1, dweight);
                  });
}

/// Throws Error unless x and its residual can be added element by element.
void check_residual(const char* name, const Tensor& x, const Tensor& residual) {
    detail::require_defined(name, x, "x");
    detail::require_defined(name, residual, "the residual");
    detail::require_floating(name, residual, "the residual");
    detail::require_same_device(name, {x, residual});
    if (x.shape() != residual.shape())
        throw Error(name,
                    fmt::format("x {} and the residual {} must have one shape. Use expand() or reshape().",
                                pretty(x.shape()), pretty(residual.shape())));
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
    const OpScope scope("layer_norm");
    const DType dtype = check("layer_norm", x, weight, bias, epsilon);
    const Tensor rows = cast(as_rows(x), dtype);
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()}), y_rows = as_rows(y), no_sum;
    Tensor mean_of_rows = empty_rows(rows, dtype), rstd = empty_rows(rows, dtype);
    backend(x.device())
        .layer_norm(rows, {}, cast_or_none(weight, dtype), cast_or_none(bias, dtype), epsilon, no_sum, y_rows,
                    mean_of_rows, rstd);
    return record_layer_norm(y, x, weight, bias, epsilon, mean_of_rows, rstd);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    const OpScope scope("rms_norm");
    const DType dtype = check("rms_norm", x, weight, {}, epsilon);
    const Tensor rows = cast(as_rows(x), dtype);
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()}), y_rows = as_rows(y), no_sum;
    Tensor rrms = empty_rows(rows, dtype);
    backend(x.device()).rms_norm(rows, {}, cast_or_none(weight, dtype), epsilon, no_sum, y_rows, rrms);
    return record_rms_norm(y, x, weight, epsilon, rrms);
}

std::pair<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                         const Tensor& bias, double epsilon) {
    const OpScope scope("add_layer_norm");
    check_residual("add_layer_norm", x, residual);
    const DType dtype = check("add_layer_norm", x, weight, bias, epsilon);
    if (x.dtype() != dtype || residual.dtype() != dtype) {  // the sum has another dtype than its norm
        const Tensor sum = x + residual;
        return {sum, layer_norm(sum, weight, bias, epsilon)};
    }
    const Tensor rows = as_rows(x);
    Tensor sum = Tensor::empty(x.shape(), {dtype, x.device()}), sum_rows = as_rows(sum);
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()}), y_rows = as_rows(y);
    Tensor mean_of_rows = empty_rows(rows, dtype), rstd = empty_rows(rows, dtype);
    backend(x.device())
        .layer_norm(rows, as_rows(residual), cast_or_none(weight, dtype), cast_or_none(bias, dtype), epsilon,
                    sum_rows, y_rows, mean_of_rows, rstd);
    sum = record_sum(sum, x, residual);
    return {sum, record_layer_norm(y, sum, weight, bias, epsilon, mean_of_rows, rstd)};
}

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                       double epsilon) {
    const OpScope scope("add_rms_norm");
    check_residual("add_rms_norm", x, residual);
    const DType dtype = check("add_rms_norm", x, weight, {}, epsilon);
    if (x.dtype() != dtype || residual.dtype() != dtype) {
        const Tensor sum = x + residual;
        return {sum, rms_norm(sum, weight, epsilon)};
    }
    const Tensor rows = as_rows(x);
    Tensor sum = Tensor::empty(x.shape(), {dtype, x.device()}), sum_rows = as_rows(sum);
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()}), y_rows = as_rows(y);
    Tensor rrms = empty_rows(rows, dtype);
    backend(x.device())
        .rms_norm(rows, as_rows(residual), cast_or_none(weight, dtype), epsilon, sum_rows, y_rows, rrms);
    sum = record_sum(sum, x, residual);
    return {sum, record_rms_norm(y, sum, weight, epsilon, rrms)};
}

}  // namespace potluck
