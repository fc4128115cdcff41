#include "data/image.h"

#include <doctest/doctest.h>
#include <png.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "core/factories.h"
#include "tests/data/image_files.h"
#include "tests/expect_error.h"

using namespace potluck;
using data::decode_image;
using potluck::test::contains;
using potluck::test::error_of;
using potluck::test::JpegSource;
using potluck::test::PngSource;
using Bytes = std::vector<std::uint8_t>;

namespace {

Bytes bytes_of(const Tensor& image) { return image.to_vector<std::uint8_t>(); }

std::vector<int> random_samples(std::int64_t count, int below, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int> samples;
    for (std::int64_t i = 0; i < count; ++i)
        samples.push_back(static_cast<int>(random() % static_cast<unsigned>(below)));
    return samples;
}

/// The same images at most `tolerance` apart.
void check_close(const Tensor& image, const Tensor& expected, int tolerance) {
    REQUIRE(image.shape() == expected.shape());
    const Bytes a = bytes_of(image), b = bytes_of(expected);
    int furthest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) furthest = std::max(furthest, std::abs(a[i] - b[i]));
    CHECK(furthest <= tolerance);
}

}  // namespace

TEST_CASE("image: PNG of every colour type, depth and order of rows") {
    for (const bool interlaced : {false, true})
        for (const auto& [colour_type, channels] :
             {std::pair(PNG_COLOR_TYPE_GRAY, 1), std::pair(PNG_COLOR_TYPE_GRAY_ALPHA, 2),
              std::pair(PNG_COLOR_TYPE_RGB, 3), std::pair(PNG_COLOR_TYPE_RGB_ALPHA, 4)})
            for (const int bits : {1, 2, 4, 8, 16}) {
                if (bits < 8 && colour_type != PNG_COLOR_TYPE_GRAY) continue;
                CAPTURE(colour_type);
                CAPTURE(bits);
                CAPTURE(interlaced);
                PngSource source{.colour_type = colour_type, .bits = bits, .interlaced = interlaced};
                source.samples = random_samples(source.width * source.height * channels, 1 << bits, 7);
                const Tensor image = decode_image(test::png_file(source));
                REQUIRE(image.shape() == Shape{source.height, source.width, channels});
                CHECK(image.dtype() == DType::u8);
                Bytes expected;
                for (const int sample : source.samples)
                    expected.push_back(static_cast<std::uint8_t>(
                        bits == 16 ? (sample + 128) / 257 : sample * 255 / ((1 << bits) - 1)));
                CHECK(bytes_of(image) == expected);
            }
}

TEST_CASE("image: PNG with a palette, and with colours that are transparent") {
    for (const int bits : {1, 2, 4, 8})
        for (const bool transparent : {false, true}) {
            PngSource source{.colour_type = PNG_COLOR_TYPE_PALETTE, .bits = bits};
            const std::size_t entries = std::size_t{1} << bits;
            for (std::size_t i = 0; i < 3 * entries; ++i)
                source.palette.push_back(static_cast<std::uint8_t>(37 * i + 11));
            if (transparent) source.transparency = {9, 200};  // the others are opaque
            source.samples = random_samples(source.width * source.height, static_cast<int>(entries), 3);
            const Tensor image = decode_image(test::png_file(source));
            REQUIRE(image.shape() == Shape{source.height, source.width, transparent ? 4 : 3});
            Bytes expected;
            for (const int sample : source.samples) {
                const auto entry = static_cast<std::size_t>(sample);
                for (std::size_t c = 0; c < 3; ++c) expected.push_back(source.palette[3 * entry + c]);
                if (transparent) expected.push_back(entry < 2 ? source.transparency[entry] : 255);
            }
            CHECK(bytes_of(image) == expected);
        }
    const Tensor grey = decode_image(test::png_file({.width = 2,
                                                     .height = 1,
                                                     .colour_type = PNG_COLOR_TYPE_GRAY,
                                                     .transparent = {5},
                                                     .samples = {5, 6}}));
    CHECK(bytes_of(grey) == Bytes{5, 0, 6, 255});
    const Tensor rgb = decode_image(test::png_file({.width = 2,
                                                    .height = 1,
                                                    .colour_type = PNG_COLOR_TYPE_RGB,
                                                    .transparent = {1, 2, 3},
                                                    .samples = {1, 2, 3, 1, 2, 4}}));
    CHECK(bytes_of(rgb) == Bytes{1, 2, 3, 0, 1, 2, 4, 255});
}

TEST_CASE("image: what encode_png makes is read as it was") {
    for (const std::int64_t channels : {1, 2, 3, 4}) {
        const Tensor image = randint(0, 256, {6, 9, channels}, {DType::u8});
        CHECK(bytes_of(decode_image(data::encode_png(image))) == bytes_of(image));
        const Tensor view = image.alias({9, 6, channels}, {channels, 9 * channels, 1}, 0);
        CHECK(bytes_of(decode_image(data::encode_png(view))) == bytes_of(view));
    }
    const test::TemporaryFolder folder;
    const std::string path =
        (folder.path() / "image.jpg").string();  // what is in a file counts, not its name
    data::write_png(path, test::smooth_image(3, 4, 3));
    CHECK(bytes_of(data::read_image(path)) == bytes_of(test::smooth_image(3, 4, 3)));
    CHECK(contains(error_of([] { data::encode_png(Tensor()); }), "undefined"));
    CHECK(contains(error_of([] { data::encode_png(zeros({3, 4, 3})); }), "(3, 4, 3) of f32"));
    CHECK(contains(error_of([] { data::encode_png(zeros({3, 4, 5}, {DType::u8})); }), "(3, 4, 5)"));
    CHECK(contains(error_of([] { data::encode_png(zeros({0, 4, 3}, {DType::u8})); }), "(0, 4, 3)"));
}

TEST_CASE("image: JPEG, baseline and progressive, grey and RGB") {
    for (const bool progressive : {false, true})
        for (const std::int64_t channels : {1, 3})
            for (const bool subsampled : {false, true}) {
                const Tensor image = test::smooth_image(37, 51, channels);
                const std::string file =
                    test::jpeg_file({.pixels = image, .progressive = progressive, .subsampled = subsampled});
                check_close(decode_image(file), image, subsampled && channels == 3 ? 8 : 3);
            }
}

TEST_CASE("image: JPEG of CMYK becomes RGB, with Adobe's inverted values and without") {
    const Tensor cmyk = test::smooth_image(24, 40, 4);
    const Bytes inks = bytes_of(cmyk);
    for (const bool adobe : {true, false})
        for (const bool ycck : {true, false}) {
            if (ycck && !adobe) continue;  // without the mark nothing says that it is YCCK
            Tensor expected = Tensor::empty({24, 40, 3}, {DType::u8});
            std::uint8_t* to = expected.data<std::uint8_t>();
            for (std::size_t i = 0; i < inks.size(); i += 4)
                for (std::size_t c = 0; c < 3; ++c) {
                    const int ink = adobe ? 255 - inks[i + c] : inks[i + c];
                    const int black = adobe ? 255 - inks[i + 3] : inks[i + 3];
                    *to++ = static_cast<std::uint8_t>((255 - ink) * (255 - black) / 255);
                }
            const std::string file = test::jpeg_file({.pixels = cmyk, .adobe = adobe, .ycck = ycck});
            check_close(decode_image(file), expected, 4);
        }
}

TEST_CASE("image: other channels than the stored ones") {
    const auto one = [](std::int64_t channels, const Bytes& pixel, std::int64_t wanted) {
        const Tensor image = tensor(pixel, {1, 1, channels});
        return bytes_of(decode_image(data::encode_png(image), "image", {.channels = wanted}));
    };
    CHECK(one(1, {7}, 1) == Bytes{7});
    CHECK(one(1, {7}, 3) == Bytes{7, 7, 7});
    CHECK(one(1, {7}, 4) == Bytes{7, 7, 7, 255});
    CHECK(one(2, {7, 9}, 1) == Bytes{7});
    CHECK(one(2, {7, 9}, 3) == Bytes{7, 7, 7});
    CHECK(one(2, {7, 9}, 4) == Bytes{7, 7, 7, 9});
    CHECK(one(3, {10, 20, 30}, 1) == Bytes{18});  // 2.99 + 11.74 + 3.42 = 18.15
    CHECK(one(3, {255, 255, 255}, 1) == Bytes{255});
    CHECK(one(3, {1, 2, 3}, 4) == Bytes{1, 2, 3, 255});
    CHECK(one(4, {1, 2, 3, 4}, 3) == Bytes{1, 2, 3});
    CHECK(one(4, {10, 20, 30, 4}, 1) == Bytes{18});
    CHECK(contains(error_of([&] { one(1, {7}, 2); }), "channels is 2"));
    CHECK(contains(error_of([] { decode_image("", "image", {.most_pixels = 0}); }), "most_pixels is 0"));
}

TEST_CASE("image: turned upright as its EXIF data say, in either order of bytes") {
    // Of a 2 x 3 image, what each orientation makes: the place of every stored pixel.
    const std::vector<std::pair<Shape, Bytes>> expected = {
        {{2, 3, 1}, {0, 1, 2, 3, 4, 5}}, {{2, 3, 1}, {2, 1, 0, 5, 4, 3}}, {{2, 3, 1}, {5, 4, 3, 2, 1, 0}},
        {{2, 3, 1}, {3, 4, 5, 0, 1, 2}}, {{3, 2, 1}, {0, 3, 1, 4, 2, 5}}, {{3, 2, 1}, {3, 0, 4, 1, 5, 2}},
        {{3, 2, 1}, {5, 2, 4, 1, 3, 0}}, {{3, 2, 1}, {2, 5, 1, 4, 0, 3}}};
    for (const bool little_endian : {false, true})
        for (int orientation = 1; orientation <= 8; ++orientation) {
            CAPTURE(orientation);
            const auto& [shape, bytes] = expected[static_cast<std::size_t>(orientation - 1)];
            const Tensor image =
                decode_image(test::png_file({.width = 3,
                                             .height = 2,
                                             .exif = test::exif_of(orientation, little_endian),
                                             .samples = {0, 1, 2, 3, 4, 5}}));
            CHECK(image.shape() == shape);
            CHECK(bytes_of(image) == bytes);
            const Tensor stored = test::smooth_image(20, 30, 3);
            const Tensor jpeg = decode_image(
                test::jpeg_file({.pixels = stored, .exif = test::exif_of(orientation, little_endian)}));
            CHECK(jpeg.shape() == (orientation < 5 ? Shape{20, 30, 3} : Shape{30, 20, 3}));
        }
    // What makes no sense turns nothing.
    for (const std::string& exif : {test::exif_of(0, true), test::exif_of(9, false), std::string("II*"),
                                    std::string("MM\0*\xFF\xFF\xFF\xFF", 8), std::string("hello, camera")}) {
        const Tensor image = test::smooth_image(20, 30, 3);
        CHECK(decode_image(test::jpeg_file({.pixels = image, .exif = exif})).shape() == image.shape());
    }
}

TEST_CASE("image: files that are no images, and files that are not there") {
    const test::TemporaryFolder folder;
    const auto text_of = [&](const std::string& bytes) {
        const std::string path = folder.write("damaged.png", bytes);
        const std::string text = error_of([&] { data::read_image(path); });
        CHECK(contains(text, "[image] "));
        CHECK(contains(text, "damaged.png: "));
        CHECK_THROWS_AS(data::read_image(path), data::DamagedImage);
        return text;
    };
    CHECK(contains(text_of(""), "empty"));
    CHECK(contains(text_of("GIF89a"), "neither a PNG nor a JPEG"));
    CHECK(contains(text_of(std::string(1000, '\0')), "neither a PNG nor a JPEG"));
    CHECK(contains(text_of("\x89PNG\r\n\x1a\n"), "the file ends too early"));
    CHECK(contains(text_of("\xFF\xD8\xFF"), "the JPEG is damaged"));
    CHECK(contains(error_of([&] { data::read_image((folder.path() / "missing.png").string()); }),
                   "missing.png: No such file"));
    CHECK(contains(error_of([&] { data::read_image(folder.path().string()); }), "it is no file"));
    try {
        decode_image("soup", "soup.jpg");
        FAIL("no Error");
    } catch (const data::DamagedImage& error) {
        CHECK(error.reason() == "it is neither a PNG nor a JPEG: it starts like neither of them.");
        CHECK(error.op() == "image");
    }
}
