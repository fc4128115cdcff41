#include "data/image.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/format.h"
#include "core/safetensors.h"
#include "data/image_formats.h"

namespace potluck::data {

namespace {

void check_options(const ImageOptions& options) {
    if (options.channels != 0 && options.channels != 1 && options.channels != 3 && options.channels != 4)
        throw Error("image",
                    fmt::format("channels is {}. It must be 0 (as stored), 1, 3 or 4.", options.channels));
    if (options.most_pixels < 1)
        throw Error("image", fmt::format("most_pixels is {}. It must be at least 1.", options.most_pixels));
}

/// The image with other channels, as ImageOptions has them.
Tensor with_channels(const Tensor& image, std::int64_t channels) {
    const std::int64_t given = image.size(2);
    if (channels == 0 || channels == given) return image;
    Tensor result = Tensor::empty({image.size(0), image.size(1), channels}, {DType::u8});
    const std::uint8_t* from = image.data<std::uint8_t>();
    std::uint8_t* to = result.data<std::uint8_t>();
    const bool is_grey = given < 3, has_alpha = given == 2 || given == 4;
    for (std::int64_t i = 0; i < image.size(0) * image.size(1); ++i, from += given, to += channels) {
        if (channels == 1) {
            // 16 bits behind the point; the weights add up to 1.
            to[0] = is_grey ? from[0]
                            : static_cast<std::uint8_t>(
                                  (19595 * from[0] + 38470 * from[1] + 7471 * from[2] + 32768) >> 16);
            continue;
        }
        for (std::int64_t c = 0; c < 3; ++c) to[c] = from[is_grey ? 0 : c];
        if (channels == 4) to[3] = has_alpha ? from[given - 1] : 255;
    }
    return result;
}

std::string read_file(const std::string& path, std::int64_t most_pixels) {
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::error_code failure;
    if (!file || !std::filesystem::is_regular_file(path, failure))
        throw Error("image", fmt::format("cannot read {}: {}. Give an existing file.", path,
                                         errno != 0 ? std::strerror(errno) : "it is no file"));
    // At most 8 bytes a pixel, twice as many where they do not compress, and what a camera says about them.
    const std::uintmax_t size = std::filesystem::file_size(path, failure);
    constexpr std::uintmax_t most_metadata = 64 << 20;
    if (size > most_metadata && (size - most_metadata) / 16 > static_cast<std::uintmax_t>(most_pixels))
        throw DamagedImage(path, fmt::format("it has {} bytes, and most_pixels is {}.", size, most_pixels));
    std::string bytes(static_cast<std::size_t>(size), '\0');
    if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size())))
        throw Error("image", fmt::format("cannot read {}: {}.", path,
                                         errno != 0 ? std::strerror(errno) : "it became shorter meanwhile"));
    return bytes;
}

}  // namespace

DamagedImage::DamagedImage(const std::string& name, const std::string& reason)
    : Error("image", fmt::format("{}: {} Replace the file, or leave it out.", name, reason)),
      reason_(reason) {}

void check_pixels(std::int64_t width, std::int64_t height, std::int64_t most_pixels) {
    if (width < 1 || height < 1)
        throw DamageReport{fmt::format("it is damaged: it has {} x {} pixels.", width, height)};
    if (height > most_pixels / width)
        throw DamageReport{
            fmt::format("it has {} x {} pixels, and most_pixels is {}.", width, height, most_pixels)};
}

Tensor decode_image(std::string_view bytes, const std::string& name, ImageOptions options) {
    check_options(options);
    try {
        if (bytes.empty()) throw DamageReport{"the file is empty."};
        if (!is_png(bytes) && !is_jpeg(bytes))
            throw DamageReport{"it is neither a PNG nor a JPEG: it starts like neither of them."};
        const DecodedImage decoded =
            is_png(bytes) ? decode_png(bytes, options.most_pixels) : decode_jpeg(bytes, options.most_pixels);
        return upright(with_channels(decoded.image, options.channels), decoded.orientation);
    } catch (const DamageReport& damage) {
        throw DamagedImage(name, damage.reason);
    }
}

Tensor read_image(const std::string& path, ImageOptions options) {
    check_options(options);
    return decode_image(read_file(path, options.most_pixels), path, options);
}

void write_png(const std::string& path, const Tensor& image) {
    write_file_atomically(path, encode_png(image));
}

}  // namespace potluck::data
