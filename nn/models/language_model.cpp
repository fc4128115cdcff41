#include "nn/models/language_model.h"

#include "core/format.h"

namespace potluck::nn {

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
