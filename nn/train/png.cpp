#include "nn/train/png.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "core/format.h"

namespace potluck {
namespace {

std::string big_endian(std::uint32_t number) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift & 0xff);
    return bytes;
}

/// CRC-32 as in ISO 3309, which PNG demands.
std::uint32_t crc32(std::string_view bytes) {
    std::uint32_t crc = ~0U;
    for (const char byte : bytes) {
        crc ^= static_cast<unsigned char>(byte);
        for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0xedb88320U : crc >> 1;
    }
    return ~crc;
}

std::uint32_t adler32(std::string_view bytes) {
    constexpr std::uint32_t prime = 65521;
    std::uint32_t sum = 1, sum_of_sums = 0;
    for (const char byte : bytes) {
        sum = (sum + static_cast<unsigned char>(byte)) % prime;
        sum_of_sums = (sum_of_sums + sum) % prime;
    }
    return sum_of_sums << 16 | sum;
}

std::string chunk(const std::string& type, const std::string& content) {
    return big_endian(static_cast<std::uint32_t>(content.size())) + type + content +
           big_endian(crc32(type + content));
}

/// A zlib stream of stored blocks.
std::string stored(const std::string& bytes) {
    constexpr std::size_t largest = 65535;
    std::string stream = "\x78\x01";
    for (std::size_t start = 0; start < bytes.size(); start += largest) {
        const std::size_t length = std::min(largest, bytes.size() - start);
        const bool is_last = start + length == bytes.size();
        stream += static_cast<char>(is_last ? 1 : 0);
        for (const std::size_t half : {length, ~length}) {
            stream += static_cast<char>(half & 0xff);
            stream += static_cast<char>(half >> 8 & 0xff);
        }
        stream.append(bytes, start, length);
    }
    return stream + big_endian(adler32(bytes));
}

}  // namespace

std::string png_of(const Tensor& image) {
    constexpr std::int64_t longest = 1 << 16;
    const bool fits = image.defined() && image.dtype() == DType::u8 && image.ndim() == 3 &&
                      (image.size(2) == 1 || image.size(2) == 3 || image.size(2) == 4) && image.size(0) > 0 &&
                      image.size(0) <= longest && image.size(1) > 0 && image.size(1) <= longest;
    if (!fits)
        throw Error("report",
                    fmt::format("a picture is {} {}. It must be u8 (height, width, channels) with 1, 3 "
                                "or 4 channels.",
                                image.defined() ? name_of(image.dtype()) : std::string("undefined"),
                                image.defined() ? pretty(image.shape()) : std::string()));
    const std::vector<std::uint8_t> values = image.to_vector<std::uint8_t>();
    const auto row_bytes = static_cast<std::size_t>(image.size(1) * image.size(2));
    std::string rows;
    for (std::size_t start = 0; start < values.size(); start += row_bytes) {
        rows += '\0';  // the row as it is, without a filter
        rows.append(reinterpret_cast<const char*>(values.data()) + start, row_bytes);
    }
    const char kind = image.size(2) == 1 ? 0 : image.size(2) == 3 ? 2 : 6;
    const std::string header = big_endian(static_cast<std::uint32_t>(image.size(1))) +
                               big_endian(static_cast<std::uint32_t>(image.size(0))) + '\x08' + kind +
                               std::string(3, '\0');
    return "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("IDAT", stored(rows)) + chunk("IEND", "");
}

std::string base64(const std::string& bytes) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t three = 0;
        for (std::size_t j = 0; j < 3; ++j)
            three = three << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
        for (std::size_t j = 0; j < 4; ++j)
            text += i + j > bytes.size() ? '=' : digits[three >> (18 - 6 * j) & 63];
    }
    return text;
}

}  // namespace potluck
