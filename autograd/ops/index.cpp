#include "autograd/ops/index.h"

#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

void require_index(const char* name, const Tensor& x, std::int64_t axis, const Tensor& index) {
    detail::require_defined(name, index, "the index");
    detail::require_same_device(name, {x, index});
    if (index.dtype() != DType::i64)
        throw Error(name, fmt::format("the index is {}, but i64 is needed. Convert it with .to(DType::i64).",
                                      index.dtype()));
    bool fits = index.ndim() == x.ndim();
    for (std::size_t i = 0; fits && i < x.shape().size(); ++i)
        fits = static_cast<std::int64_t>(i) == axis || index.shape()[i] <= x.shape()[i];
    if (!fits)
        throw Error(
            name,
            fmt::format("the index {} does not fit {}: it needs as many axes, and no larger sizes but along "
                        "axis {}.",
                        pretty(index.shape()), pretty(x.shape()), axis));
}

}  // namespace

Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index) {
    const OpScope scope("gather");
    detail::require_defined("gather", x, "x");
    detail::require_rank("gather", x, "x", 1);
    axis = normalize_axis("gather", axis, x.ndim());
    require_index("gather", x, axis, index);
    Tensor y = Tensor::empty(index.shape(), {x.dtype(), x.device()});
    backend(x.device()).gather(x, axis, index, y);
    return record("gather", y, {x}, {index},
                  [axis, shape = x.shape()](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const TensorOptions options{dy.dtype(), dy.device()};
                      if (is_grad_enabled())
                          return dx.add(0, scatter_add(zeros(shape, options), axis, saved[0], dy));
                      // Half types: the sum for an element that is selected often needs the range of f32.
                      const bool aside = is_half(dx.dtype(0));
                      Tensor sums = aside ? zeros(shape, {DType::f32, dy.device()}) : dx.buffer(0);
                      backend(dy.device()).scatter_add(axis, saved[0], detail::cast(dy, sums.dtype()), sums);
                      if (aside) dx.add(0, sums);
                  });
}

Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& source) {
    const OpScope scope("scatter_add");
    detail::require_defined("scatter_add", x, "x");
    detail::require_defined("scatter_add", source, "the source");
    detail::require_rank("scatter_add", x, "x", 1);
    axis = normalize_axis("scatter_add", axis, x.ndim());
    require_index("scatter_add", x, axis, index);
    detail::require_same_device("scatter_add", {x, source});
    if (source.shape() != index.shape())
        throw Error("scatter_add",
                    fmt::format("the source {} and the index {} differ in shape. Narrow the larger one.",
                                pretty(source.shape()), pretty(index.shape())));
    const DType dtype = promote(x.dtype(), source.dtype());
    const DType inner = is_half(dtype) ? DType::f32 : dtype;
    Tensor sums = Tensor::empty(x.shape(), {inner, x.device()});
    backend(x.device()).copy(x, sums);
    backend(x.device()).scatter_add(axis, index, detail::cast(source, inner), sums);
    return record("scatter_add", detail::cast(sums, dtype), {x, source}, {index},
                  [axis](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      dx.add(0, dy);
                      if (dx.wants(1)) dx.add(1, gather(dy, axis, saved[0]));
                  });
}

Tensor tril(const Tensor& x, std::int64_t diagonal) {
    const OpScope scope("tril");
    detail::require_defined("tril", x, "x");
    detail::require_rank("tril", x, "x", 2);
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).tril(x, diagonal, y);
    return record("tril", y, {x}, {}, [diagonal](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, tril(dy, diagonal));
    });
}

}  // namespace potluck
