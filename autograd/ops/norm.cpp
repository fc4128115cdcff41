#include "autograd/ops/norm.h"

#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
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

namespace {

/// Checks what both norms have in common and returns the dtype of the result.
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
    return dtype;
}

Tensor cast_or_none(const Tensor& x, DType dtype) { return x.defined() ? cast(x, dtype) : x; }

Tensor empty_rows(const Tensor& rows, DType dtype) {
    return Tensor::empty({rows.size(0)}, {dtype == DType::f64 ? DType::f64 : DType::f32, rows.device()});
}

/// An undefined tensor where no gradient is wanted.
Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like) {
    return wanted ? Tensor::empty(shape, {like.dtype(), like.device()}) : Tensor();
}

/// All axes but the last.
Axes leading_axes(const Tensor& x) {
    Axes axes;
    for (std::int64_t axis = 0; axis + 1 < x.rank(); ++axis) axes.push_back(axis);
    return axes;
}

/// Sums over the rows; without leading axes there is one row.
Tensor sum_rows(const Tensor& x) { return x.rank() == 1 ? x : sum(x, leading_axes(x)); }

/// The gradients of y = normalised * weight + bias from ops on the tape, for second derivatives. `normalised` is
/// (x - mean) * scale (mean 0 for the root-mean-square norm), where `scale` depends on x.
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

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
    const OpScope scope("layer_norm");
    const DType dtype = check("layer_norm", x, weight, bias, epsilon);
    const Tensor rows = cast(as_rows(x), dtype);
    Tensor y = Tensor::empty(rows.shape(), {dtype, x.device()});
    Tensor mean_of_rows = empty_rows(rows, dtype), reciprocal_deviation = empty_rows(rows, dtype);
    backend(x.device())
        .layer_norm(rows, cast_or_none(weight, dtype), cast_or_none(bias, dtype), epsilon, y, mean_of_rows,
                    reciprocal_deviation);
    y = y.alias(x.shape(), contiguous_strides(x.shape()), 0);
    return record("layer_norm", y, {x, weight, bias}, {x, weight, mean_of_rows, reciprocal_deviation},
                  [epsilon](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], weight = saved[1];
                      if (is_grad_enabled()) {
                          const Tensor wide = to(x, promote(x.dtype(), DType::f32));
                          const Tensor centred = wide - mean(wide, {-1}, true);
                          const Tensor scale = rsqrt(mean(square(centred), {-1}, true) + epsilon);
                          return composed_backward(centred * scale, scale, /*centre=*/true, weight, dy, dx,
                                                   3);
                      }
                      const Tensor dy_rows = as_rows(dy), rows = cast(as_rows(x), dy.dtype());
                      Tensor dx_rows = empty_if(dx.wants(0), rows.shape(), dy);
                      Tensor dweight = empty_if(dx.wants(1), {x.size(-1)}, dy);
                      Tensor dbias = empty_if(dx.wants(2), {x.size(-1)}, dy);
                      backend(x.device())
                          .layer_norm_backward(rows, cast_or_none(weight, dy.dtype()), saved[2], saved[3],
                                               dy_rows, dx_rows, dweight, dbias);
                      if (dx_rows.defined())
                          dx.add(0, dx_rows.alias(x.shape(), contiguous_strides(x.shape()), 0));
                      if (dweight.defined()) dx.add(1, dweight);
                      if (dbias.defined()) dx.add(2, dbias);
                  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    const OpScope scope("rms_norm");
    const DType dtype = check("rms_norm", x, weight, {}, epsilon);
    const Tensor rows = cast(as_rows(x), dtype);
    Tensor y = Tensor::empty(rows.shape(), {dtype, x.device()});
    Tensor reciprocal_rms = empty_rows(rows, dtype);
    backend(x.device()).rms_norm(rows, cast_or_none(weight, dtype), epsilon, y, reciprocal_rms);
    y = y.alias(x.shape(), contiguous_strides(x.shape()), 0);
    return record("rms_norm", y, {x, weight}, {x, weight, reciprocal_rms},
                  [epsilon](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor x = saved[0], weight = saved[1];
                      if (is_grad_enabled()) {
                          const Tensor wide = to(x, promote(x.dtype(), DType::f32));
                          const Tensor scale = rsqrt(mean(square(wide), {-1}, true) + epsilon);
                          return composed_backward(wide * scale, scale, /*centre=*/false, weight, dy, dx, 2);
                      }
                      const Tensor dy_rows = as_rows(dy), rows = cast(as_rows(x), dy.dtype());
                      Tensor dx_rows = empty_if(dx.wants(0), rows.shape(), dy);
                      Tensor dweight = empty_if(dx.wants(1), {x.size(-1)}, dy);
                      backend(x.device())
                          .rms_norm_backward(rows, cast_or_none(weight, dy.dtype()), saved[2], dy_rows,
                                             dx_rows, dweight);
                      if (dx_rows.defined())
                          dx.add(0, dx_rows.alias(x.shape(), contiguous_strides(x.shape()), 0));
                      if (dweight.defined()) dx.add(1, dweight);
                  });
}

}  // namespace potluck
