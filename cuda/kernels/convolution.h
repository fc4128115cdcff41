#pragma once

// Internal: convolutions that no library computes become matrix products, by laying the windows of an image side by side.

#include "core/kernel_specs.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

/// columns (channels * kernel height * kernel width, windows) = what each window of image (channels, height, width) sees;
/// 0 where it looks beyond. Both contiguous, of one floating dtype; `windows` and `kernel` are (height, width).
void unfold(const Tensor& image, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
            const WindowSpec& options, Tensor& columns, cudaStream_t stream);
/// image = for each element the sum of all places of columns that unfold() copies it to.
void fold(const Tensor& columns, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
          const WindowSpec& options, Tensor& image, cudaStream_t stream);

}  // namespace potluck::cuda
