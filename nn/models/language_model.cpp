#include "nn/models/language_model.h"

#include <algorithm>

#include "core/format.h"
#include "nn/recompute.h"

namespace potluck::nn {

Tensor LanguageModel::features(const Tensor& ids, KeyValueCache* cache) {
    Tensor x = embed(ids, cache != nullptr ? cache->length() : 0);  // (batch, time, width)
    // A cache is for inference, which keeps nothing anyway.
    const bool in_regions = cache == nullptr && recompute_.what == RecomputePolicy::What::blocks;
    for (std::int64_t first = 0; first < layers();) {
        const std::int64_t count = in_regions ? std::min(recompute_.together, layers() - first) : 1;
        const auto run = [this, first, count, cache](const std::vector<Tensor>& input) {
            Tensor y = input[0];
            for (std::int64_t i = first; i < first + count; ++i) y = layer(i).forward(y, cache, i);
            return y;
        };
        x = in_regions ? recompute_in(*this, run, {x}) : run({x});
        first += count;
    }
    if (cache != nullptr) cache->advance(ids.size(1));
    return finish(x);
}

void LanguageModel::set_recompute(const RecomputePolicy& policy) {
    if (policy.together < 1)
        throw Error("set_recompute",
                    fmt::format("{} blocks are to be one region. Give at least 1.", policy.together));
    recompute_ = policy;
    for (std::int64_t i = 0; i < layers(); ++i)
        layer(i).set_recompute_parts(policy.what == RecomputePolicy::What::attention_and_activation);
}

KeyValueCache LanguageModel::make_cache(std::int64_t batch) {
    const Block& block = layer(0);
    const Tensor weight = parameters().front();
    return {
        layers(), batch, block.kv_heads(), context(), block.head_size(), {weight.dtype(), weight.device()}};
}

double LanguageModel::flops_per_token(std::int64_t time) const {
    return 6.0 * static_cast<double>(parameter_count() - lookup_count()) +
           12.0 * static_cast<double>(layers() * sizes_.width * time);
}

void check_ids(std::string_view op, const Tensor& ids, std::int64_t start, std::int64_t context) {
    if (ids.ndim() != 2 || !is_integer(ids.dtype())) {
        throw Error(
            op,
            fmt::format(
                "ids are {} of {}. They must be (batch, time) integers; unsqueeze(0) makes one text a batch.",
                pretty(ids.shape()), ids.dtype()));
    }
    const std::int64_t time = ids.size(1);
    if (start + time > context) {
        throw Error(
            op, fmt::format(
                    "{} tokens are more than the context of {}. Cut the text, or build a model with a longer "
                    "context.",
                    start + time, context));
    }
}

}  // namespace potluck::nn
