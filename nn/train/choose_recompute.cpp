#include "nn/train/choose_recompute.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/format.h"

namespace potluck {
namespace {

using What = nn::RecomputePolicy::What;

constexpr std::string_view together_prefix = "blocks:";

/// The policy of the model while it lives is this; then it is again what it was.
class PolicyBefore {
public:
    explicit PolicyBefore(nn::LanguageModel& model) : model_(model), policy_(model.recompute_policy()) {}
    ~PolicyBefore() { model_.set_recompute(policy_); }
    PolicyBefore(const PolicyBefore&) = delete;
    PolicyBefore& operator=(const PolicyBefore&) = delete;

private:
    nn::LanguageModel& model_;
    nn::RecomputePolicy policy_;
};

struct Candidate {
    nn::RecomputePolicy policy;
    std::int64_t peak;
};

/// The first policy that fits, or else the one that needs least; none when not even the measuring of any fits.
std::optional<Candidate> best_policy(nn::LanguageModel& model, optim::Optimizer& optimizer,
                                     const data::Batch& sample, std::int64_t bytes,
                                     const BudgetOptions& options) {
    if (bytes < 0)
        throw Error("choose_recompute", fmt::format("a budget of {} bytes. It must not be negative.", bytes));
    const PolicyBefore before(model);
    std::optional<Candidate> best;
    for (const nn::RecomputePolicy& policy : recompute_policies(model.layers())) {
        model.set_recompute(policy);
        try {
            const MemoryBudget budget(model, optimizer, sample, options);
            const std::int64_t peak = budget.at(sample.inputs.size(0)).peak();
            if (!best || peak < best->peak) best = Candidate{policy, peak};
            if (peak <= bytes) return best;
        } catch (const OutOfMemory&) {  // the next one needs less
        }
    }
    return best;
}

std::string in_megabytes(std::int64_t bytes) {
    return fmt::format("{:.2f} MB", 1e-6 * static_cast<double>(bytes));
}

constexpr const char* offload =
    "LayeredAccumulation keeps inputs, parameters and optimizer state on the host "
    "(docs/08_recomputation_and_offload.md).";

}  // namespace

std::string name_of(const nn::RecomputePolicy& policy) {
    if (policy.what == What::nothing) return "none";
    if (policy.what == What::attention_and_activation) return "parts";
    return policy.together == 1 ? "blocks" : fmt::format("{}{}", together_prefix, policy.together);
}

nn::RecomputePolicy parse_recompute(std::string_view text) {
    for (const nn::RecomputePolicy& policy :
         {nn::RecomputePolicy{}, {What::attention_and_activation}, {What::blocks}})
        if (text == name_of(policy)) return policy;
    if (text.starts_with(together_prefix)) {
        const std::string_view number = text.substr(together_prefix.size());
        std::int64_t together = 0;
        const auto [end, fault] = std::from_chars(number.data(), number.data() + number.size(), together);
        if (fault == std::errc() && end == number.data() + number.size() && together >= 1)
            return {What::blocks, together};
    }
    throw Error("recompute",
                fmt::format("\"{}\" is no policy. Use none, parts, blocks, or blocks:N for N blocks "
                            "together.",
                            text));
}

std::vector<nn::RecomputePolicy> recompute_policies(std::int64_t layers) {
    std::vector<nn::RecomputePolicy> policies = {
        {What::nothing}, {What::attention_and_activation}, {What::blocks}};
    for (std::int64_t together = 2; together < layers; together *= 2)
        policies.push_back({What::blocks, together});
    return policies;
}

nn::RecomputePolicy choose_recompute(nn::LanguageModel& model, optim::Optimizer& optimizer,
                                     const data::Batch& sample, std::int64_t bytes,
                                     const BudgetOptions& options) {
    const std::optional<Candidate> best = best_policy(model, optimizer, sample, bytes, options);
    if (!best)
        throw OutOfMemory(
            "choose_recompute",
            fmt::format("no recomputation lets even a small micro-batch go through the model here. {}",
                        offload),
            0);
    if (best->peak > bytes)
        throw Error(
            "choose_recompute",
            fmt::format("micro-batches of {} items need at least {}, with {} recomputed: {} more than the "
                        "budget of {}. Smaller micro-batches need less; {}",
                        sample.inputs.size(0), in_megabytes(best->peak), name_of(best->policy),
                        in_megabytes(best->peak - bytes), in_megabytes(bytes), offload));
    model.set_recompute(best->policy);
    return best->policy;
}

std::string what_needs_less(nn::LanguageModel& model, optim::Optimizer& optimizer, const data::Batch& sample,
                            std::int64_t bytes, const BudgetOptions& options) {
    const std::optional<Candidate> best = best_policy(model, optimizer, sample, bytes, options);
    if (!best) return offload;
    if (best->peak <= bytes)
        return fmt::format("Recomputation ({}) needs {}, which fits. {}", name_of(best->policy),
                           in_megabytes(best->peak), offload);
    if (best->policy.what == What::nothing)
        return fmt::format("Recomputation does not need less. {}", offload);
    return fmt::format("Recomputation does not suffice: {} needs {}. {}", name_of(best->policy),
                       in_megabytes(best->peak), offload);
}

}  // namespace potluck
