#include "nn/tied.h"

#include <algorithm>
#include <set>

#include "core/format.h"
#include "nn/walk.h"

namespace potluck::nn::detail {

std::vector<Place> places_of(const Module& module) {
    std::vector<Place> places;
    nn::walk(module, [&](const Member& member, const std::string& name, std::size_t) {
        if (member.kind != Member::Kind::module) places.push_back({name, member.kind, member.tensor});
    });
    std::set<std::string> names;
    for (const Place& place : places) {
        if (!names.insert(place.name).second) {
            throw Error("module",
                        fmt::format("two tensors are called \"{}\". Name each member once.", place.name));
        }
    }
    return places;
}

std::vector<Tied> tensors_of(const Module& module, const std::function<bool(Member::Kind)>& keep) {
    std::vector<Tied> tensors;
    for (const Place& place : places_of(module)) {
        if (!keep(place.kind)) continue;
        const auto known = std::find_if(tensors.begin(), tensors.end(),
                                        [&](const Tied& tied) { return tied.tensor.is_same(*place.tensor); });
        if (known != tensors.end()) {
            known->names.push_back(place.name);
        } else {
            tensors.push_back({*place.tensor, {place.name}, place.kind});
        }
    }
    return tensors;
}

std::vector<Tied> saved_tensors_of(const Module& module) {
    return tensors_of(module, [](Member::Kind kind) { return kind != Member::Kind::unsaved_buffer; });
}

}  // namespace potluck::nn::detail
