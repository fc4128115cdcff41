// Image files that are cut off, changed, or say that they are huge.

#include <doctest/doctest.h>
#include <png.h>
#include <sys/resource.h>
#include <zlib.h>

#include <random>

#include "core/factories.h"
#include "core/memory.h"
#include "data/image.h"
#include "tests/data/image_files.h"
#include "tests/expect_error.h"

using namespace potluck;
using data::DamagedImage;
using data::decode_image;
using potluck::test::contains;
using potluck::test::error_of;

namespace {

/// Small files of every kind.
std::vector<std::string> all_kinds() {
    std::vector<std::string> files;
    for (const std::int64_t channels : {1, 2, 3, 4})
        files.push_back(data::encode_png(test::smooth_image(9, 11, channels)));
    test::PngSource palette{.colour_type = PNG_COLOR_TYPE_PALETTE, .bits = 4, .interlaced = true};
    for (int i = 0; i < 48; ++i) palette.palette.push_back(static_cast<std::uint8_t>(5 * i));
    palette.transparency = {1, 2, 3};
    for (int i = 0; i < 35; ++i) palette.samples.push_back(i % 16);
    files.push_back(test::png_file(palette));
    test::PngSource deep{.colour_type = PNG_COLOR_TYPE_RGB, .bits = 16, .exif = test::exif_of(6, true)};
    for (int i = 0; i < 105; ++i) deep.samples.push_back(600 * i);
    files.push_back(test::png_file(deep));
    for (const std::int64_t channels : {1, 3, 4})
        for (const bool progressive : {false, true})
            files.push_back(test::jpeg_file({.pixels = test::smooth_image(17, 23, channels),
                                             .quality = 80,
                                             .progressive = progressive,
                                             .subsampled = channels == 3,
                                             .exif = test::exif_of(3, false)}));
    return files;
}

/// Decodes bytes that may be anything. Nothing but an image or a DamagedImage may come of them.
bool is_image(const std::string& bytes) {
    try {
        const Tensor image = decode_image(bytes, "fuzz", {.channels = 3, .most_pixels = 1'000'000});
        CHECK(image.ndim() == 3);
        CHECK(image.size(2) == 3);
        CHECK(image.count() <= 3'000'000);
        return true;
    } catch (const DamagedImage&) {
        return false;
    }
}

void fuzz(int rounds, unsigned seed) {
    std::mt19937 random(seed);
    int images = 0, damaged = 0;
    for (const std::string& file : all_kinds())
        for (int round = 0; round < rounds; ++round) {
            std::string changed = file;
            const auto changes = 1 + random() % 6;
            for (std::uint64_t i = 0; i < changes; ++i) {
                const std::size_t place = random() % changed.size();
                switch (random() % 4) {
                    case 0:
                        changed[place] = static_cast<char>(random());
                        break;
                    case 1:
                        changed[place] = static_cast<char>(changed[place] ^ (1 << random() % 8));
                        break;
                    case 2:
                        changed.erase(place, 1 + random() % 8);
                        break;
                    default:
                        changed.insert(place, 1 + random() % 8, static_cast<char>(random()));
                }
                if (changed.empty()) changed = "x";
            }
            ++(is_image(changed) ? images : damaged);
        }
    CHECK(damaged > rounds);  // and in what is only a comment or a table, a change may do no harm
    CHECK(images + damaged == rounds * static_cast<int>(all_kinds().size()));
}

void put(std::string& bytes, std::size_t at, std::uint32_t value, int size) {
    for (int i = 0; i < size; ++i)
        bytes[at + static_cast<std::size_t>(i)] = static_cast<char>(value >> 8 * (size - 1 - i));
}

/// A PNG that says it has another size. Its checksums are right.
std::string png_that_says(std::uint32_t width, std::uint32_t height) {
    std::string file = data::encode_png(test::smooth_image(4, 4, 3));
    put(file, 16, width, 4);
    put(file, 20, height, 4);
    const uLong checksum = crc32(0, reinterpret_cast<const Bytef*>(file.data() + 12), 17);
    put(file, 29, static_cast<std::uint32_t>(checksum), 4);
    return file;
}

std::string jpeg_that_says(std::uint32_t width, std::uint32_t height, bool progressive) {
    std::string file = test::jpeg_file({.pixels = test::smooth_image(4, 4, 3), .progressive = progressive});
    const std::size_t frame = file.find(progressive ? "\xFF\xC2" : "\xFF\xC0");
    REQUIRE(frame != std::string::npos);
    put(file, frame + 5, height, 2);
    put(file, frame + 7, width, 2);
    return file;
}

}  // namespace

TEST_CASE("image damage: a file that is cut off anywhere is an Error that names it") {
    for (const std::string& file : all_kinds()) {
        REQUIRE(is_image(file));
        for (std::size_t length = 0; length < file.size(); ++length) {
            CAPTURE(length);
            const std::string text = error_of([&] { decode_image(file.substr(0, length), "cut.png"); });
            CHECK(contains(text, "[image] cut.png: "));
        }
    }
}

TEST_CASE("image damage: changed bytes give an image or an Error, never more") { fuzz(60, 1); }

TEST_CASE("image damage: many changed bytes" * doctest::test_suite("long")) { fuzz(3000, 2); }

TEST_CASE("image damage: huge sizes are refused before memory is taken") {
    // Of tensors, and of the whole process (in kB), as the libraries take memory of their own.
    const auto most_of_process = [] {
        rusage usage{};
        getrusage(RUSAGE_SELF, &usage);
        return usage.ru_maxrss;
    };
    reset_peak_memory();
    const std::int64_t before = memory_statistics().peak;
    const long before_process = most_of_process();
    const auto text_of = [](const std::string& file, std::int64_t most_pixels = 100'000'000) {
        return error_of([&] { decode_image(file, "huge", {.most_pixels = most_pixels}); });
    };
    CHECK(contains(text_of(png_that_says(50'000, 40'000)), "50000 x 40000 pixels, and most_pixels is"));
    CHECK(contains(text_of(png_that_says(0x7FFFFFFF, 0x7FFFFFFF)), "2147483647 x 2147483647 pixels"));
    CHECK(contains(text_of(png_that_says(9000, 9000)), "it says that it has 9000 x 9000 pixels"));
    for (const bool progressive : {false, true}) {
        CHECK(contains(text_of(jpeg_that_says(65'500, 65'500, progressive)), "most_pixels is 100000000"));
        CHECK(contains(text_of(jpeg_that_says(9000, 9000, progressive)), "it says that it has 9000 x 9000"));
    }
    CHECK(contains(text_of(data::encode_png(test::smooth_image(10, 10, 3)), 99), "most_pixels is 99"));
    CHECK(
        decode_image(data::encode_png(test::smooth_image(10, 10, 3)), "fits", {.most_pixels = 100}).count() ==
        300);
    CHECK(memory_statistics().peak - before < 100'000);
    CHECK(most_of_process() - before_process < 50'000);
}

TEST_CASE("image damage: a progressive JPEG of thousands of scans is refused") {
    const std::string file =
        test::jpeg_file({.pixels = test::smooth_image(8, 8, 1), .quality = 50, .progressive = true});
    // The last scan, again and again.
    const std::size_t scan = file.rfind("\xFF\xDA");
    REQUIRE(scan != std::string::npos);
    const std::string end = file.substr(file.size() - 2);
    std::string bomb = file.substr(0, file.size() - 2);
    for (int i = 0; i < 2000; ++i) bomb += file.substr(scan, file.size() - 2 - scan);
    CHECK_THROWS_AS(decode_image(bomb + end), DamagedImage);
}
