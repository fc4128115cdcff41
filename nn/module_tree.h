#pragma once

// For .cpp files only.

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "core/format.h"
#include "nn/module.h"

namespace potluck::nn {
namespace detail {

/// An entry of the path from the module that was asked to a module below.
struct PathEntry {
    const Module* module;
    std::string name;  // the name within the module above
};

template <class Visit>
void for_each_member(const Module& module, const std::string& prefix, std::vector<PathEntry>& path,
                     const Visit& visit) {
    for (const Member& member : module.list_members()) {
        visit(member, prefix + member.name, path.size());
        if (member.kind != Member::Kind::module) continue;
        path.push_back({member.module, member.name});
        const auto passed = std::find_if(path.begin(), path.end() - 1, [&](const PathEntry& entry) {
            return entry.module == member.module;
        });
        if (passed != path.end() - 1) {
            std::string circle = passed->module->describe();
            for (auto entry = passed + 1; entry != path.end(); ++entry)
                circle += fmt::format(" -> {}: {}", entry->name, entry->module->describe());
            throw Error("module",
                        fmt::format("members go in a circle: {}. A module names what it consists of, "
                                    "never what it belongs to.",
                                    circle));
        }
        for_each_member(*member.module, prefix + member.name + ".", path, visit);
        path.pop_back();
    }
}

}  // namespace detail

/// Calls visit(member, full name, depth) for all members of a module and of those below, each module before its own
/// members; the depth of the first level is 1. Throws Error when the members form a cycle.
template <class Visit>
void for_each_member(const Module& module, const Visit& visit) {
    std::vector<detail::PathEntry> path{{&module, ""}};
    detail::for_each_member(module, "", path, visit);
}

}  // namespace potluck::nn
