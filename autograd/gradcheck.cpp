#include "autograd/gradcheck.h"

#include <cmath>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "core/copies.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/strides.h"

namespace potluck {

namespace {

/// A copy with its own memory but the same strides, so that ops see the same layout. A broadcast view, whose elements
/// cannot be changed one by one, becomes contiguous.
Tensor same_layout(const Tensor& x) {
    if (detail::overlaps_itself(x)) return detail::copy_of(x);
    const std::int64_t length = x.storage()->bytes() / size_of(x.dtype());
    const Tensor flat = Tensor::view_of(x.storage(), x.dtype(), {length}, {1}, 0);
    return detail::copy_of(flat).alias(x.shape(), x.strides(), x.offset());
}

/// Element `index` (in row-major order) as a 0-dimensional view.
Tensor element(const Tensor& x, std::int64_t index) {
    std::int64_t offset = x.offset();
    for (std::size_t axis = x.shape().size(); axis-- > 0;) {
        offset += index % x.shape()[axis] * x.strides()[axis];
        index /= x.shape()[axis];
    }
    return x.alias({}, {}, offset);
}

Shape position_of(const Tensor& x, std::int64_t index) {
    Shape position(x.shape().size());
    for (std::size_t axis = position.size(); axis-- > 0;) {
        position[axis] = index % x.shape()[axis];
        index /= x.shape()[axis];
    }
    return position;
}

void require_f64(const Tensor& x, const std::string& what) {
    if (!x.defined() || x.dtype() != DType::f64)
        throw Error("gradcheck",
                    fmt::format("{} is {}, but differences are only exact enough in f64. Convert it with "
                                ".to(DType::f64).",
                                what, x.defined() ? name_of(x.dtype()) : "undefined"));
}

}  // namespace

std::string gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& function,
                      const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
    if (!function) throw Error("gradcheck", "the function is empty. Give one.");
    if (!(options.step > 0.0 && options.absolute >= 0.0 && options.relative >= 0.0) ||
        !std::isfinite(options.step))
        throw Error("gradcheck", fmt::format("step {} must be above 0, and the tolerances {} and {} must not "
                                             "be negative.",
                                             options.step, options.absolute, options.relative));
    // Copies of the inputs; those to be differentiated are leaves.
    std::vector<Tensor> leaves = inputs, wanted;
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
        require_f64(inputs[i], fmt::format("input {}", i));
        leaves[i] = same_layout(inputs[i]).set_requires_grad();
        wanted.push_back(leaves[i]);
        numbers.push_back(i);
    }
    if (wanted.empty())
        throw Error("gradcheck", "no input requires a gradient. Call set_requires_grad() on one.");

    std::vector<Tensor> found;
    Tensor weights;
    {
        const GradMode recording(true);
        const Tensor y = function(leaves);
        require_f64(y, "the result");
        Generator generator(20240229);
        weights = randn(y.shape(), {DType::f64, y.device()}, &generator);
        found = gradients(y, wanted, {.gradient = weights});
    }

    const NoGrad guard;
    const auto evaluate = [&] {
        const GradMode recording(true);  // the function may compute gradients itself
        return (function(leaves).detach() * weights).sum().item();
    };
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const Tensor& x = wanted[i];
        const std::vector<double> values = x.to_vector<double>();
        const std::vector<double> derivatives =
            found[i].defined() ? found[i].to_vector<double>() : std::vector<double>(values.size());
        for (std::size_t j = 0; j < values.size(); ++j) {
            const Tensor place = element(x, static_cast<std::int64_t>(j));
            place.fill_(values[j] + options.step);
            const double above = evaluate();
            place.fill_(values[j] - options.step);
            const double below = evaluate();
            place.fill_(values[j]);
            const double difference = (above - below) / (2.0 * options.step);
            const double tolerance = options.absolute + options.relative * std::abs(difference);
            if (!(std::abs(derivatives[j] - difference) <= tolerance))
                return fmt::format(
                    "input {}, element {}: the gradient is {:.9g}, the central difference {:.9g}", numbers[i],
                    pretty(position_of(x, static_cast<std::int64_t>(j))), derivatives[j], difference);
        }
    }
    return {};
}

}  // namespace potluck
