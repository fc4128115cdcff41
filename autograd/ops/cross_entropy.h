#pragma once

#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

enum class Reduction { none, sum, mean };

struct CrossEntropy {
    std::int64_t ignore_index = -100;       // rows with this label are ignored
    double label_smoothing = 0.0;           // probability that is spread evenly over all classes, in [0, 1]
    Reduction reduction = Reduction::mean;  // mean: over the rows that are not ignored
};

/// -log softmax(logits)[label] for each row: logits (.., classes), labels (..) of i64 (i32 and u8 are converted; labels on
/// the CPU are moved to the device of the logits).
/// Fused: neither forward nor backward stores probabilities. Result f32 (f64 for f64): shape (..) for none, else a
/// scalar. When all rows are ignored, the sum, the mean and all gradients are 0. Throws Error that names position and
/// value of a label that is neither a class nor ignore_index.
Tensor cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropy& options = {});
template <std::size_t N>
Tensor cross_entropy(const Tensor&, const Tensor&, MistypedOptions<N>,
                     Refused<"no such option: see CrossEntropy", N> = {});

}  // namespace potluck
