#include "tests/house/rules.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string_view>

namespace potluck::house {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t longest_file = 400;
constexpr const char* umbrella = "nn/potluck.h";

// A floor may include itself and what is below it. Two rooms of one floor do not know each other.
const std::map<std::string, int, std::less<>> floors = {
    {"core", 1}, {"autograd", 2}, {"data", 2},     {"cuda", 2},
    {"nn", 3},   {"dist", 4},     {"examples", 5}, {"tests", 6},
};

// Files without a twin, each with its reason. An entry that is no longer needed is a fault as well.
struct Exception {
    std::string_view file;
    std::string_view reason;
};
constexpr Exception without_op[] = {
    {"core/cpu/device.cpp", "registers the device and hands out its memory"},
};
constexpr Exception without_kernel[] = {
    {"autograd/ops/shape.cpp", "views: no element is computed"},
};

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
    return std::any_of(endings.begin(), endings.end(),
                       [&](std::string_view ending) { return name.ends_with(ending); });
}

bool is_source(std::string_view file) { return ends_with_any(file, {".h", ".cpp", ".cu", ".cuh"}); }
bool is_header(std::string_view file) { return ends_with_any(file, {".h", ".cuh"}); }

std::vector<std::string> read_lines(const Tree& tree, const std::string& file) {
    std::ifstream stream(tree.root / file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

std::string at(const std::string& file, std::size_t line) { return file + ":" + std::to_string(line) + ": "; }

/// "core" of "core/cpu/norm.cpp".
std::string top_folder(std::string_view file) { return std::string(file.substr(0, file.find('/'))); }

bool contains(const Tree& tree, const std::string& file) {
    return std::binary_search(tree.files.begin(), tree.files.end(), file);
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

/// The file of the tree that an include means, or empty when it is somebody else's.
std::string resolve(const Tree& tree, const Include& include) {
    if (include.name == "potluck.h") return umbrella;
    return contains(tree, include.name) ? include.name : std::string();
}

/// Every header that potluck.h reaches, itself too.
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

/// The standard library's headers have plain names: <vector>. A dot or a slash belongs to somebody else.
bool is_standard_header(std::string_view name) {
    return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
        return std::islower(letter) != 0 || letter == '_' || std::isdigit(letter) != 0;
    });
}

std::set<std::string> stems(const Tree& tree, const std::string& folder) {
    std::set<std::string> names;
    for (const std::string& file : tree.files) {
        const fs::path path(file);
        if (path.parent_path() == folder && path.extension() == ".cpp") names.insert(path.stem().string());
    }
    return names;
}

bool excepted(std::span<const Exception> exceptions, std::string_view file) {
    return std::any_of(exceptions.begin(), exceptions.end(),
                       [&](const Exception& one) { return one.file == file; });
}

/// Names in single quotes that a meson.build lists: 'norm.cpp', 'mlp'.
std::set<std::string> quoted_names(const Tree& tree, const std::string& file) {
    std::set<std::string> names;
    for (std::string line : read_lines(tree, file)) {
        line = line.substr(0, line.find('#'));
        std::size_t open = line.find('\'');
        while (open != std::string::npos) {
            const std::size_t close = line.find('\'', open + 1);
            if (close == std::string::npos) break;
            names.insert(line.substr(open + 1, close - open - 1));
            open = line.find('\'', close + 1);
        }
    }
    return names;
}

/// Headers that a floor's meson.build hands to install_headers().
std::set<std::string> installed_headers(const Tree& tree) {
    std::set<std::string> headers;
    for (const std::string& file : tree.files) {
        if (!file.ends_with("/meson.build") || top_folder(file) == "tests") continue;
        for (const std::string& name : quoted_names(tree, file)) {
            if (is_header(name)) headers.insert((fs::path(file).parent_path() / name).generic_string());
        }
    }
    return headers;
}

}  // namespace

Tree read_tree(const fs::path& root) {
    Tree tree{root, {}};
    for (auto entry = fs::recursive_directory_iterator(root); entry != fs::recursive_directory_iterator();
         ++entry) {
        const std::string name = entry->path().filename().string();
        if (entry->is_directory()) {
            const bool foreign = (name.starts_with('.') && name != ".ci") || name.starts_with("build") ||
                                 name == "runs" || name == "__pycache__";
            if (foreign) entry.disable_recursion_pending();
        } else if (entry->is_regular_file()) {
            tree.files.push_back(fs::relative(entry->path(), root).generic_string());
        }
    }
    std::sort(tree.files.begin(), tree.files.end());
    return tree;
}

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
                fs::path(file).parent_path().generic_string() + "/meson.build.");
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

Faults sources_not_built(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        const fs::path path(file);
        if (path.extension() != ".cpp" || !floors.contains(top_folder(file))) continue;
        // tests/install/external.cpp and its like are built by the check beside them.
        const std::string list = (path.parent_path() / "meson.build").generic_string();
        if (!contains(tree, list)) continue;
        const std::set<std::string> names = quoted_names(tree, list);
        if (names.contains(path.filename().string()) || names.contains(path.stem().string())) continue;
        faults.push_back(file + ": " + list + " does not name it, so it is never compiled.");
    }
    return faults;
}

Faults missing_twins(const Tree& tree) {
    const std::set<std::string> kernels = stems(tree, "core/cpu");
    const std::set<std::string> ops = stems(tree, "autograd/ops");
    const std::set<std::string> tests = stems(tree, "tests/ops");
    Faults faults;
    for (const std::string& name : kernels) {
        const std::string file = "core/cpu/" + name + ".cpp";
        const bool exempt = excepted(without_op, file);
        if (!exempt && !ops.contains(name))
            faults.push_back(file + ": autograd/ops/" + name + ".cpp is missing.");
        if (exempt && ops.contains(name)) faults.push_back(file + ": it has a twin now. Drop the exception.");
    }
    for (const std::string& name : ops) {
        const std::string file = "autograd/ops/" + name + ".cpp";
        const bool exempt = excepted(without_kernel, file);
        if (!exempt && !kernels.contains(name))
            faults.push_back(file + ": core/cpu/" + name + ".cpp is missing.");
        if (exempt && kernels.contains(name))
            faults.push_back(file + ": it has a twin now. Drop the exception.");
        if (!contains(tree, "autograd/ops/" + name + ".h"))
            faults.push_back(file + ": its header is missing.");
        if (!tests.contains(name)) faults.push_back(file + ": tests/ops/" + name + ".cpp is missing.");
    }
    return faults;
}

Faults undocumented_ops(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        if (fs::path(file).parent_path() != "autograd/ops" || !is_header(file)) continue;
        const std::vector<std::string> lines = read_lines(tree, file);
        // A docstring covers the declarations that follow it without an empty line between (overloads).
        bool documented = false;
        int open_parentheses = 0;
        for (std::size_t i = 0; i < lines.size(); ++i) {
            const std::string& line = lines[i];
            const bool starts_declaration =
                open_parentheses == 0 && !line.empty() &&
                (std::isalpha(static_cast<unsigned char>(line[0])) != 0 || line[0] == '[');
            if (line.starts_with("///")) documented = true;
            if (line.empty() || line[0] == '}') documented = false;
            const std::string code = line.substr(0, line.find("//"));
            const bool is_function = starts_declaration && code.find('(') != std::string::npos &&
                                     !code.starts_with("using") && !code.starts_with("namespace");
            if (is_function && !documented) {
                faults.push_back(at(file, i + 1) + "no `///` docstring: " + code.substr(0, 60));
            }
            open_parentheses += static_cast<int>(std::count(code.begin(), code.end(), '(')) -
                                static_cast<int>(std::count(code.begin(), code.end(), ')'));
        }
    }
    return faults;
}

Faults machine_paths(const Tree& tree) {
    // Written in two pieces each, so that this file does not break its own rule.
    const std::vector<std::string> foreign = {
        "/wo"
        "rk/",
        "/ro"
        "ot/",
        "/ho"
        "me/"};
    Faults faults;
    for (const std::string& file : tree.files) {
        std::size_t number = 0;
        for (const std::string& line : read_lines(tree, file)) {
            ++number;
            for (const std::string& path : foreign) {
                const std::size_t found = line.find(path);
                if (found == std::string::npos) continue;
                // A longer word that only ends like it, such as "frame/work/", is no path of a machine.
                if (found > 0 && (std::isalnum(static_cast<unsigned char>(line[found - 1])) != 0)) continue;
                faults.push_back(at(file, number) + "names " + path + ", a folder of one machine.");
            }
        }
    }
    return faults;
}

Faults long_files(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        if (!is_source(file)) continue;
        const std::size_t length = read_lines(tree, file).size();
        if (length > longest_file) faults.push_back(file + ": " + std::to_string(length) + " lines");
    }
    return faults;
}

}  // namespace potluck::house
