#pragma once

// For .cpp files only: the tensors of a module by their names.

#include <functional>
#include <string>
#include <vector>

#include "nn/module.h"

namespace potluck::nn::detail {

/// A tensor somewhere in the tree, by its full name.
struct NamedMember {
    std::string name;
    Member::Kind kind;
    Tensor* tensor;
};

/// Of a module and those below, in the order of members(). Throws Error when two have one name.
std::vector<NamedMember> named_tensors_of(const Module& module);

/// A tensor with all of its names, the first one first.
struct Tied {
    Tensor tensor;
    std::vector<std::string> names;
    Member::Kind kind;
};

/// Every tensor of a module once, if keep(kind) says so.
std::vector<Tied> tensors_of(const Module& module, const std::function<bool(Member::Kind)>& keep);
/// All but unsaved buffers.
std::vector<Tied> saved_tensors_of(const Module& module);

}  // namespace potluck::nn::detail
