#include "nn/tied.h"

#include <algorithm>
#include <set>

#include "core/format.h"
#include "nn/module_tree.h"

namespace potluck::nn::detail {

std::vector<NamedMember> named_tensors_of(const Module& module) {
    std::vector<NamedMember> named_tensors;
    nn::for_each_member(module, [&](const Member& member, const std::string& name, std::size_t) {
        if (member.kind != Member::Kind::module) named_tensors.push_back({name, member.kind, member.tensor});
    });
    std::set<std::string> names;
    for (const NamedMember& named : named_tensors) {
        if (!names.insert(named.name).second) {
            throw Error("module",
                        fmt::format("two tensors are called \"{}\". Name each member once.", named.name));
        }
    }
    return named_tensors;
}

std::vector<Tied> tensors_of(const Module& module, const std::function<bool(Member::Kind)>& keep) {
    std::vector<Tied> tensors;
    for (const NamedMember& named : named_tensors_of(module)) {
        if (!keep(named.kind)) continue;
        const auto known = std::find_if(tensors.begin(), tensors.end(),
                                        [&](const Tied& tied) { return tied.tensor.is_same(*named.tensor); });
        if (known != tensors.end()) {
            known->names.push_back(named.name);
        } else {
            tensors.push_back({*named.tensor, {named.name}, named.kind});
        }
    }
    return tensors;
}

std::vector<Tied> saved_tensors_of(const Module& module) {
    return tensors_of(module, [](Member::Kind kind) { return kind != Member::Kind::unsaved_buffer; });
}

}  // namespace potluck::nn::detail
