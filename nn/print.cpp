#include <ostream>

#include "core/format.h"
#include "nn/module.h"
#include "nn/module_tree.h"

namespace potluck::nn {
namespace {

/// "784" of 784, "203,530" of 203530.
std::string with_commas(std::int64_t number) {
    std::string text = std::to_string(number);
    for (std::int64_t i = static_cast<std::int64_t>(text.size()) - 3; i > 0; i -= 3) {
        text.insert(static_cast<std::size_t>(i), ",");
    }
    return text;
}

/// "Linear(784, 256): weight (256, 784), bias (256)", with the dtype where it is not f32.
std::string line_of(const Module& module) {
    std::vector<std::string> tensors;
    for (const Member& member : module.list_members()) {
        if (member.kind == Member::Kind::module) continue;
        const Tensor& tensor = *member.tensor;
        tensors.push_back(
            fmt::format("{} {}{}", member.name, pretty(tensor.shape()),
                        tensor.dtype() == DType::f32 ? "" : fmt::format(" {}", tensor.dtype())));
    }
    return module.describe() + (tensors.empty() ? "" : fmt::format(": {}", fmt::join(tensors, ", ")));
}

}  // namespace

std::string to_string(const Module& module) {
    std::string text = line_of(module) + "\n";
    for_each_member(module, [&](const Member& member, const std::string&, std::size_t depth) {
        if (member.kind != Member::Kind::module) return;
        text += fmt::format("{:{}}{}: {}\n", "", 2 * depth, member.name, line_of(*member.module));
    });
    return text + with_commas(module.parameter_count()) + " parameters";
}

std::ostream& operator<<(std::ostream& stream, const Module& module) { return stream << to_string(module); }

}  // namespace potluck::nn
