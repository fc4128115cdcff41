#pragma once

#include <cstdint>

namespace potluck {

/// A number for each of the two axes of an image. A single number applies to both: `.stride = 2`, `.stride = {2, 1}`.
struct HeightWidth {
    std::int64_t height, width;

    HeightWidth(std::int64_t both) : height(both), width(both) {}
    HeightWidth(std::int64_t height, std::int64_t width) : height(height), width(width) {}
};

}  // namespace potluck
