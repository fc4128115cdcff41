#pragma once

// For .cpp files of nn/: lists of names in messages.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace potluck::nn {

/// "a, b, c and 12 more".
inline std::string list_of(const std::vector<std::string>& names) {
    constexpr std::size_t shown = 12;
    std::string text;
    for (std::size_t i = 0; i < std::min(names.size(), shown); ++i) text += (i == 0 ? "" : ", ") + names[i];
    if (names.size() > shown) text += " and " + std::to_string(names.size() - shown) + " more";
    return text;
}

/// " Missing: a, b." for each kind of problem that occurred, with its names.
inline std::string faults_of(const std::vector<std::pair<const char*, std::vector<std::string>>>& kinds) {
    std::string text;
    for (const auto& [kind, names] : kinds) {
        if (!names.empty()) text += std::string(" ") + kind + ": " + list_of(names) + ".";
    }
    return text;
}

}  // namespace potluck::nn
