// JPEG, by libjpeg-turbo.

#include <csetjmp>
#include <cstddef>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include "core/format.h"
#include "data/image_formats.h"

namespace potluck::data {

namespace {

constexpr int most_scans =
    500;  // of a progressive image; a few are usual, and each costs as much as an image

/// libjpeg tells of errors by a function that must not return: it jumps out of run().
class JpegReader {
public:
    explicit JpegReader(std::string_view bytes) : bytes_(bytes) {
        jpeg_.err = jpeg_std_error(&errors_);
        errors_.error_exit = on_error;
        errors_.emit_message = on_message;
        jpeg_.client_data = this;
    }
    ~JpegReader() { jpeg_destroy_decompress(&jpeg_); }
    JpegReader(const JpegReader&) = delete;
    JpegReader& operator=(const JpegReader&) = delete;

    DecodedImage read(std::int64_t most_pixels) {
        require(run([this] { read_header(); }));
        check_size(most_pixels);
        require(run([this] {
            progress_.progress_monitor = on_progress;
            jpeg_.progress = &progress_;
            jpeg_.out_color_space = wanted_colours();
            jpeg_start_decompress(&jpeg_);
        }));
        DecodedImage decoded;
        decoded.orientation = orientation();  // now, as libjpeg forgets the markers at the end
        const std::int64_t height = jpeg_.output_height, width = jpeg_.output_width;
        const std::int64_t channels = jpeg_.output_components;
        decoded.image = Tensor::empty({height, width, channels}, {DType::u8});
        JSAMPLE* const pixels = decoded.image.data<JSAMPLE>();
        require(run([this, pixels, row_size = width * channels] {
            while (jpeg_.output_scanline < jpeg_.output_height) {
                JSAMPROW row = pixels + static_cast<std::int64_t>(jpeg_.output_scanline) * row_size;
                jpeg_read_scanlines(&jpeg_, &row, 1);
            }
            jpeg_finish_decompress(&jpeg_);
        }));
        if (channels == 4) decoded.image = rgb_of_cmyk(decoded.image);
        return decoded;
    }

private:
    template <class Calls>
    bool run(Calls&& calls) {
        if (setjmp(jump_) != 0) return false;
        calls();
        return true;
    }

    void require(bool succeeded) const {
        if (!succeeded) throw DamageReport{fmt::format("the JPEG is damaged: {}.", failure_)};
    }

    static JpegReader& reader(j_common_ptr jpeg) { return *static_cast<JpegReader*>(jpeg->client_data); }

    [[noreturn]] static void on_error(j_common_ptr jpeg) {
        JpegReader& self = reader(jpeg);
        jpeg->err->format_message(jpeg, self.failure_);
        std::longjmp(self.jump_, 1);
    }

    /// libjpeg fills up what is missing with grey and warns of it.
    static void on_message(j_common_ptr jpeg, int level) {
        const int code = jpeg->err->msg_code;
        const bool leaves_pixels_whole = code == JWRN_EXTRANEOUS_DATA || code == JWRN_ADOBE_XFORM;
        if (level < 0 && !leaves_pixels_whole) on_error(jpeg);
    }

    static void on_progress(j_common_ptr jpeg) {
        JpegReader& self = reader(jpeg);
        if (self.jpeg_.input_scan_number <= most_scans) return;
        std::snprintf(self.failure_, sizeof self.failure_, "it has more than %d scans", most_scans);
        std::longjmp(self.jump_, 1);
    }

    void read_header() {
        jpeg_create_decompress(&jpeg_);
        jpeg_.client_data = this;
        jpeg_mem_src(&jpeg_, reinterpret_cast<const unsigned char*>(bytes_.data()),
                     static_cast<unsigned long>(bytes_.size()));
        jpeg_save_markers(&jpeg_, JPEG_APP0 + 1, 0xFFFF);
        jpeg_read_header(&jpeg_, TRUE);
    }

    /// Refuses an image that is too large, or of which the file can hold only a part.
    void check_size(std::int64_t most_pixels) const {
        const std::int64_t width = jpeg_.image_width, height = jpeg_.image_height;
        check_pixels(width, height, most_pixels);
        // Every block of 8 x 8 takes at least one bit of a Huffman code, and where components are subsampled there is one
        // block for 4 x 4 blocks of pixels or more.
        constexpr std::int64_t most_pixels_of_byte = std::int64_t{8} * 64 * 16;
        if (jpeg_.arith_code == FALSE &&
            width * height / most_pixels_of_byte > static_cast<std::int64_t>(bytes_.size()))
            throw DamageReport{
                fmt::format("the JPEG is damaged: it says that it has {} x {} pixels, and the file has {} "
                            "bytes.",
                            width, height, bytes_.size())};
    }

    J_COLOR_SPACE wanted_colours() const {
        if (jpeg_.num_components == 1) return JCS_GRAYSCALE;
        return jpeg_.num_components == 4 ? JCS_CMYK : JCS_RGB;
    }

    int orientation() const {
        constexpr std::string_view start("Exif\0\0", 6);
        for (jpeg_saved_marker_ptr marker = jpeg_.marker_list; marker != nullptr; marker = marker->next) {
            const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
            if (data.starts_with(start)) return exif_orientation(data.substr(start.size()));
        }
        return 1;
    }

    /// Adobe's programs, which leave a mark, store 255 - C and so on.
    Tensor rgb_of_cmyk(const Tensor& cmyk) const {
        Tensor rgb = Tensor::empty({cmyk.size(0), cmyk.size(1), 3}, {DType::u8});
        const int inverted = jpeg_.saw_Adobe_marker == FALSE ? 255 : 0;
        const std::uint8_t* from = cmyk.data<std::uint8_t>();
        std::uint8_t* to = rgb.data<std::uint8_t>();
        for (std::int64_t i = 0; i < cmyk.size(0) * cmyk.size(1); ++i, from += 4)
            for (int c = 0; c < 3; ++c) {
                const int light = (from[c] ^ inverted) * (from[3] ^ inverted);  // 255 - x is x ^ 255
                *to++ = static_cast<std::uint8_t>((light + 127) / 255);
            }
        return rgb;
    }

    std::string_view bytes_;
    jpeg_decompress_struct jpeg_{};
    jpeg_error_mgr errors_{};
    jpeg_progress_mgr progress_{};
    std::jmp_buf jump_{};
    char failure_[JMSG_LENGTH_MAX]{};
};

}  // namespace

bool is_jpeg(std::string_view bytes) { return bytes.starts_with("\xFF\xD8\xFF"); }

DecodedImage decode_jpeg(std::string_view bytes, std::int64_t most_pixels) {
    return JpegReader(bytes).read(most_pixels);
}

}  // namespace potluck::data
