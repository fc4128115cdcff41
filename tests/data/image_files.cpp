#include "tests/data/image_files.h"

#include <png.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include <jpeglib.h>

namespace potluck::test {

std::string png_file(const PngSource& source) {
    std::string bytes;
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
    png_infop info = png_create_info_struct(png);
    png_set_write_fn(
        png, &bytes,
        [](png_structp writer, png_bytep data, std::size_t count) {
            static_cast<std::string*>(png_get_io_ptr(writer))
                ->append(reinterpret_cast<const char*>(data), count);
        },
        nullptr);
    png_set_IHDR(png, info, static_cast<png_uint_32>(source.width), static_cast<png_uint_32>(source.height),
                 source.bits, source.colour_type,
                 source.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
                 PNG_FILTER_TYPE_DEFAULT);
    std::vector<png_color> palette;
    for (std::size_t i = 0; i + 2 < source.palette.size(); i += 3)
        palette.push_back({source.palette[i], source.palette[i + 1], source.palette[i + 2]});
    if (!palette.empty()) png_set_PLTE(png, info, palette.data(), static_cast<int>(palette.size()));
    if (!source.transparency.empty())
        png_set_tRNS(png, info, source.transparency.data(), static_cast<int>(source.transparency.size()),
                     nullptr);
    if (!source.transparent.empty()) {
        png_color_16 colour{};
        const auto at = [&](std::size_t i) {
            return static_cast<png_uint_16>(source.transparent[i % source.transparent.size()]);
        };
        colour.gray = at(0);
        colour.red = at(0);
        colour.green = at(1);
        colour.blue = at(2);
        png_set_tRNS(png, info, nullptr, 0, &colour);
    }
    std::vector<png_byte> exif(source.exif.begin(), source.exif.end());
    if (!exif.empty()) png_set_eXIf_1(png, info, static_cast<png_uint_32>(exif.size()), exif.data());
    png_write_info(png, info);

    const std::size_t row_bytes = png_get_rowbytes(png, info);
    std::vector<png_byte> packed(row_bytes * static_cast<std::size_t>(source.height), 0);
    std::vector<png_bytep> rows;
    const std::size_t in_row = source.samples.size() / static_cast<std::size_t>(source.height);
    for (std::size_t y = 0; y < static_cast<std::size_t>(source.height); ++y) {
        png_bytep row = packed.data() + y * row_bytes;
        rows.push_back(row);
        for (std::size_t i = 0; i < in_row; ++i) {
            const int sample = source.samples[y * in_row + i];
            const std::size_t bit = i * static_cast<std::size_t>(source.bits);
            if (source.bits == 16) {
                row[2 * i] = static_cast<png_byte>(sample >> 8);
                row[2 * i + 1] = static_cast<png_byte>(sample & 255);
            } else {
                const int shift = 8 - source.bits - static_cast<int>(bit % 8);
                row[bit / 8] = static_cast<png_byte>(row[bit / 8] | (sample << shift));
            }
        }
    }
    png_write_image(png, rows.data());
    png_write_end(png, info);
    png_destroy_write_struct(&png, &info);
    return bytes;
}

std::string jpeg_file(const JpegSource& source) {
    jpeg_compress_struct jpeg{};
    jpeg_error_mgr errors{};
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    unsigned char* memory = nullptr;
    unsigned long size = 0;
    jpeg_mem_dest(&jpeg, &memory, &size);
    const std::int64_t channels = source.pixels.size(2);
    jpeg.image_height = static_cast<JDIMENSION>(source.pixels.size(0));
    jpeg.image_width = static_cast<JDIMENSION>(source.pixels.size(1));
    jpeg.input_components = static_cast<int>(channels);
    jpeg.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&jpeg);
    if (channels == 4) {
        jpeg_set_colorspace(&jpeg, source.ycck ? JCS_YCCK : JCS_CMYK);
        jpeg.write_Adobe_marker = source.adobe ? TRUE : FALSE;
    }
    jpeg_set_quality(&jpeg, source.quality, TRUE);
    if (!source.subsampled)
        for (int i = 0; i < jpeg.num_components; ++i)
            jpeg.comp_info[i].h_samp_factor = jpeg.comp_info[i].v_samp_factor = 1;
    if (source.progressive) jpeg_simple_progression(&jpeg);
    jpeg_start_compress(&jpeg, TRUE);
    if (!source.exif.empty()) {
        const std::string data = std::string("Exif\0\0", 6) + source.exif;
        jpeg_write_marker(&jpeg, JPEG_APP0 + 1, reinterpret_cast<const JOCTET*>(data.data()),
                          static_cast<unsigned>(data.size()));
    }
    const std::int64_t row_size = source.pixels.size(1) * channels;
    while (jpeg.next_scanline < jpeg.image_height) {
        JSAMPROW row = source.pixels.data<JSAMPLE>() + jpeg.next_scanline * row_size;
        jpeg_write_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_compress(&jpeg);
    std::string bytes(reinterpret_cast<const char*>(memory), size);
    jpeg_destroy_compress(&jpeg);
    std::free(memory);
    return bytes;
}

std::string exif_of(int orientation, bool little_endian) {
    std::string data = little_endian ? "II" : "MM";
    const auto put = [&](int value, int size) {
        for (int i = 0; i < size; ++i)
            data += static_cast<char>(value >> 8 * (little_endian ? i : size - 1 - i) & 255);
    };
    put(42, 2);
    put(8, 4);       // where the directory is
    put(1, 2);       // its entries
    put(0x0112, 2);  // orientation
    put(3, 2);       // of 16 bits
    put(1, 4);
    put(orientation, 2);
    put(0, 2);
    put(0, 4);
    return data;
}

Tensor smooth_image(std::int64_t height, std::int64_t width, std::int64_t channels) {
    Tensor image = Tensor::empty({height, width, channels}, {DType::u8});
    std::uint8_t* to = image.data<std::uint8_t>();
    for (std::int64_t y = 0; y < height; ++y)
        for (std::int64_t x = 0; x < width; ++x)
            for (std::int64_t c = 0; c < channels; ++c)
                *to++ = static_cast<std::uint8_t>(40 + 30 * c + (100 * y) / height * (c + 1) / 4 +
                                                  (90 * x) / width / (c + 1));
    return image;
}

TemporaryFolder::TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "potluck_images_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder");
    path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::string TemporaryFolder::write(const std::string& name, const std::string& bytes) const {
    const std::filesystem::path path = path_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream file(path, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file) throw std::runtime_error("cannot write " + path.string());
    return path.string();
}

}  // namespace potluck::test
