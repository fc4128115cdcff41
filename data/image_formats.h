#pragma once

// Internal: what each image format does behind data/image.h.

#include <cstdint>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace potluck::data {

/// Why a file cannot be read, with a full stop. read_image() makes it a DamagedImage.
struct DamageReport {
    std::string reason;
};

struct DecodedImage {
    Tensor image;         // u8 (height, width, channels as stored)
    int orientation = 1;  // of EXIF: 1 is upright; see upright()
};

bool is_png(std::string_view bytes);
bool is_jpeg(std::string_view bytes);
/// Both throw DamageReport.
DecodedImage decode_png(std::string_view bytes, std::int64_t most_pixels);
DecodedImage decode_jpeg(std::string_view bytes, std::int64_t most_pixels);

/// Throws DamageReport when an image is empty or has more than `most_pixels`.
void check_pixels(std::int64_t width, std::int64_t height, std::int64_t most_pixels);

/// The orientation (1 to 8) that EXIF data hold, a TIFF file that starts with II or MM; 1 when they hold none that is valid.
int exif_orientation(std::string_view exif);
/// The image as it is meant to be seen. Of `image`, row 0 and column 0 are, by EXIF 2.32, table 6: 1 top and left, 2 top
/// and right, 3 bottom and right, 4 bottom and left, 5 left and top, 6 right and top, 7 right and bottom, 8 left and bottom.
Tensor upright(const Tensor& image, int orientation);

}  // namespace potluck::data
