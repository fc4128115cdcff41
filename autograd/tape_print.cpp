#include <algorithm>
#include <set>
#include <unordered_map>

#include "autograd/tape.h"
#include "core/format.h"

namespace potluck {

namespace {

/// All nodes that lead to `root`, inputs before their users, numbered in this order.
struct Drawing {
    std::vector<const Node*> nodes;
    std::unordered_map<const Node*, std::size_t> numbers;
};

Drawing draw(const char* caller, const Tensor& root) {
    if (!root.defined() || root.node() == nullptr)
        throw Error(caller,
                    "the tensor is not on the tape. Compute it from something that requires a gradient.");
    Drawing drawing;
    std::vector<const Node*> open{root.node().get()};
    drawing.numbers.emplace(open.back(), 0);
    while (!open.empty()) {
        const Node* node = open.back();
        open.pop_back();
        drawing.nodes.push_back(node);
        for (const auto& input : node->inputs)
            if (input != nullptr && drawing.numbers.emplace(input.get(), 0).second)
                open.push_back(input.get());
    }
    std::reverse(drawing.nodes.begin(), drawing.nodes.end());
    std::stable_sort(drawing.nodes.begin(), drawing.nodes.end(),
                     [](const Node* a, const Node* b) { return a->depth < b->depth; });
    for (std::size_t i = 0; i < drawing.nodes.size(); ++i) drawing.numbers[drawing.nodes[i]] = i;
    return drawing;
}

std::string readable_bytes(std::int64_t bytes) {
    if (bytes < 1024) return fmt::format("{} B", bytes);
    double amount = static_cast<double>(bytes);
    const char* unit = "B";
    for (const char* larger : {"KiB", "MiB", "GiB", "TiB"}) {
        if (amount < 1024.0) break;
        amount /= 1024.0;
        unit = larger;
    }
    return fmt::format("{:.1f} {}", amount, unit);
}

std::string inputs_of(const Node& node, const Drawing& drawing) {
    std::string text;
    for (const auto& input : node.inputs) {
        if (!text.empty()) text += ", ";
        text += input == nullptr ? "-" : fmt::format("%{}", drawing.numbers.at(input.get()));
    }
    return text;
}

}  // namespace

std::string tape_to_text(const Tensor& root) {
    const Drawing drawing = draw("tape_to_text", root);
    std::string text;
    std::set<const Storage*> kept;
    std::int64_t total = 0;
    for (std::size_t i = 0; i < drawing.nodes.size(); ++i) {
        const Node& node = *drawing.nodes[i];
        for (const Storage* storage : node.saved.storages())
            if (kept.insert(storage).second) total += storage->bytes();
        text += fmt::format("%{} = {}{} {} {}", i, node.name,
                            node.depth == 0 ? "" : fmt::format("({})", inputs_of(node, drawing)),
                            pretty(node.shape), node.dtype);
        if (!(node.device == Device::cpu())) text += fmt::format(" {}", node.device);
        if (node.depth > 0 && !node.backward)
            text += ", freed";
        else if (const std::int64_t bytes = node.saved.bytes(); bytes > 0)
            text += fmt::format(", saves {}", readable_bytes(bytes));
        text += '\n';
    }
    return text + fmt::format("{} nodes, {} saved\n", drawing.nodes.size(), readable_bytes(total));
}

std::string tape_to_dot(const Tensor& root) {
    const Drawing drawing = draw("tape_to_dot", root);
    std::string text = "digraph tape {\n    rankdir=BT;\n    node [shape=box, fontname=\"monospace\"];\n";
    for (std::size_t i = 0; i < drawing.nodes.size(); ++i) {
        const Node& node = *drawing.nodes[i];
        std::string label = fmt::format("{}\\n{} {}", node.name, pretty(node.shape), node.dtype);
        if (const std::int64_t bytes = node.saved.bytes(); bytes > 0)
            label += fmt::format("\\nsaves {}", readable_bytes(bytes));
        text += fmt::format("    n{} [label=\"{}\"{}];\n", i, label,
                            node.depth == 0 ? ", style=filled, fillcolor=lightgrey" : "");
    }
    for (std::size_t i = 0; i < drawing.nodes.size(); ++i)
        for (const auto& input : drawing.nodes[i]->inputs)
            if (input != nullptr)
                text += fmt::format("    n{} -> n{};\n", drawing.numbers.at(input.get()), i);
    return text + "}\n";
}

}  // namespace potluck
