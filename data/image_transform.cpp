#include "data/image_transform.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/format.h"

namespace potluck::data {

namespace {

/// A u8 image on the CPU without gaps. Throws Error for any other tensor.
Tensor checked(const char* op, const Tensor& image) {
    if (!image.defined() || image.ndim() != 3 || image.dtype() != DType::u8 || !image.device().is_cpu() ||
        image.count() == 0 || !image.is_contiguous())
        throw Error(op,
                    fmt::format("the image is {}. Give a contiguous u8 tensor (height, width, channels) on "
                                "the CPU.",
                                image.defined() ? fmt::format("{} of {} on {}", pretty(image.shape()),
                                                              image.dtype(), image.device())
                                                : "an undefined tensor"));
    return image;
}

void check_size(const char* op, ImageSize size) {
    constexpr std::int64_t most = 1 << 20;
    if (size.height < 1 || size.width < 1 || size.height > most || size.width > most)
        throw Error(op, fmt::format("the size is {} x {}. Both must be from 1 to {}.", size.height,
                                    size.width, most));
}

/// Which old pixels a new one is made of.
struct Taps {
    std::int64_t first = 0;
    std::vector<float> weights;
};

std::vector<Taps> taps_of(std::int64_t old_size, std::int64_t new_size) {
    const double scale = static_cast<double>(old_size) / static_cast<double>(new_size);
    const double reach = std::max(scale, 1.0);
    std::vector<Taps> all(static_cast<std::size_t>(new_size));
    for (std::int64_t i = 0; i < new_size; ++i) {
        const double centre = (static_cast<double>(i) + 0.5) * scale;
        const auto first = std::max<std::int64_t>(static_cast<std::int64_t>(std::floor(centre - reach)), 0);
        const auto end =
            std::min<std::int64_t>(static_cast<std::int64_t>(std::ceil(centre + reach)), old_size);
        std::vector<double> weights;
        double sum = 0.0;
        for (std::int64_t pixel = first; pixel < end; ++pixel) {
            weights.push_back(
                std::max(0.0, 1.0 - std::abs(static_cast<double>(pixel) + 0.5 - centre) / reach));
            sum += weights.back();
        }
        Taps& taps = all[static_cast<std::size_t>(i)];
        taps.first = first;
        for (const double weight : weights) taps.weights.push_back(static_cast<float>(weight / sum));
    }
    return all;
}

/// One row (old width, channels) to (new width, channels).
void resize_row(const std::uint8_t* from, const std::vector<Taps>& taps, std::int64_t channels, float* to) {
    for (const Taps& tap : taps)
        for (std::int64_t c = 0; c < channels; ++c) {
            float sum = 0.0F;
            const std::uint8_t* pixel = from + tap.first * channels + c;
            for (const float weight : tap.weights) {
                sum += weight * static_cast<float>(*pixel);
                pixel += channels;
            }
            *to++ = sum;
        }
}

/// For every channel, what becomes of each value of a pixel.
using Table = std::array<float, 256>;

std::vector<Table> tables_of(const char* op, std::int64_t channels, const std::vector<double>& mean,
                             const std::vector<double>& stddev) {
    for (const auto& [name, list] : {std::pair("mean", &mean), std::pair("stddev", &stddev)})
        if (!list->empty() && static_cast<std::int64_t>(list->size()) != channels)
            throw Error(op, fmt::format("{} has {} numbers for an image of {} channels. Give one each.", name,
                                        list->size(), channels));
    std::vector<Table> tables(static_cast<std::size_t>(channels));
    for (std::size_t c = 0; c < tables.size(); ++c)
        for (std::size_t value = 0; value < tables[c].size(); ++value)
            tables[c][value] =
                static_cast<float>((static_cast<double>(value) / 255.0 - (mean.empty() ? 0.0 : mean[c])) /
                                   (stddev.empty() ? 1.0 : stddev[c]));
    return tables;
}

void check_normalization(const char* op, const std::vector<double>& mean, const std::vector<double>& stddev) {
    for (const double number : mean)
        if (!std::isfinite(number)) throw Error(op, fmt::format("a mean is {}. It must be finite.", number));
    for (const double number : stddev)
        if (!(number > 0.0) || std::isinf(number))
            throw Error(op, fmt::format("a stddev is {}. It must be finite and above 0.", number));
}

/// A number from 0 to `most`, from a random one.
std::int64_t scaled(std::uint32_t random, std::int64_t most) {
    return static_cast<std::int64_t>(random * (static_cast<std::uint64_t>(most) + 1) >> 32);
}

}  // namespace

Tensor resize_image(const Tensor& given, ImageSize size) {
    const Tensor image = checked("resize_image", given);
    check_size("resize_image", size);
    const std::int64_t height = image.size(0), width = image.size(1), channels = image.size(2);
    if (ImageSize(height, width) == size) return image;
    const std::vector<Taps> columns = taps_of(width, size.width), rows = taps_of(height, size.height);
    const std::int64_t row_size = size.width * channels;
    std::vector<float> narrow(
        static_cast<std::size_t>(height * row_size));  // (old height, new width, channels)
    const std::uint8_t* pixels = image.data<std::uint8_t>();
    for (std::int64_t y = 0; y < height; ++y)
        resize_row(pixels + y * width * channels, columns, channels, narrow.data() + y * row_size);

    Tensor result = Tensor::empty({size.height, size.width, channels}, {DType::u8});
    std::uint8_t* to = result.data<std::uint8_t>();
    std::vector<float> sums(static_cast<std::size_t>(row_size));
    for (const Taps& tap : rows) {
        std::fill(sums.begin(), sums.end(), 0.0F);
        const float* row = narrow.data() + tap.first * row_size;
        for (const float weight : tap.weights) {
            for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += weight * row[i];
            row += row_size;
        }
        for (const float sum : sums) *to++ = static_cast<std::uint8_t>(std::min(sum + 0.5F, 255.0F));
    }
    return result;
}

Tensor crop_image(const Tensor& given, std::int64_t first_row, std::int64_t first_column, ImageSize size) {
    const Tensor image = checked("crop_image", given);
    check_size("crop_image", size);
    const std::int64_t height = image.size(0), width = image.size(1), channels = image.size(2);
    Tensor result = Tensor::empty({size.height, size.width, channels}, {DType::u8});
    std::uint8_t* to = result.data<std::uint8_t>();
    const std::uint8_t* from = image.data<std::uint8_t>();
    std::memset(to, 0, static_cast<std::size_t>(result.bytes()));
    constexpr std::int64_t far = std::int64_t{1} << 40;  // from where on nothing of an image can be seen
    first_row = std::clamp(first_row, -far, far);
    first_column = std::clamp(first_column, -far, far);
    const std::int64_t left = std::clamp<std::int64_t>(-first_column, 0, size.width);
    const std::int64_t right = std::clamp<std::int64_t>(width - first_column, left, size.width);
    if (left == right) return result;
    for (std::int64_t y = 0; y < size.height; ++y) {
        const std::int64_t row = first_row + y;
        if (row < 0 || row >= height) continue;
        std::memcpy(to + (y * size.width + left) * channels,
                    from + (row * width + first_column + left) * channels,
                    static_cast<std::size_t>((right - left) * channels));
    }
    return result;
}

Tensor flip_image(const Tensor& given) {
    const Tensor image = checked("flip_image", given);
    const std::int64_t width = image.size(1), channels = image.size(2);
    Tensor result = Tensor::empty(image.shape(), {DType::u8});
    std::uint8_t* to = result.data<std::uint8_t>();
    const std::uint8_t* row = image.data<std::uint8_t>();
    for (std::int64_t y = 0; y < image.size(0); ++y, row += width * channels)
        for (std::int64_t x = width - 1; x >= 0; --x)
            for (std::int64_t c = 0; c < channels; ++c) *to++ = row[x * channels + c];
    return result;
}

Tensor normalize_image(const Tensor& given, const std::vector<double>& mean,
                       const std::vector<double>& stddev) {
    const Tensor image = checked("normalize_image", given);
    check_normalization("normalize_image", mean, stddev);
    const std::int64_t pixels = image.size(0) * image.size(1), channels = image.size(2);
    const std::vector<Table> tables = tables_of("normalize_image", channels, mean, stddev);
    Tensor result = Tensor::empty({channels, image.size(0), image.size(1)});
    float* to = result.data<float>();
    for (std::int64_t c = 0; c < channels; ++c) {
        const Table& table = tables[static_cast<std::size_t>(c)];
        const std::uint8_t* from = image.data<std::uint8_t>() + c;
        for (std::int64_t i = 0; i < pixels; ++i) *to++ = table[from[i * channels]];
    }
    return result;
}

ImageTransform::ImageTransform(ImageTransformOptions options) : options_(std::move(options)) {
    const char* const op = "ImageTransform";
    if (options_.resize != ImageSize()) check_size(op, options_.resize);
    if (options_.crop != ImageSize()) check_size(op, options_.crop);
    constexpr std::int64_t most_padding = 1 << 20;
    if (options_.padding < 0 || options_.padding > most_padding)
        throw Error(op,
                    fmt::format("padding is {}. It must be from 0 to {}.", options_.padding, most_padding));
    if (options_.random_crop && options_.crop == ImageSize())
        throw Error(op, "random_crop is set and crop is not. Say how large the part is to be.");
    if (!(options_.flip >= 0.0 && options_.flip <= 1.0))
        throw Error(op, fmt::format("flip is {}. A probability is from 0 to 1.", options_.flip));
    check_normalization(op, options_.mean, options_.stddev);
}

Tensor ImageTransform::operator()(const Tensor& given, RandomKey key) const {
    const auto random = philox(key, 0);  // row, column, flip
    Tensor image = checked("ImageTransform", given);
    if (options_.resize != ImageSize()) image = resize_image(image, options_.resize);
    const std::int64_t padding = options_.padding;
    const ImageSize padded(image.size(0) + 2 * padding, image.size(1) + 2 * padding);
    const ImageSize size = options_.crop == ImageSize() ? padded : options_.crop;
    const std::int64_t rows_left = padded.height - size.height, columns_left = padded.width - size.width;
    if (rows_left < 0 || columns_left < 0)
        throw Error("ImageTransform",
                    fmt::format("the crop of {} x {} is larger than the image, which is {} x {} with its "
                                "padding. Resize it before, pad it, or crop less.",
                                size.height, size.width, padded.height, padded.width));
    if (padding > 0 || options_.crop != ImageSize()) {
        const bool random_place = options_.random_crop;
        const std::int64_t row = random_place ? scaled(random[0], rows_left) : rows_left / 2;
        const std::int64_t column = random_place ? scaled(random[1], columns_left) : columns_left / 2;
        image = crop_image(image, row - padding, column - padding, size);
    }
    if (std::ldexp(random[2], -32) < options_.flip) image = flip_image(image);
    return normalize_image(image, options_.mean, options_.stddev);
}

}  // namespace potluck::data
