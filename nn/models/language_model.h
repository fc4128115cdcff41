#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "nn/layers/attention.h"
#include "nn/module.h"

namespace potluck::nn {

/// A model that predicts the next token of a text: ids (batch, time) i64 to logits (batch, time, vocabulary).
class LanguageModel : public Module {
public:
    Tensor forward(const Tensor& ids) override { return head(features(ids, nullptr)); }
    /// Only the tokens that follow those in the cache; the logits of these. Use it inside a NoGrad block.
    Tensor forward(const Tensor& ids, KeyValueCache& cache) { return head(features(ids, &cache)); }

    /// The vectors (batch, time, width) that the head turns into logits. With a cache, ids are the tokens that follow.
    virtual Tensor features(const Tensor& ids, KeyValueCache* cache) = 0;
    /// (.., width) to logits (.., vocabulary).
    virtual Tensor head(const Tensor& features) = 0;
    /// A cache for `batch` texts of at most context() tokens, in the model's dtype and on its device.
    virtual KeyValueCache make_cache(std::int64_t batch) = 0;

    /// The most tokens that the model sees at once.
    virtual std::int64_t context() const = 0;
    virtual std::int64_t vocabulary() const = 0;
    /// Floating-point operations of forward and backward for one token of a text of `time` tokens: 6 for each weight of a
    /// matrix product and 12 * layers * width * time for attention (Chowdhery et al., "PaLM", 2022, appendix B).
    virtual double flops_per_token(std::int64_t time) const = 0;
};

/// Throws Error(op, ...) unless ids are (batch, time) integers of which all positions from `start` on fit into the
/// context.
void check_ids(std::string_view op, const Tensor& ids, std::int64_t start, std::int64_t context);

}  // namespace potluck::nn
