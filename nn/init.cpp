#include "nn/init.h"

#include <cmath>

#include "autograd/grad_mode.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"

namespace potluck::nn::init {
namespace {

/// Fills a contiguous y by `draw(backend, key, y)` and stores it in `tensor`.
template <class Draw>
void fill_randomly(const char* op, const Tensor& tensor, Generator* generator, Draw draw) {
    if (!is_floating(tensor.dtype())) {
        throw Error(
            op, fmt::format("the tensor is {}. Random start values need a floating dtype.", tensor.dtype()));
    }
    const NoGrad guard;
    Generator& source = generator != nullptr ? *generator : default_generator(tensor.device());
    Tensor drawn = empty(tensor.shape(), {tensor.dtype(), tensor.device()});
    draw(backend(tensor.device()), source.take(tensor.count()), drawn);
    tensor.copy_(drawn);
}

struct Fans {
    double in, out;
};

Fans fans_of(const char* op, const Tensor& weight) {
    if (weight.ndim() < 2) {
        throw Error(op,
                    fmt::format("a weight of shape {} has no fan-in. It must have the axes (out, in, ..).",
                                pretty(weight.shape())));
    }
    const auto count = static_cast<double>(weight.count());
    const auto out = static_cast<double>(weight.size(0));
    const auto in = static_cast<double>(weight.size(1));
    if (count == 0.0) return {1.0, 1.0};  // nothing will be drawn
    return {count / out, count / in};
}

}  // namespace

void normal(const Tensor& tensor, double mean, double std, Generator* generator) {
    if (!(std >= 0.0) || !std::isfinite(std) || !std::isfinite(mean))
        throw Error("init.normal",
                    fmt::format("the mean {} and the standard deviation {} must be finite, and the "
                                "standard deviation must not be negative.",
                                mean, std));
    fill_randomly("init.normal", tensor, generator,
                  [&](Backend& device, RandomKey key, Tensor& y) { device.normal(key, mean, std, y); });
}

void uniform(const Tensor& tensor, double low, double high, Generator* generator) {
    if (!(low <= high)) throw Error("init.uniform", fmt::format("low {} is above high {}.", low, high));
    if (!std::isfinite(high - low))
        throw Error("init.uniform", fmt::format("{} to {} is no finite range.", low, high));
    fill_randomly("init.uniform", tensor, generator,
                  [&](Backend& device, RandomKey key, Tensor& y) { device.uniform(key, low, high, y); });
}

void kaiming_normal(const Tensor& weight, double gain, Generator* generator) {
    normal(weight, 0.0, gain / std::sqrt(fans_of("init.kaiming_normal", weight).in), generator);
}

void kaiming_uniform(const Tensor& weight, double gain, Generator* generator) {
    const double bound = gain * std::sqrt(3.0 / fans_of("init.kaiming_uniform", weight).in);
    uniform(weight, -bound, bound, generator);
}

void xavier_normal(const Tensor& weight, double gain, Generator* generator) {
    const Fans fans = fans_of("init.xavier_normal", weight);
    normal(weight, 0.0, gain * std::sqrt(2.0 / (fans.in + fans.out)), generator);
}

void xavier_uniform(const Tensor& weight, double gain, Generator* generator) {
    const Fans fans = fans_of("init.xavier_uniform", weight);
    const double bound = gain * std::sqrt(6.0 / (fans.in + fans.out));
    uniform(weight, -bound, bound, generator);
}

}  // namespace potluck::nn::init
