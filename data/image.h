#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/options.h"
#include "core/tensor.h"

namespace potluck::data {

struct ImageOptions {
    /// Of the result. 0: as stored. 1: grey. 3: RGB. 4: RGB and alpha.
    std::int64_t channels = 0;
    /// Larger images are refused before memory is taken for them.
    std::int64_t most_pixels = 100'000'000;
};

/// The Error that a file is no image that can be read: it is damaged, of another format, or too large.
class DamagedImage : public Error {
public:
    /// `what()` reads `[image] NAME: REASON What to do.`
    DamagedImage(const std::string& name, const std::string& reason);

    const std::string& reason() const noexcept { return reason_; }

private:
    std::string reason_;
};

/// Reads a PNG or JPEG file, whichever its first bytes say it is: u8 (height, width, channels), row 0 at the top.
///
/// Channels as stored are 1 (grey), 2 (grey and alpha; PNG alone), 3 (RGB) or 4 (RGB and alpha; PNG alone). Palettes and
/// grey of 1, 2 and 4 bits are expanded to 8 bits; 16 bits are rounded to 8; a transparent colour becomes alpha. CMYK of a
/// JPEG becomes RGB without a colour profile: R = (255 - C) (255 - K) / 255 and so on. Profiles and gamma are not applied.
/// An image whose EXIF data say that it was taken with a turned camera is turned upright.
///
/// Other channels: grey is 0.299 R + 0.587 G + 0.114 B (rounded); RGB of grey repeats it; alpha is left away (not blended)
/// or starts at 255.
///
/// Throws DamagedImage when any part of the image is missing or wrong, and Error when the file cannot be read.
Tensor read_image(const std::string& path, ImageOptions options = {});
/// The same of the bytes of a file. `name` stands for them in messages.
Tensor decode_image(std::string_view bytes, const std::string& name = "image", ImageOptions options = {});
template <std::size_t N>
Tensor read_image(const std::string&, MistypedOptions<N>) = delete;  // no such option: see ImageOptions

/// A PNG file of a u8 image (height, width, channels) with 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha)
/// channels, on any device. Throws Error for any other tensor.
std::string encode_png(const Tensor& image);
/// Writes encode_png() to a file, which appears whole or not at all.
void write_png(const std::string& path, const Tensor& image);

}  // namespace potluck::data
