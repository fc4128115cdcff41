#include "autograd/ops/join.h"

#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

Tensor cat(const std::vector<Tensor>& tensors, std::int64_t axis) {
    const OpScope scope("cat");
    if (tensors.empty()) throw Error("cat", "the list is empty. Give at least one tensor.");
    for (const Tensor& x : tensors) detail::require_defined("cat", x, "a tensor of the list");
    const Tensor& first = tensors.front();
    axis = normalize_axis("cat", axis, first.ndim());

    const auto at = static_cast<std::size_t>(axis);
    Shape shape = first.shape();
    shape[at] = 0;
    DType dtype = first.dtype();
    std::vector<std::int64_t> sizes;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& x = tensors[i];
        detail::require_same_device("cat", {first, x});
        bool fits = x.ndim() == first.ndim();
        for (std::size_t other = 0; fits && other < shape.size(); ++other)
            fits = other == at || x.shape()[other] == shape[other];
        if (!fits)
            throw Error(
                "cat",
                fmt::format("tensor {} has shape {}, which does not continue {} along axis {}. All other "
                            "sizes must agree.",
                            i, pretty(x.shape()), pretty(first.shape()), axis));
        dtype = promote(dtype, x.dtype());
        sizes.push_back(x.shape()[at]);
        if (__builtin_add_overflow(shape[at], x.shape()[at], &shape[at]))
            throw Error("cat",
                        fmt::format("axis {} of the result would have more than 2^63 - 1 entries.", axis));
    }

    const Tensor y = Tensor::empty(shape, {dtype, first.device()});
    std::int64_t start = 0;
    for (const Tensor& x : tensors) {
        Tensor part = detail::strided_alias(y, axis, start, x.shape()[at], 1);
        detail::copy_into(x, part);
        start += x.shape()[at];
    }
    return record("cat", y, tensors, {}, [axis, sizes](const Saved&, const Tensor& dy, Gradients& dx) {
        std::int64_t start = 0;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            if (dx.wants(i)) dx.add(i, narrow(dy, axis, start, sizes[i]));
            start += sizes[i];
        }
    });
}

Tensor stack(const std::vector<Tensor>& tensors, std::int64_t axis) {
    const OpScope scope("stack");
    if (tensors.empty()) throw Error("stack", "the list is empty. Give at least one tensor.");
    for (const Tensor& x : tensors) detail::require_defined("stack", x, "a tensor of the list");
    axis = normalize_axis("stack", axis, tensors.front().ndim() + 1);
    std::vector<Tensor> layers;
    for (const Tensor& x : tensors) {
        if (x.shape() != tensors.front().shape())
            throw Error("stack",
                        fmt::format("the shapes {} and {} differ. Use cat() to join along an existing axis.",
                                    pretty(tensors.front().shape()), pretty(x.shape())));
        layers.push_back(unsqueeze(x, axis));
    }
    return cat(layers, axis);
}

}  // namespace potluck
