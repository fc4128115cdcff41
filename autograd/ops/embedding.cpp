#include "autograd/ops/embedding.h"

#include "autograd/autocast.h"
#include "autograd/ops/index.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

Tensor embedding(const Tensor& weight, const Tensor& ids) {
    const OpScope scope("embedding");
    detail::require_defined("embedding", weight, "the weight");
    detail::require_defined("embedding", ids, "the ids");
    detail::require_same_device("embedding", {weight, ids});
    if (weight.ndim() != 2)
        throw Error("embedding", fmt::format("the weight is {}, but a table (rows, width) is needed.",
                                             pretty(weight.shape())));
    if (!is_integer(ids.dtype()))
        throw Error("embedding",
                    fmt::format("the ids are {}, but row numbers (i64 or i32) are needed.", ids.dtype()));
    Shape shape = ids.shape();
    shape.push_back(weight.size(1));
    const Tensor indices = detail::reshaped(detail::cast(ids, DType::i64), {ids.count()});
    Tensor rows = Tensor::empty({ids.count(), weight.size(1)}, {weight.dtype(), weight.device()});
    backend(weight.device()).embedding(weight, indices, rows);
    const Tensor y = autocast(rows.alias(shape, contiguous_strides(shape), 0));
    return record("embedding", y, {weight}, {indices},
                  [table = weight.shape()](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      const Tensor ids = saved[0];
                      const Shape rows_shape{ids.count(), table[1]};
                      if (is_grad_enabled()) {
                          const Tensor start = zeros(table, {dy.dtype(), dy.device()});
                          const Tensor index = expand(unsqueeze(ids, 1), rows_shape);
                          return dx.add(0, scatter_add(start, 0, index, reshape(dy, rows_shape)));
                      }
                      const Tensor rows = detail::reshaped(dy, rows_shape);
                      // Half types: the sum for a frequent row needs the range of f32.
                      const bool aside = is_half(dx.dtype(0));
                      Tensor sums = aside ? zeros(table, {DType::f32, dy.device()}) : dx.buffer(0);
                      backend(dy.device()).embedding_backward(ids, rows, sums);
                      if (aside) dx.add(0, sums);
                  });
}

}  // namespace potluck
