#include "autograd/ops/support_window.h"

#include <algorithm>
#include <limits>

#include "core/format.h"

namespace potluck::detail {
namespace {

// Keeps every product of two of the numbers below within 63 bits.
constexpr std::int64_t largest_number = std::numeric_limits<std::int32_t>::max();

void require_between(std::string_view op, const WindowAxis& axis, std::string_view what, std::int64_t value,
                     std::int64_t least) {
    if (value < least || value > largest_number)
        throw Error(op, fmt::format("the {} along the {} is {}. It must be {} to {}.", what, axis.name, value,
                                    least, largest_number));
}

}  // namespace

std::int64_t windows_along(std::string_view op, const Shape& x, const WindowAxis& axis) {
    require_between(op, axis, "kernel", axis.kernel, 1);
    require_between(op, axis, "stride", axis.stride, 1);
    require_between(op, axis, "padding", axis.padding, 0);
    require_between(op, axis, "dilation", axis.dilation, 1);
    require_between(op, axis, "size", axis.size, 0);
    const std::int64_t reach = axis.dilation * (axis.kernel - 1) + 1;
    const std::int64_t room = axis.size + 2 * axis.padding - reach;  // the distance that a window can move
    // In ceil mode the last window may extend beyond x, but not begin beyond it or in its right padding.
    std::int64_t windows = 0;
    if (room >= 0 || (axis.ceil_mode && room > -axis.stride)) {
        windows = room >= 0 ? room / axis.stride + 1 : 1;
        const bool one_more = axis.ceil_mode && room > 0 && room % axis.stride != 0 &&
                              windows * axis.stride < axis.size + axis.padding;
        if (one_more) ++windows;
    }
    if (windows < 1)
        throw Error(op,
                    fmt::format("no window fits into x {}: the kernel of {} with dilation {} reaches over "
                                "{} along the {}, where x has {} with its padding of {}. Make the padding "
                                "larger, or the kernel or its dilation smaller.",
                                pretty(x), axis.kernel, axis.dilation, reach, axis.name,
                                axis.size + 2 * axis.padding, axis.padding));
    return windows;
}

void require_elements(std::string_view op, const Shape& x, const WindowAxis& axis, std::int64_t windows) {
    for (std::int64_t window = 0; window < windows; ++window) {
        const std::int64_t start = window * axis.stride - axis.padding;
        const std::int64_t outside = start < 0 ? (-start + axis.dilation - 1) / axis.dilation : 0;
        if (outside < axis.kernel && start + outside * axis.dilation < axis.size) continue;
        throw Error(
            op, fmt::format("window {} along the {} of x {} holds nothing but padding: it begins at {}, "
                            "and has {} places with dilation {}. Make the padding ({}) smaller.",
                            window, axis.name, pretty(x), start, axis.kernel, axis.dilation, axis.padding));
    }
}

void require_image(std::string_view op, const Tensor& x, std::int64_t ndim) {
    if (x.ndim() != ndim)
        throw Error(op,
                    fmt::format("x has shape {}, but (batch, channels, {}) is needed. unsqueeze() adds an "
                                "axis.",
                                pretty(x.shape()), ndim == 3 ? "length" : "height, width"));
}

}  // namespace potluck::detail
