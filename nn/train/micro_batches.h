#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "data/loader.h"

namespace potluck {

/// A micro-batch that takes part in an update: some of its targets count.
struct MicroBatch {
    Tensor inputs, targets;       // on the CPU
    std::int64_t first_item = 0;  // its first item's number in the global batch
    std::int64_t counted = 0;     // targets that count
};

/// Those of a global batch. Without a target that counts a micro-batch is left out: its mean would be 0 / 0; and so is one of
/// which no item falls to this process.
std::vector<MicroBatch> counted_micro_batches(std::span<const data::Batch> batches);
/// Targets that count in all of them.
std::int64_t counted_targets(std::span<const MicroBatch> batches);

}  // namespace potluck
