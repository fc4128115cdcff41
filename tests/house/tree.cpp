#include "tests/house/tree.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>

namespace potluck::house {
namespace {

namespace fs = std::filesystem;

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
    return std::any_of(endings.begin(), endings.end(),
                       [&](std::string_view ending) { return name.ends_with(ending); });
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
        } else if (entry->is_regular_file() &&
                   name != ".git") {  // a file where git has several working trees
            tree.files.push_back(fs::relative(entry->path(), root).generic_string());
        }
    }
    std::sort(tree.files.begin(), tree.files.end());
    return tree;
}

bool contains(const Tree& tree, const std::string& file) {
    return std::binary_search(tree.files.begin(), tree.files.end(), file);
}

std::vector<std::string> read_lines(const Tree& tree, const std::string& file) {
    std::ifstream stream(tree.root / file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

bool is_source(std::string_view file) { return ends_with_any(file, {".h", ".cpp", ".cu", ".cuh"}); }
bool is_header(std::string_view file) { return ends_with_any(file, {".h", ".cuh"}); }

std::string top_folder(std::string_view file) { return std::string(file.substr(0, file.find('/'))); }

std::string folder_of(const std::string& file) { return fs::path(file).parent_path().generic_string(); }

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

std::set<std::string> listed_names(const Tree& tree, const std::string& file) {
    std::set<std::string> names = quoted_names(tree, file);
    // `files(family + '.cpp')` in a loop over the root's op_families names one file for each.
    const std::vector<std::string> lines = read_lines(tree, file), root = read_lines(tree, "meson.build");
    auto line = std::find_if(root.begin(), root.end(),
                             [](const std::string& text) { return text.starts_with("op_families = ["); });
    for (; line != root.end() && *line != "]"; ++line) {
        const std::size_t open = line->find('\''), close = line->rfind('\'');
        if (open == close) continue;
        const std::string family = line->substr(open + 1, close - open - 1);
        for (const std::string ending : {".h", ".cpp", ".cu"})
            if (std::any_of(lines.begin(), lines.end(), [&](const std::string& text) {
                    return text.find("family + '" + ending + "'") != std::string::npos;
                }))
                names.insert(family + ending);
    }
    return names;
}

std::string at(const std::string& file, std::size_t line) { return file + ":" + std::to_string(line) + ": "; }

}  // namespace potluck::house
