#pragma once

#include "autograd/ops/height_width.h"
#include "core/options.h"
#include "core/tensor.h"

namespace potluck {

struct Pooling1d {
    std::int64_t stride = 0;    // distance between windows; 0: the size of the kernel
    std::int64_t padding = 0;   // on both sides; never the maximum
    std::int64_t dilation = 1;  // distance between the elements of a window
    bool ceil_mode =
        false;  // allows a last window that extends beyond x, if it begins in x or its left padding
    bool count_padding = true;  // average: padding counts as zeros (but never positions beyond it)
};
struct Pooling2d {
    HeightWidth stride = 0;
    HeightWidth padding = 0;
    HeightWidth dilation = 1;
    bool ceil_mode = false;
    bool count_padding = true;
};

// Pooling over windows of x: (batch, channels, length) to (batch, channels, windows), or the same with height and
// width. The number of windows follows the rule of conv1d, rounded up in ceil_mode. Throws Error when no window fits,
// or when one would contain only padding.

/// The largest element of each window; NaN wins; the gradient goes to the first element with that value.
Tensor max_pool1d(const Tensor& x, std::int64_t kernel, const Pooling1d& options = {});
template <std::size_t N>
Tensor max_pool1d(const Tensor&, std::int64_t, MistypedOptions<N>,
                  Refused<"no such option: see Pooling1d", N> = {});
/// The largest element of each window of an image.
Tensor max_pool2d(const Tensor& x, HeightWidth kernel, const Pooling2d& options = {});
template <std::size_t N>
Tensor max_pool2d(const Tensor&, HeightWidth, MistypedOptions<N>,
                  Refused<"no such option: see Pooling2d", N> = {});
/// The mean of each window.
Tensor average_pool1d(const Tensor& x, std::int64_t kernel, const Pooling1d& options = {});
template <std::size_t N>
Tensor average_pool1d(const Tensor&, std::int64_t, MistypedOptions<N>,
                      Refused<"no such option: see Pooling1d", N> = {});
/// The mean of each window of an image.
Tensor average_pool2d(const Tensor& x, HeightWidth kernel, const Pooling2d& options = {});
template <std::size_t N>
Tensor average_pool2d(const Tensor&, HeightWidth, MistypedOptions<N>,
                      Refused<"no such option: see Pooling2d", N> = {});

}  // namespace potluck
