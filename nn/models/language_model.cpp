#include "nn/models/language_model.h"

#include "core/format.h"

namespace potluck::nn {

Tensor LanguageModel::features(const Tensor& ids, KeyValueCache* cache) {
    Tensor x = embed(ids, cache != nullptr ? cache->length() : 0);  // (batch, time, width)
    for (std::int64_t i = 0; i < layers(); ++i) x = layer(i).forward(x, cache, i);
    if (cache != nullptr) cache->advance(ids.size(1));
    return finish(x);
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
