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

/// A step on the path from the module that was asked to a module below.
struct Step {
    const Module* module;
    std::string name;  // the name within the module above
};

template <class Visit>
void walk(const Module& module, const std::string& prefix, std::vector<Step>& way, const Visit& visit) {
    for (const Member& member : module.list_members()) {
        visit(member, prefix + member.name, way.size());
        if (member.kind != Member::Kind::module) continue;
        way.push_back({member.module, member.name});
        const auto passed = std::find_if(way.begin(), way.end() - 1,
                                         [&](const Step& step) { return step.module == member.module; });
        if (passed != way.end() - 1) {
            std::string circle = passed->module->describe();
            for (auto step = passed + 1; step != way.end(); ++step)
                circle += fmt::format(" -> {}: {}", step->name, step->module->describe());
            throw Error("module",
                        fmt::format("members go in a circle: {}. A module names what it consists of, "
                                    "never what it belongs to.",
                                    circle));
        }
        walk(*member.module, prefix + member.name + ".", way, visit);
        way.pop_back();
    }
}

}  // namespace detail

/// Calls visit(member, full name, depth) for all members of a module and of those below, each module before its own
/// members; the depth of the first level is 1. Throws Error when the members form a cycle.
template <class Visit>
void walk(const Module& module, const Visit& visit) {
    std::vector<detail::Step> way{{&module, ""}};
    detail::walk(module, "", way, visit);
}

}  // namespace potluck::nn
