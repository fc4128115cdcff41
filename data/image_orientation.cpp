// Which way up an image is.

#include <array>
#include <cstring>

#include "data/image_formats.h"

namespace potluck::data {

namespace {

/// Numbers of a TIFF file, which says itself in which order their bytes are.
class Tiff {
public:
    explicit Tiff(std::string_view bytes) : bytes_(bytes), is_little_(bytes.starts_with("II")) {}

    /// The number of `size` bytes at a place; 0 where the file ends before.
    std::uint32_t number(std::size_t at, std::size_t size) const {
        if (at > bytes_.size() || size > bytes_.size() - at) return 0;
        std::uint32_t value = 0;
        for (std::size_t i = 0; i < size; ++i)
            value = value << 8 | static_cast<std::uint8_t>(bytes_[at + (is_little_ ? size - 1 - i : i)]);
        return value;
    }

private:
    std::string_view bytes_;
    bool is_little_;
};

}  // namespace

int exif_orientation(std::string_view exif) {
    constexpr std::uint32_t magic = 42, orientation_tag = 0x0112, short_type = 3;
    if (!exif.starts_with("II") && !exif.starts_with("MM")) return 1;
    const Tiff tiff(exif);
    if (tiff.number(2, 2) != magic) return 1;
    const std::size_t directory = tiff.number(4, 4);
    const std::size_t entries = tiff.number(directory, 2);
    for (std::size_t i = 0; i < entries; ++i) {
        const std::size_t entry = directory + 2 + 12 * i;
        if (tiff.number(entry, 2) != orientation_tag || tiff.number(entry + 2, 2) != short_type) continue;
        const std::uint32_t orientation = tiff.number(entry + 8, 2);
        return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
    }
    return 1;
}

Tensor upright(const Tensor& image, int orientation) {
    if (orientation == 1) return image;
    const std::int64_t height = image.size(0), width = image.size(1), channels = image.size(2);
    const bool is_turned = orientation >= 5;  // rows are columns
    Tensor result = is_turned ? Tensor::empty({width, height, channels}, {DType::u8})
                              : Tensor::empty({height, width, channels}, {DType::u8});
    const bool rows_backwards = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
    const bool columns_backwards =
        orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
    std::uint8_t* to = result.data<std::uint8_t>();
    const std::uint8_t* from = image.data<std::uint8_t>();
    for (std::int64_t y = 0; y < result.size(0); ++y)
        for (std::int64_t x = 0; x < result.size(1); ++x, to += channels) {
            const std::int64_t shown_row = rows_backwards ? result.size(0) - 1 - y : y;
            const std::int64_t shown_column = columns_backwards ? result.size(1) - 1 - x : x;
            const std::int64_t row = is_turned ? shown_column : shown_row;
            const std::int64_t column = is_turned ? shown_row : shown_column;
            std::memcpy(to, from + (row * width + column) * channels, static_cast<std::size_t>(channels));
        }
    return result;
}

}  // namespace potluck::data
