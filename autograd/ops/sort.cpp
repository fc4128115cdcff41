#include "autograd/ops/sort.h"

#include "autograd/ops/index.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

std::pair<Tensor, Tensor> topk(const Tensor& x, std::int64_t k, std::int64_t axis, bool largest) {
    const OpScope scope("topk");
    detail::require_defined("topk", x, "x");
    detail::require_rank("topk", x, "x", 1);
    axis = normalize_axis("topk", axis, x.ndim());
    const std::int64_t n = x.size(axis);
    if (k < 0 || k > n)
        throw Error("topk",
                    fmt::format("k is {}, but axis {} of {} has {} entries.", k, axis, pretty(x.shape()), n));

    if (axis != x.ndim() - 1) {
        const auto [values, indices] = topk(transpose(x, axis, -1), k, -1, largest);
        return {transpose(values, axis, -1), transpose(indices, axis, -1)};
    }
    const Tensor rows = detail::as_rows(x);  // (rows, n)
    Tensor values = Tensor::empty({rows.size(0), k}, {x.dtype(), x.device()});
    Tensor indices = Tensor::empty({rows.size(0), k}, {DType::i64, x.device()});
    backend(x.device()).topk(rows, k, largest, values, indices);
    Shape shape = x.shape();
    shape.back() = k;
    const Tensor shaped_indices = indices.alias(shape, contiguous_strides(shape), 0);
    const Tensor y = record("topk", values.alias(shape, contiguous_strides(shape), 0), {x}, {shaped_indices},
                            [whole = x.shape()](const Saved& saved, const Tensor& dy, Gradients& dx) {
                                const Tensor start = zeros(whole, {dy.dtype(), dy.device()});
                                dx.add(0, scatter_add(start, -1, saved[0], dy));
                            });
    return {y, shaped_indices};
}

Tensor multinomial(const Tensor& weights, std::int64_t samples, bool replacement, Generator* generator) {
    const OpScope scope("multinomial");
    detail::require_defined("multinomial", weights, "the weights");
    detail::require_floating("multinomial", weights, "the weights");
    if (weights.ndim() != 1 && weights.ndim() != 2)
        throw Error("multinomial", fmt::format("the weights are {}, but (n) or (rows, n) is needed.",
                                               pretty(weights.shape())));
    const std::int64_t n = weights.size(-1);
    if (samples < 0) throw Error("multinomial", fmt::format("{} samples cannot be drawn.", samples));
    if (!replacement && samples > n)
        throw Error(
            "multinomial",
            fmt::format("{} samples without replacement cannot come from {} entries. Draw fewer, or with "
                        "replacement = true.",
                        samples, n));
    const Tensor rows = detail::as_rows(weights.detach());
    if (n == 0 && samples > 0 && rows.size(0) > 0)
        throw Error("multinomial",
                    fmt::format("the weights {} have no entries to draw from.", pretty(weights.shape())));
    Generator& numbers = generator != nullptr ? *generator : default_generator(weights.device());
    Tensor y = Tensor::empty({rows.size(0), samples}, {DType::i64, weights.device()});
    backend(weights.device()).multinomial(numbers.take(rows.size(0) * samples), rows, replacement, y);
    return weights.ndim() == 1 ? y.alias({samples}, {1}, 0) : y;
}

}  // namespace potluck
