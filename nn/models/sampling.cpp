#include "nn/models/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/softmax.h"
#include "autograd/ops/sort.h"
#include "core/factories.h"
#include "core/format.h"

namespace potluck {
namespace {

void check(const GenerateOptions& options) {
    if (options.max_tokens < 0 || options.top_k < 0) {
        throw Error("generate", fmt::format("max_tokens is {} and top_k is {}. They must not be negative.",
                                            options.max_tokens, options.top_k));
    }
    if (!(options.temperature >= 0.0) || std::isinf(options.temperature)) {
        throw Error("generate", fmt::format("temperature is {}. It must be finite and not negative.",
                                            options.temperature));
    }
}

}  // namespace

std::int64_t sample_token(const Tensor& logits, const GenerateOptions& options, Generator& generator) {
    check(options);
    const NoGrad guard;
    if (logits.ndim() != 1 || logits.count() == 0) {
        throw Error("generate", fmt::format("the logits have shape {}. They must be (vocabulary).",
                                            pretty(logits.shape())));
    }
    const double largest = max(logits).item<double>();
    if (!std::isfinite(largest)) {
        throw Error("generate",
                    fmt::format("the largest logit is {}: there is nothing to choose by. Look for "
                                "NaN or infinity in the parameters.",
                                largest));
    }
    if (options.temperature == 0.0) return argmax(logits).item<std::int64_t>();
    const std::int64_t candidates =
        options.top_k == 0 ? logits.count() : std::min(options.top_k, logits.count());
    const bool all = candidates == logits.count();
    Tensor values = logits, tokens;
    if (!all) std::tie(values, tokens) = topk(logits, candidates);
    // The largest logit is subtracted first: with a tiny temperature the others then overflow to -inf only. In f64,
    // since the smallest temperatures would be 0 in f32.
    const double temperature = std::max(options.temperature, 1e-30);
    const Tensor scaled = (values.to(DType::f32) - max(values.to(DType::f32))) / temperature;
    const Tensor drawn = multinomial(softmax(scaled), 1, true, &generator);
    return all ? drawn.item<std::int64_t>() : tokens[drawn.item<std::int64_t>()].item<std::int64_t>();
}

Tensor generate(nn::LanguageModel& model, const Tensor& ids, const GenerateOptions& options) {
    check(options);
    if (ids.ndim() != 1 || ids.count() == 0 || !is_integer(ids.dtype())) {
        throw Error("generate", fmt::format("ids are {} of {}. They must be (time) integers, at least one.",
                                            pretty(ids.shape()), ids.dtype()));
    }
    const NoGrad guard;
    const nn::EvalMode evaluating(model);
    const Device device = model.parameters()[0].device();
    const std::int64_t context = model.context();
    Generator generator(options.seed);
    nn::KeyValueCache cache = model.make_cache(1);
    std::vector<std::int64_t> text = ids.to_vector<std::int64_t>();

    const auto size = [&] { return static_cast<std::int64_t>(text.size()); };
    std::int64_t fed =
        size() - std::min(size(), context);  // tokens of the text that are in the cache or dropped
    for (std::int64_t i = 0; i < options.max_tokens; ++i) {
        if (cache.length() + size() - fed > context) {
            cache.clear();
            fed = size() - std::max<std::int64_t>(context / 2, 1);
        }
        const std::vector<std::int64_t> fresh(text.begin() + fed, text.end());
        const Tensor input = tensor(fresh, {1, size() - fed}).to(device);
        fed = size();
        const Tensor features = model.features(input, &cache);        // (1, time, width)
        const Tensor last = features.select(1, -1);                   // (1, width)
        const Tensor logits = model.head(last)[0].to(Device::cpu());  // (vocabulary)
        text.push_back(sample_token(logits, options, generator));
        if (options.on_token && !options.on_token(text.back())) break;
    }
    return tensor(text, {size()});
}

}  // namespace potluck
