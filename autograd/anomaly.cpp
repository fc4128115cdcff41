#include "autograd/anomaly.h"

#include <cmath>
#include <span>
#include <string>

#include "core/capture.h"
#include "core/format.h"
#include "core/measure.h"

namespace potluck {

namespace {

thread_local bool check_is_on = false;

enum class Finiteness { finite, infinite, nan };

Finiteness finiteness_of(const char* op, const Tensor& x) {
    if (!x.defined() || !is_floating(x.dtype())) return Finiteness::finite;
    if (detail::is_recording(x.device()) || detail::is_replaying(x.device()))
        throw Error(
            op,
            "the anomaly check reads every result, and no value can be read while work is being recorded. "
            "Let AnomalyCheck end before capture(), or run the work once under it without recording.");
    const double largest = largest_magnitude(std::span(&x, 1));
    if (std::isnan(largest)) return Finiteness::nan;
    return std::isinf(largest) ? Finiteness::infinite : Finiteness::finite;
}

const char* name_of(Finiteness finiteness) {
    switch (finiteness) {
        case Finiteness::finite:
            return "is finite";
        case Finiteness::infinite:
            return "holds an infinity";
        case Finiteness::nan:
            break;
    }
    return "holds a NaN";
}

}  // namespace

AnomalyCheck::AnomalyCheck(bool on) noexcept : outer_(check_is_on) { check_is_on = on; }
AnomalyCheck::~AnomalyCheck() { check_is_on = outer_; }
bool AnomalyCheck::is_on() noexcept { return check_is_on; }

namespace detail {

void check_forward(const char* op, const Tensor& output, const std::vector<Tensor>& inputs) {
    const Finiteness result = finiteness_of(op, output);
    if (result == Finiteness::finite) return;
    std::string story;
    bool finite_inputs = true;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].defined()) continue;
        const Finiteness finiteness = finiteness_of(op, inputs[i]);
        finite_inputs = finite_inputs && finiteness == Finiteness::finite;
        story += fmt::format("{}input {} {} {}", story.empty() ? "" : "; ", i, pretty(inputs[i].shape()),
                             name_of(finiteness));
    }
    // An infinite input may legitimately give an infinite output: scores masked with -inf.
    if (result == Finiteness::infinite && !finite_inputs) return;
    throw Error(
        op, fmt::format("the anomaly check found that the result {} {} ({}). This is the first op that did.",
                        pretty(output.shape()), name_of(result), story));
}

void check_backward(const char* op, std::size_t index, const Tensor& dx, const Tensor& dy) {
    const Finiteness result = finiteness_of(op, dx);
    if (result == Finiteness::finite) return;
    const Finiteness incoming = finiteness_of(op, dy);
    if (result == Finiteness::infinite && incoming == Finiteness::infinite) return;
    throw Error(
        op, fmt::format("the anomaly check found that the gradient of input {} {} {} (the gradient of the "
                        "result {}). This is the first backward that did.",
                        index, pretty(dx.shape()), name_of(result), name_of(incoming)));
}

}  // namespace detail

}  // namespace potluck
