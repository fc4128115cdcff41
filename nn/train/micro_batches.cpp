#include "nn/train/micro_batches.h"

#include "nn/train/loss.h"

namespace potluck {
namespace {

/// Items of the loader's batch that `batch` is a share of; one that no loader made is whole.
std::int64_t items_of(const data::Batch& batch) {
    return batch.global_count == 0 && batch.inputs.defined() ? batch.inputs.size(0) : batch.global_count;
}

}  // namespace

std::vector<MicroBatch> counted_micro_batches(std::span<const data::Batch> batches) {
    std::vector<MicroBatch> found;
    std::int64_t items = 0;  // so far
    for (const data::Batch& batch : batches) {
        const std::int64_t first = items + batch.share.first;
        items += items_of(batch);
        if (!batch.inputs.defined()) continue;
        const std::int64_t counted = count_targets(batch);
        if (counted > 0) found.push_back({batch.inputs, batch.targets, first, counted});
    }
    return found;
}

std::int64_t counted_targets(std::span<const MicroBatch> batches) {
    std::int64_t targets = 0;
    for (const MicroBatch& batch : batches) targets += batch.counted;
    return targets;
}

}  // namespace potluck
