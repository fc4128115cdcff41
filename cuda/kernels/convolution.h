#pragma once

// Internal: convolutions that no library computes become matrix products, by unfolding the windows of an image.

#include "core/kernel_specs.h"
#include "cuda/runtime.h"

namespace potluck::cuda {

/// columns (channels * kernel height * kernel width, windows) = the elements of image (channels, height, width) in each
/// window; 0 outside the image. Both contiguous, of one floating dtype; `windows` and `kernel` are (height, width).
void unfold(const Tensor& image, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
            const WindowSpec& options, Tensor& columns, cudaStream_t stream);
/// Each element of image = the sum of all positions of columns to which unfold() copies it.
void fold(const Tensor& columns, std::array<std::int64_t, 2> kernel, std::array<std::int64_t, 2> windows,
          const WindowSpec& options, Tensor& image, cudaStream_t stream);

}  // namespace potluck::cuda
