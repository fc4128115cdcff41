#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nn/models/language_model.h"
#include "nn/train/memory_budget.h"

namespace potluck {

/// "none", "parts" (attention and activation), "blocks", or "blocks:4" (4 blocks together).
std::string name_of(const nn::RecomputePolicy& policy);
/// The policy of such a name. Throws Error for another text.
nn::RecomputePolicy parse_recompute(std::string_view text);

/// What a model of `layers` blocks can compute again: none, parts, blocks, 2 blocks together, 4, 8, ... Each needs less memory
/// and more time than the one before.
std::vector<nn::RecomputePolicy> recompute_policies(std::int64_t layers);

/// Sets and returns the first of these with which updates of micro-batches as large as `sample` are predicted to take at most
/// `bytes`: none, parts, blocks, 2 blocks together, 4, 8, ... Each needs less memory and more time than the one before (of
/// blocks together, until the memory of a region counts more than what is kept between them). Throws Error, which says by
/// how much the nearest misses the budget and what would need less, for a budget that none can meet and a negative one; the
/// model then has the policy it had. Gradients are dropped, as by MemoryBudget.
nn::RecomputePolicy choose_recompute(nn::LanguageModel& model, optim::Optimizer& optimizer,
                                     const data::Batch& sample, std::int64_t bytes,
                                     const BudgetOptions& options = {});

/// Which other policies would let micro-batches as large as `sample` fit into `bytes`, and what else needs less: sentences
/// for whoever has a policy that does not. The model keeps its policy.
std::string what_needs_less(nn::LanguageModel& model, optim::Optimizer& optimizer, const data::Batch& sample,
                            std::int64_t bytes, const BudgetOptions& options = {});

}  // namespace potluck
