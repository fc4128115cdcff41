#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace potluck::house {

/// The source tree as the rules see it: folders and files, relative to its root.
struct Tree {
    std::filesystem::path root;
    std::vector<std::string> files;  ///< every file that belongs to the project, sorted
};

/// Lists the files of a source tree, without build folders, run folders and version control.
Tree read_tree(const std::filesystem::path& root);

bool contains(const Tree& tree, const std::string& file);
std::vector<std::string> read_lines(const Tree& tree, const std::string& file);

bool is_source(std::string_view file);
bool is_header(std::string_view file);
/// "core" of "core/cpu/norm.cpp".
std::string top_folder(std::string_view file);
/// "core/cpu" of "core/cpu/norm.cpp".
std::string folder_of(const std::string& file);
/// Names in single quotes that a meson.build lists: 'norm.cpp', 'mlp'.
std::set<std::string> quoted_names(const Tree& tree, const std::string& file);

/// The same, plus the families of the root's list of op families if the file iterates over that list.
std::set<std::string> listed_names(const Tree& tree, const std::string& file);

/// The position of a fault: "core/tensor.h:7: ".
std::string at(const std::string& file, std::size_t line);

}  // namespace potluck::house
