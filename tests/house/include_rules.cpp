#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "tests/house/rules.h"

namespace potluck::house {
namespace {

namespace fs = std::filesystem;

constexpr const char* umbrella = "potluck.h";

// A floor may include itself and the floors below. Two rooms on one floor must not include each other.
const std::map<std::string, int, std::less<>> floors = {
    {"core", 1}, {"autograd", 2}, {"data", 2},     {"cuda", 2},  {"nn", 3},
    {"dist", 4}, {umbrella, 5},   {"examples", 6}, {"tests", 7},
};

// The emulator replaces the CUDA runtime, which cuda/ includes, and is part of the tests: the only way up.
bool stands_in_for_a_library(std::string_view own_floor, std::string_view target) {
    return own_floor == "cuda" && target.starts_with("tests/cuda_emulator/");
}

struct Include {
    std::string name;
    bool quoted;
    std::size_t line;
};

std::optional<Include> parse_include(const std::string& text, std::size_t line) {
    std::size_t at_char = text.find_first_not_of(" \t");
    if (at_char == std::string::npos || text[at_char] != '#') return std::nullopt;
    at_char = text.find_first_not_of(" \t", at_char + 1);
    if (at_char == std::string::npos || text.compare(at_char, 7, "include") != 0) return std::nullopt;
    const std::size_t open = text.find_first_of("<\"", at_char);
    if (open == std::string::npos) return std::nullopt;
    const char closing = text[open] == '<' ? '>' : '"';
    const std::size_t close = text.find(closing, open + 1);
    if (close == std::string::npos) return std::nullopt;
    return Include{text.substr(open + 1, close - open - 1), closing == '"', line};
}

std::vector<Include> includes_of(const Tree& tree, const std::string& file) {
    std::vector<Include> includes;
    std::size_t number = 0;
    for (const std::string& line : read_lines(tree, file)) {
        ++number;
        if (auto include = parse_include(line, number)) includes.push_back(*include);
    }
    return includes;
}

/// The file of the tree to which an include refers, or empty when it is not one of ours.
std::string resolve(const Tree& tree, const Include& include) {
    if (include.name == "potluck.h") return umbrella;
    return contains(tree, include.name) ? include.name : std::string();
}

/// Every header that potluck.h reaches, including itself.
std::set<std::string> public_headers(const Tree& tree) {
    std::set<std::string> reached;
    std::vector<std::string> todo = {umbrella};
    while (!todo.empty()) {
        const std::string file = todo.back();
        todo.pop_back();
        if (!contains(tree, file) || !reached.insert(file).second) continue;
        for (const Include& include : includes_of(tree, file)) {
            const std::string target = resolve(tree, include);
            if (!target.empty()) todo.push_back(target);
        }
    }
    return reached;
}

Faults umbrella_missing(const Tree& tree) {
    if (contains(tree, umbrella)) return {};
    return {std::string(umbrella) + ": the umbrella header is missing. Users include it as <potluck.h>."};
}

/// The standard library's headers have plain names: <vector>. A dot or a slash means a foreign header.
bool is_standard_header(std::string_view name) {
    return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
        return std::islower(letter) != 0 || letter == '_' || std::isdigit(letter) != 0;
    });
}

/// Headers that a floor's meson.build passes to install_headers().
std::set<std::string> installed_headers(const Tree& tree) {
    std::set<std::string> headers;
    for (const std::string& file : tree.files) {
        if (fs::path(file).filename() != "meson.build" || top_folder(file) == "tests") continue;
        for (const std::string& name : listed_names(tree, file)) {
            // A header whose existence is only checked, such as <cudnn.h>, is not in the tree.
            const std::string header = (fs::path(folder_of(file)) / name).generic_string();
            if (is_header(name) && contains(tree, header)) headers.insert(header);
        }
    }
    return headers;
}

}  // namespace

Faults includes_going_up(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        const auto own = floors.find(top_folder(file));
        if (!is_source(file) || own == floors.end()) continue;
        for (const Include& include : includes_of(tree, file)) {
            const std::string target = resolve(tree, include);
            if (target.empty()) {
                if (!include.quoted) continue;
                faults.push_back(
                    at(file, include.line) + "no file \"" + include.name +
                    "\" from the root of the tree. Write includes from there, as in \"core/tensor.h\".");
                continue;
            }
            const auto other = floors.find(top_folder(target));
            if (other == floors.end() || other->first == own->first || other->second < own->second) continue;
            if (stands_in_for_a_library(own->first, target)) continue;
            faults.push_back(at(file, include.line) + own->first + "/ may not include " + target +
                             ". A floor includes only what is below it.");
        }
    }
    return faults;
}

Faults include_circles(const Tree& tree) {
    Faults faults;
    std::set<std::string> done;
    std::vector<std::string> path;
    const std::function<void(const std::string&)> visit = [&](const std::string& file) {
        const auto seen = std::find(path.begin(), path.end(), file);
        if (seen != path.end()) {
            std::string circle;
            for (auto step = seen; step != path.end(); ++step) circle += *step + " -> ";
            faults.push_back(circle + file + ": a circle of includes");
            return;
        }
        if (!done.insert(file).second) return;
        path.push_back(file);
        for (const Include& include : includes_of(tree, file)) {
            const std::string target = resolve(tree, include);
            if (!target.empty()) visit(target);
        }
        path.pop_back();
    };
    for (const std::string& file : tree.files) {
        if (is_header(file)) visit(file);
    }
    return faults;
}

Faults third_party_in_public_headers(const Tree& tree) {
    Faults faults = umbrella_missing(tree);
    for (const std::string& file : public_headers(tree)) {
        for (const Include& include : includes_of(tree, file)) {
            if (!resolve(tree, include).empty() || is_standard_header(include.name)) continue;
            faults.push_back(at(file, include.line) + "a public header includes <" + include.name +
                             ">. Third-party headers belong in .cpp files.");
        }
    }
    return faults;
}

Faults installed_headers_differ(const Tree& tree) {
    Faults faults = umbrella_missing(tree);
    const std::set<std::string> reached = public_headers(tree);
    const std::set<std::string> installed = installed_headers(tree);
    for (const std::string& file : reached) {
        if (!installed.contains(file)) {
            faults.push_back(
                file + ": potluck.h includes it, but it is not installed. Add it to install_headers() in " +
                (fs::path(folder_of(file)) / "meson.build").generic_string() + ".");
        }
    }
    for (const std::string& file : installed) {
        if (!reached.contains(file)) {
            faults.push_back(
                file +
                ": it is installed, but potluck.h does not reach it. Drop it from install_headers(), "
                "or include it.");
        }
    }
    return faults;
}

}  // namespace potluck::house
