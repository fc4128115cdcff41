#include "autograd/ops/rotary.h"

#include <cmath>

#include "autograd/ops/copy.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

std::pair<Tensor, Tensor> rotary_tables(std::int64_t positions, std::int64_t head_size, double base,
                                        Device device) {
    const OpScope scope("rotary_tables");
    if (positions < 0 || head_size < 0 || head_size % 2 != 0)
        throw Error("rotary_tables",
                    fmt::format("positions is {} and head_size is {}: both must be 0 or more, and the head "
                                "size even.",
                                positions, head_size));
    if (!(base > 0.0) || !std::isfinite(base))
        throw Error("rotary_tables", fmt::format("base is {}, but it must be above 0.", base));
    const std::int64_t pairs = head_size / 2;
    const Shape shape{positions, pairs};
    const Tensor cosines = Tensor::empty(shape), sines = Tensor::empty(shape);
    auto *cosine = cosines.data<float>(), *sine = sines.data<float>();
    std::int64_t at = 0;
    for (std::int64_t position = 0; position < positions; ++position) {
        for (std::int64_t i = 0; i < pairs; ++i, ++at) {
            const double frequency =
                std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
            const double angle = static_cast<double>(position) * frequency;
            cosine[at] = static_cast<float>(std::cos(angle));
            sine[at] = static_cast<float>(std::sin(angle));
        }
    }
    return {to(cosines, device), to(sines, device)};
}

namespace {

/// The inverse rotation is also the gradient of the rotation, which preserves lengths.
Tensor rotate_by(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse) {
    const OpScope scope("rotary");
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).rotary(x, cosine, sine, inverse, y);
    return record("rotary", y, {x}, {cosine, sine},
                  [inverse](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      dx.add(0, rotate_by(dy, saved[0], saved[1], !inverse));
                  });
}

}  // namespace

Tensor rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine) {
    detail::require_defined("rotary", x, "x");
    detail::require_defined("rotary", cosine, "the cosine table");
    detail::require_defined("rotary", sine, "the sine table");
    detail::require_floating("rotary", x, "x");
    detail::require_same_device("rotary", {x, cosine, sine});
    if (x.ndim() != 4 || x.size(3) % 2 != 0)
        throw Error(
            "rotary",
            fmt::format("x is {}, but (batch, heads, time, head_size) with an even head size is needed.",
                        pretty(x.shape())));
    const Shape wanted{x.size(2), x.size(3) / 2};
    if (cosine.shape() != wanted || sine.shape() != wanted)
        throw Error(
            "rotary",
            fmt::format("x {} needs tables {}, but cosine is {} and sine is {}. Narrow the tables to the "
                        "positions of x.",
                        pretty(x.shape()), pretty(wanted), pretty(cosine.shape()), pretty(sine.shape())));
    if (detail::needs_gradient(cosine) || detail::needs_gradient(sine))
        throw Error("rotary", "the tables require a gradient, but rotary has none in them. detach() them.");
    return rotate_by(x, detail::cast(cosine, DType::f32), detail::cast(sine, DType::f32), false);
}

}  // namespace potluck
