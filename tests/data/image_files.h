#pragma once

// Image files of every kind, made by libpng and libjpeg themselves, and folders to put them in.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace potluck::test {

/// An image as a PNG stores it.
struct PngSource {
    std::int64_t width = 7, height = 5;
    int colour_type = 0;  // PNG_COLOR_TYPE_...
    int bits = 8;         // of a sample
    bool interlaced = false;
    std::vector<std::uint8_t> palette = {};       // red, green and blue of every entry
    std::vector<std::uint8_t> transparency = {};  // alpha of the palette's entries
    std::vector<int> transparent = {};            // grey, or red, green and blue, that is transparent
    std::string exif = {};
    std::vector<int> samples = {};  // row by row, of all channels
};
std::string png_file(const PngSource& source);

struct JpegSource {
    Tensor pixels;  // u8 (height, width, channels): grey, RGB or CMYK by the number of channels
    int quality = 100;
    bool progressive = false;
    bool subsampled = false;  // colours at half the resolution
    bool adobe = true;        // of CMYK: with Adobe's mark
    bool ycck = false;        // CMYK as luma, chroma and black
    std::string exif = {};
};
std::string jpeg_file(const JpegSource& source);

/// EXIF data that hold nothing but an orientation.
std::string exif_of(int orientation, bool little_endian);

/// A smooth u8 image (height, width, channels), which JPEG keeps nearly as it is. Every channel has another slope.
Tensor smooth_image(std::int64_t height, std::int64_t width, std::int64_t channels);

/// A folder of its own for one test, which goes with it.
class TemporaryFolder {
public:
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    const std::filesystem::path& path() const { return path_; }
    /// Writes a file below the folder, and the folders on the way. Returns its path.
    std::string write(const std::string& name, const std::string& bytes) const;

private:
    std::filesystem::path path_;
};

}  // namespace potluck::test
