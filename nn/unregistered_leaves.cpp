#include "nn/unregistered_leaves.h"

#include <memory>
#include <unordered_set>

#include "autograd/tape.h"

namespace potluck::nn {

std::vector<UnregisteredLeaf> unregistered_leaves(const Tensor& loss, const Module& module) {
    std::unordered_set<const Node*> seen;  // the leaves of all members, and the inner nodes already visited
    for (const auto& [name, tensor] : module.state_dict()) seen.insert(tensor.node().get());
    std::vector<UnregisteredLeaf> forgotten;
    std::vector<const Node*> open;
    if (const Node* root = loss.node().get(); root != nullptr && seen.insert(root).second) {
        if (root->depth == 0) forgotten.push_back({"loss", root->shape, root->dtype});
        open.push_back(root);
    }
    while (!open.empty()) {
        const Node* node = open.back();
        open.pop_back();
        for (const std::shared_ptr<Node>& input : node->inputs) {
            if (input == nullptr || !seen.insert(input.get()).second) continue;
            if (input->depth == 0)
                forgotten.push_back({node->name, input->shape, input->dtype});
            else
                open.push_back(input.get());
        }
    }
    return forgotten;
}

}  // namespace potluck::nn
