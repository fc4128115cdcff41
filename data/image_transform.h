#pragma once

#include <cstdint>
#include <vector>

#include "core/options.h"
#include "core/random.h"
#include "core/tensor.h"

namespace potluck::data {

/// Pixels in a column and in a row. ImageSize(32) is 32 x 32; 0 x 0 stands for none.
struct ImageSize {
    std::int64_t height = 0, width = 0;

    constexpr ImageSize() = default;
    constexpr ImageSize(std::int64_t both) : height(both), width(both) {}
    constexpr ImageSize(std::int64_t height, std::int64_t width) : height(height), width(width) {}
    friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

// All of these take u8 images (height, width, channels) on the CPU, as read_image() makes them, and throw Error for other
// tensors. They run in the calling thread alone, so that every worker of a Loader may call them.

/// The image in another size, bilinear: pixel i of n is the square from i to i + 1 of a line of length n. The new pixel with
/// the centre c, in units of old pixels, is the mean of the old ones with centres p, weighted by max(0, 1 - |p - c| / s);
/// s is 1 where the image grows and old / new size where it shrinks (so that no pixel is skipped: antialiased). Weights
/// outside of the image are left away. Computed in f32, first along rows, then along columns; rounded once, at the end.
Tensor resize_image(const Tensor& image, ImageSize size);
/// The part of `size` whose first row and column are those of the image with these numbers; what lies outside of the image
/// (also before row 0 and column 0) is 0.
Tensor crop_image(const Tensor& image, std::int64_t first_row, std::int64_t first_column, ImageSize size);
/// The image with left and right exchanged.
Tensor flip_image(const Tensor& image);
/// (u8 / 255 - mean[channel]) / stddev[channel] as f32 (channels, height, width), the form that layers take. Empty lists
/// stand for 0 and 1. Throws Error when a list has another length than there are channels, or stddev is not above 0.
Tensor normalize_image(const Tensor& image, const std::vector<double>& mean = {},
                       const std::vector<double>& stddev = {});

struct ImageTransformOptions {
    ImageSize resize = {};     // the whole image to this size
    std::int64_t padding = 0;  // rows and columns of 0 on every side
    ImageSize crop = {};       // a part of this size
    bool random_crop = false;  // at a random place, each as likely as another; else from the middle
    double flip = 0.0;         // probability that left and right are exchanged
    std::vector<double> mean = {}, stddev = {};  // see normalize_image()
};

/// What makes the input of a network of an image: resizes, pads, crops, flips and normalises it, in this order, each where
/// the options say so; the last always. To use it: TransformedDataset(ImageFolder("photos"), ImageTransform({...})).
///
///     data::ImageTransform training({.padding = 4, .crop = 32, .random_crop = true, .flip = 0.5, .mean = mean, .stddev = stddev});
///     data::ImageTransform testing({.mean = mean, .stddev = stddev});
class ImageTransform {
public:
    /// Throws Error for options out of range.
    explicit ImageTransform(ImageTransformOptions options = {});
    template <std::size_t N>
    explicit ImageTransform(MistypedOptions<N>) = delete;  // no such option: see ImageTransformOptions

    /// Of a u8 image (height, width, channels), f32 (channels, height, width). What is random in it is a function of `key`
    /// alone. Throws Error when the crop is larger than the padded image.
    Tensor operator()(const Tensor& image, RandomKey key) const;

private:
    ImageTransformOptions options_;
};

}  // namespace potluck::data
