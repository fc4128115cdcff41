#include "data/idx.h"

#include <doctest/doctest.h>
#include <zlib.h>

#include "core/factories.h"
#include "core/memory.h"
#include "data/loader.h"
#include "tests/data/image_files.h"
#include "tests/expect_error.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;

namespace {

std::string bytes(std::initializer_list<int> values) {
    std::string all;
    for (const int value : values) all += static_cast<char>(value);
    return all;
}

std::string packed(const std::string& content) {
    z_stream stream{};
    REQUIRE(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY) == Z_OK);  // 16: gzip
    std::string result(deflateBound(&stream, content.size()) + 64, '\0');
    std::string input = content;
    stream.next_in = reinterpret_cast<Bytef*>(input.data());
    stream.avail_in = static_cast<uInt>(input.size());
    stream.next_out = reinterpret_cast<Bytef*>(result.data());
    stream.avail_out = static_cast<uInt>(result.size());
    REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
    result.resize(stream.total_out);
    deflateEnd(&stream);
    return result;
}

}  // namespace

TEST_CASE("idx: every dtype, packed or not") {
    const test::TemporaryFolder folder;
    struct Case {
        std::string content;
        DType dtype;
        Shape shape;
        std::vector<double> values;
    };
    const std::vector<Case> cases = {
        {bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 0, 1, 2, 3, 128, 255}),
         DType::u8,
         {2, 3},
         {0, 1, 2, 3, 128, 255}},
        {bytes({0, 0, 9, 1, 0, 0, 0, 2, 127, 255}), DType::i32, {2}, {127, -1}},
        {bytes({0, 0, 11, 1, 0, 0, 0, 2, 1, 2, 255, 254}), DType::i32, {2}, {258, -2}},
        {bytes({0, 0, 12, 1, 0, 0, 0, 2, 1, 2, 3, 4, 255, 255, 255, 253}), DType::i32, {2}, {16909060, -3}},
        {bytes({0, 0, 13, 1, 0, 0, 0, 1, 0xC0, 0x20, 0, 0}), DType::f32, {1}, {-2.5}},
        {bytes({0, 0, 14, 1, 0, 0, 0, 1, 0x40, 0x04, 0, 0, 0, 0, 0, 0}), DType::f64, {1}, {2.5}},
        {bytes({0, 0, 8, 0, 77}), DType::u8, {}, {77}},
        {bytes({0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0, 5}), DType::u8, {0, 5}, {}},
    };
    for (const Case& one : cases)
        for (const std::string& content : {one.content, packed(one.content)}) {
            const Tensor read = data::read_idx(folder.write("file.idx", content));
            CHECK(read.dtype() == one.dtype);
            CHECK(read.shape() == one.shape);
            CHECK(read.to_vector() == one.values);
        }
}

TEST_CASE("idx: many elements") {
    const test::TemporaryFolder folder;
    std::string content = bytes({0, 0, 11, 2, 0, 3, 0xD, 0x40, 0, 0, 0, 2});  // 200,000 x 2
    for (int i = 0; i < 400'000; ++i) {
        content += static_cast<char>(i >> 8);
        content += static_cast<char>(i);
    }
    for (const std::string& file : {content, packed(content)}) {
        const Tensor read = data::read_idx(folder.write("large.idx", file));
        REQUIRE(read.shape() == Shape{200'000, 2});
        bool right = true;
        for (int i = 0; i < 400'000; ++i)
            right = right && read.data<std::int32_t>()[i] == static_cast<std::int16_t>(i);
        CHECK(right);
    }
}

TEST_CASE("idx: files that are damaged are refused with their name and the reason") {
    const test::TemporaryFolder folder;
    const auto text_of = [&](const std::string& content) {
        const std::string path = folder.write("damaged.idx", content);
        const std::string text = error_of([&] { data::read_idx(path); });
        CHECK(contains(text, "[read_idx] "));
        CHECK(contains(text, "damaged.idx: "));
        return text;
    };
    const std::string good = bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6});
    for (std::size_t length = 0; length < good.size(); ++length) text_of(good.substr(0, length));
    CHECK(contains(text_of(good.substr(0, 15)), "ends within its elements"));
    CHECK(contains(text_of(good + "x"), "longer than its shape says"));
    CHECK(contains(text_of("PK\3\4"), "no IDX file: its first bytes are 50 4b 03 04"));
    CHECK(contains(text_of(bytes({0, 0, 10, 1, 0, 0, 0, 1, 5})), "no IDX file"));

    const std::string gzip = packed(good);
    for (std::size_t length = 0; length < gzip.size(); ++length) text_of(gzip.substr(0, length));
    std::string changed = gzip;
    changed[changed.size() - 6] = static_cast<char>(changed[changed.size() - 6] ^ 1);  // of the checksum
    CHECK(contains(text_of(changed), "damaged"));
    CHECK(contains(text_of(packed(good + "x")), "longer than its shape says"));

    reset_peak_memory();
    const std::int64_t before = memory_statistics().peak;
    const std::string huge =
        bytes({0, 0, 8, 3, 0x7F, 0xFF, 0xFF, 0xFF, 0x7F, 0xFF, 0xFF, 0xFF, 0, 0, 0, 9, 1});
    CHECK(contains(text_of(huge), "for which it is too short"));
    CHECK(contains(text_of(packed(huge)), "for which it is too short"));
    CHECK(contains(text_of(bytes({0, 0, 14, 1, 0x10, 0, 0, 0, 1, 2, 3, 4})), "too short"));
    const std::string largest_axes = bytes(
        {0, 0, 8, 4, 0x7F, 0xFF, 0xFF, 0xFF, 0x7F, 0xFF, 0xFF, 0xFF, 0x7F, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0});
    CHECK(contains(text_of(largest_axes), "no tensor has the shape"));
    CHECK(memory_statistics().peak - before < 100'000);
    CHECK(data::read_idx(folder.write("empty.idx", bytes({0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0, 28}))).shape() ==
          Shape{0, 28});

    CHECK(contains(error_of([&] { data::read_idx((folder.path() / "missing").string()); }), "no such file"));
    CHECK(contains(error_of([&] { data::read_idx(folder.path().string()); }), "cannot read"));
}
