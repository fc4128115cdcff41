// PNG, by libpng.

#include <png.h>

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/format.h"
#include "data/image.h"
#include "data/image_formats.h"

namespace potluck::data {

namespace {

/// What reading and writing share. libpng tells of errors by a function that must not return: it jumps out of run().
class PngBase {
public:
    PngBase(const PngBase&) = delete;
    PngBase& operator=(const PngBase&) = delete;

protected:
    PngBase() = default;
    ~PngBase() = default;

    /// Runs calls of libpng. False when one failed; failure() says why. What `calls` itself makes must need no destructor.
    template <class Calls>
    bool run(Calls&& calls) {
        if (setjmp(jump_) != 0) return false;
        calls();
        return true;
    }
    const char* failure() const { return failure_.data(); }

    [[noreturn]] static void on_error(png_structp png, png_const_charp text) {
        auto* const self = static_cast<PngBase*>(png_get_error_ptr(png));
        std::snprintf(self->failure_.data(), self->failure_.size(), "%s", text);
        std::longjmp(self->jump_, 1);
    }
    /// libpng warns of what leaves the pixels as they are, such as a damaged comment.
    static void on_warning(png_structp, png_const_charp) {}

private:
    std::jmp_buf jump_{};
    std::array<char, 200> failure_{};
};

class PngReader : PngBase {
public:
    explicit PngReader(std::string_view bytes) : bytes_(bytes) {}
    ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
    PngReader(const PngReader&) = delete;
    PngReader& operator=(const PngReader&) = delete;

    DecodedImage read(std::int64_t most_pixels) {
        require(run([this] { read_header(); }));
        check_size(most_pixels);
        require(run([this] { ask_for_bytes(); }));
        DecodedImage decoded;
        decoded.image = Tensor::empty({height_, width_, channels_}, {DType::u8});
        std::vector<png_bytep> rows;
        for (std::int64_t y = 0; y < height_; ++y)
            rows.push_back(decoded.image.data<png_byte>() + y * width_ * channels_);
        require(run([this, &rows] {
            png_read_image(png_, rows.data());
            png_read_end(png_, info_);
        }));
        decoded.orientation = orientation();
        return decoded;
    }

private:
    void require(bool succeeded) const {
        if (!succeeded) throw DamageReport{fmt::format("the PNG is damaged: {}.", failure())};
    }

    static void on_read(png_structp png, png_bytep to, std::size_t count) {
        auto* const self = static_cast<PngReader*>(png_get_io_ptr(png));
        if (count > self->bytes_.size() - self->position_) png_error(png, "the file ends too early");
        std::memcpy(to, self->bytes_.data() + self->position_, count);
        self->position_ += count;
    }

    void read_header() {
        png_ =
            png_create_read_struct(PNG_LIBPNG_VER_STRING, static_cast<PngBase*>(this), on_error, on_warning);
        if (png_ == nullptr) return;
        info_ = png_create_info_struct(png_);
        png_set_read_fn(png_, this, on_read);
        png_set_user_limits(png_, 0x7FFFFFFF, 0x7FFFFFFF);  // check_size() has another limit
        png_read_info(png_, info_);
        width_ = png_get_image_width(png_, info_);
        height_ = png_get_image_height(png_, info_);
        stored_bits_ = std::int64_t{png_get_bit_depth(png_, info_)} * png_get_channels(png_, info_);
    }

    void ask_for_bytes() {
        png_set_expand(png_);  // palettes, small grey, and transparent colours
        png_set_scale_16(png_);
        png_set_interlace_handling(png_);
        png_read_update_info(png_, info_);  // takes memory for two rows
        channels_ = png_get_channels(png_, info_);
    }

    /// Refuses an image that is too large, or of which the file can hold only a part.
    void check_size(std::int64_t most_pixels) const {
        if (png_ == nullptr || info_ == nullptr) throw DamageReport{"there is no memory to read it."};
        check_pixels(width_, height_, most_pixels);
        constexpr std::int64_t most_compression = 1032;  // of DEFLATE
        const std::int64_t row_bytes = (width_ * stored_bits_ + 7) / 8;
        if (row_bytes * height_ / most_compression > static_cast<std::int64_t>(bytes_.size()))
            throw DamageReport{fmt::format(
                "the PNG is damaged: it says that it has {} x {} pixels, and the file has {} bytes.", width_,
                height_, bytes_.size())};
    }

    int orientation() {
        png_uint_32 size = 0;
        png_bytep exif = nullptr;
        if (!run([&] { png_get_eXIf_1(png_, info_, &size, &exif); }) || exif == nullptr) return 1;
        return exif_orientation({reinterpret_cast<const char*>(exif), size});
    }

    std::string_view bytes_;
    std::size_t position_ = 0;
    png_structp png_ = nullptr;
    png_infop info_ = nullptr;
    std::int64_t width_ = 0, height_ = 0, channels_ = 0, stored_bits_ = 0;
};

class PngWriter : PngBase {
public:
    PngWriter() = default;
    ~PngWriter() { png_destroy_write_struct(&png_, &info_); }
    PngWriter(const PngWriter&) = delete;
    PngWriter& operator=(const PngWriter&) = delete;

    /// Of a contiguous image on the CPU.
    std::string write(const Tensor& image) {
        constexpr std::array<int, 4> colour_types = {PNG_COLOR_TYPE_GRAY, PNG_COLOR_TYPE_GRAY_ALPHA,
                                                     PNG_COLOR_TYPE_RGB, PNG_COLOR_TYPE_RGB_ALPHA};
        const auto height = static_cast<png_uint_32>(image.size(0));
        const auto width = static_cast<png_uint_32>(image.size(1));
        const auto channels = static_cast<std::size_t>(image.size(2));
        const int colour_type = colour_types[channels - 1];
        png_const_bytep row = image.data<png_byte>();
        const bool succeeded = run([&] {
            png_ = png_create_write_struct(PNG_LIBPNG_VER_STRING, static_cast<PngBase*>(this), on_error,
                                           on_warning);
            if (png_ == nullptr) return;
            info_ = png_create_info_struct(png_);
            png_set_write_fn(png_, this, on_write, nullptr);
            png_set_IHDR(png_, info_, width, height, 8, colour_type, PNG_INTERLACE_NONE,
                         PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
            png_write_info(png_, info_);
            for (png_uint_32 y = 0; y < height; ++y) png_write_row(png_, row + y * channels * width);
            png_write_end(png_, info_);
        });
        if (!succeeded || png_ == nullptr)
            throw Error("encode_png", fmt::format("libpng failed: {}.", failure()));
        return std::move(bytes_);
    }

private:
    static void on_write(png_structp png, png_bytep from, std::size_t count) {
        auto* const self = static_cast<PngWriter*>(png_get_io_ptr(png));
        bool has_memory = true;
        try {
            self->bytes_.append(reinterpret_cast<const char*>(from), count);
        } catch (const std::exception&) {
            has_memory = false;
        }
        if (!has_memory) png_error(png, "there is no memory");
    }

    std::string bytes_;
    png_structp png_ = nullptr;
    png_infop info_ = nullptr;
};

}  // namespace

bool is_png(std::string_view bytes) { return bytes.starts_with("\x89PNG\r\n\x1a\n"); }

DecodedImage decode_png(std::string_view bytes, std::int64_t most_pixels) {
    return PngReader(bytes).read(most_pixels);
}

std::string encode_png(const Tensor& image) {
    constexpr std::int64_t most = 0x7FFFFFFF;
    if (!image.defined() || image.ndim() != 3 || image.dtype() != DType::u8 || image.size(2) < 1 ||
        image.size(2) > 4 || image.size(0) < 1 || image.size(1) < 1 || image.size(0) > most ||
        image.size(1) > most)
        throw Error("encode_png", fmt::format("the image is {}. Give a u8 tensor (height, width, channels) "
                                              "with 1 to 4 channels.",
                                              image.defined() ? fmt::format("{} of {}", pretty(image.shape()),
                                                                            image.dtype())
                                                              : "an undefined tensor"));
    const std::vector<std::uint8_t> pixels = image.to_vector<std::uint8_t>();
    const Tensor rows = Tensor::empty(image.shape(), {DType::u8});
    std::memcpy(rows.raw_data(), pixels.data(), pixels.size());
    return PngWriter().write(rows);
}

}  // namespace potluck::data
