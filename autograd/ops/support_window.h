#pragma once

// The windows of convolutions and pooling along one axis. For .cpp files of autograd/ops/ only.

#include <cstdint>
#include <string_view>

#include "autograd/ops/height_width.h"
#include "core/kernel_specs.h"
#include "core/tensor.h"

namespace potluck::detail {

/// One axis of x with its window options.
struct WindowAxis {
    std::string_view name;  // "height"
    std::int64_t size, kernel, stride, padding, dilation;
    bool ceil_mode = false;
};

/// The number of windows. Throws Error when an option is out of range or no window fits.
std::int64_t windows_along(std::string_view op, const Shape& x, const WindowAxis& axis);
/// Throws Error when one of `windows` windows contains no element of x.
void require_elements(std::string_view op, const Shape& x, const WindowAxis& axis, std::int64_t windows);

/// Throws Error unless x has exactly these axes: 3, or 4 with height and width.
void require_image(std::string_view op, const Tensor& x, std::int64_t ndim);

/// Height and width as the kernels take them.
inline std::array<std::int64_t, 2> as_pair(HeightWidth x) { return {x.height, x.width}; }
/// The same for one axis, the width: x then has height 1, and `of_height` is used for that axis.
inline std::array<std::int64_t, 2> as_pair(std::int64_t of_height, std::int64_t width) {
    return {of_height, width};
}

}  // namespace potluck::detail
