#pragma once

#include <cstdint>
#include <functional>

#include "core/options.h"
#include "core/random.h"
#include "core/tensor.h"
#include "nn/models/language_model.h"

namespace potluck {

struct GenerateOptions {
    std::int64_t max_tokens = 100;  // number of new tokens
    double temperature =
        1.0;  // divides the logits: below 1 less random, above 1 more; 0: always the most likely token
    std::int64_t top_k = 0;  // draw among the k most likely tokens only; 0: among all
    std::uint64_t seed = 0;  // the same seed gives the same text
    /// Called with each new token immediately; if it returns false, the text ends there.
    std::function<bool(std::int64_t token)> on_token = {};
};

/// Continues a text token by token: ids (time) to ids (time + new tokens), both i64 on the CPU. Keys and values of
/// earlier tokens are cached. When a text exceeds the model's context, generation continues from its last half context.
/// Throws Error for an empty prompt and for options out of range.
Tensor generate(nn::LanguageModel& model, const Tensor& ids, const GenerateOptions& options = {});
template <std::size_t N>
Tensor generate(nn::LanguageModel&, const Tensor&, MistypedOptions<N>,
                Refused<"no such option: see GenerateOptions", N> = {});

/// One token sampled from logits (vocabulary) according to GenerateOptions.
std::int64_t sample_token(const Tensor& logits, const GenerateOptions& options, Generator& generator);

}  // namespace potluck
