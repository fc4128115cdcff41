#pragma once

// For .cpp files only: teaches fmt to print our types. No public header includes this file.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/tensor.h"

template <>
struct fmt::formatter<potluck::DType> : fmt::formatter<std::string_view> {
    template <class Context>
    auto format(potluck::DType dtype, Context& context) const {
        return fmt::formatter<std::string_view>::format(potluck::name_of(dtype), context);
    }
};

template <>
struct fmt::formatter<potluck::Device> : fmt::formatter<std::string_view> {
    template <class Context>
    auto format(potluck::Device device, Context& context) const {
        return fmt::formatter<std::string_view>::format(potluck::name_of(device), context);
    }
};

namespace potluck {
/// A shape for messages: fmt::format("{}", pretty(x.shape())) gives "(2, 3)".
inline std::string pretty(const Shape& shape) { return to_string(shape); }
}  // namespace potluck
