#include "data/tokenizer.h"

#include <doctest/doctest.h>

#include "core/factories.h"
#include "tests/expect_error.h"

using namespace potluck;
using data::ByteTokenizer;
using potluck::test::contains;
using potluck::test::error_of;

namespace {

std::string decode_one_by_one(std::string_view text, std::vector<std::string>* pieces = nullptr) {
    data::StreamingDecoder decoder;
    std::string whole;
    for (char byte : text) {
        const std::string piece = decoder.push(static_cast<unsigned char>(byte));
        if (pieces != nullptr) pieces->push_back(piece);
        whole += piece;
    }
    return whole + decoder.finish();
}

}  // namespace

TEST_CASE("byte tokenizer: ids are the bytes") {
    const Tensor ids = ByteTokenizer::encode("A\n\xff");
    CHECK(ids.shape() == Shape{3});
    CHECK(ids.dtype() == DType::i64);
    CHECK(ids.to_vector<std::int64_t>() == std::vector<std::int64_t>{65, 10, 255});
    CHECK(ByteTokenizer::encode("").shape() == Shape{0});
    CHECK(ByteTokenizer::decode(ByteTokenizer::encode("")).empty());
    CHECK(ByteTokenizer::vocabulary_size == 256);
}

TEST_CASE("byte tokenizer: every byte of a megabyte of broken text survives, for every dtype of the ids") {
    std::string text = "\xef\xbb\xbf";  // byte order mark
    constexpr char line[] = "line\r\n\xff\xfe \xc3 \0 caf\xc3\xa9 \xe2\x82\xac";
    while (text.size() < 1'000'000) text.append(line, sizeof(line) - 1);
    for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
    text += "\xf0\x9f\x98";  // a cut character at the very end
    for (DType dtype : {DType::i64, DType::i32, DType::u8})
        CHECK(ByteTokenizer::decode(ByteTokenizer::encode(text, dtype)) == text);
    CHECK(decode_one_by_one(text) == text);
}

TEST_CASE("streaming decoder: characters of several bytes come out whole") {
    const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z";  // a é € (a face) z
    std::vector<std::string> pieces;
    CHECK(decode_one_by_one(text, &pieces) == text);
    CHECK(pieces == std::vector<std::string>{"a", "", "\xc3\xa9", "", "", "\xe2\x82\xac", "", "", "",
                                             "\xf0\x9f\x98\x80", "z"});
}

TEST_CASE("streaming decoder: bytes that are no UTF-8 come out as they are, as soon as that is sure") {
    std::vector<std::string> pieces;
    const std::string text =
        "\xe2\x82\xc3x\x80\xff";  // interrupted twice, a lone continuation byte, a byte that never occurs
    CHECK(decode_one_by_one(text, &pieces) == text);
    CHECK(pieces == std::vector<std::string>{"", "", "\xe2\x82", "\xc3x", "\x80", "\xff"});
    data::StreamingDecoder decoder;
    CHECK(decoder.push(0xf0).empty());
    CHECK(decoder.finish() == "\xf0");
    CHECK(decoder.finish().empty());
}

TEST_CASE("byte tokenizer: what is no byte is refused with position and value") {
    const std::string text = error_of([] {
        ByteTokenizer::decode(tensor(std::vector<std::int64_t>{1, 2, 256}, {3}));
    });
    CHECK(contains(text, "256"));
    CHECK(contains(text, "position 2"));
    CHECK(
        contains(error_of([] { ByteTokenizer::decode(tensor(std::vector<std::int64_t>{-1}, {1})); }), "-1"));
    CHECK(contains(error_of([] { ByteTokenizer::decode(zeros({2})); }), "f32"));
    CHECK(contains(error_of([] { ByteTokenizer::decode(Tensor()); }), "undefined"));
    CHECK(contains(error_of([] { ByteTokenizer::encode("a", DType::f32); }), "f32"));
    data::StreamingDecoder decoder;
    CHECK(contains(error_of([&] { decoder.push(300); }), "300"));
}

TEST_CASE("printable: control characters and broken bytes are replaced, everything else stays") {
    CHECK(data::printable("a\tb\n \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") ==
          "a\tb\n \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    CHECK(data::printable("\x1b[2Jx") == "\xef\xbf\xbd[2Jx");
    CHECK(data::printable("\r\x7f") == "\xef\xbf\xbd\xef\xbf\xbd");
    CHECK(data::printable("\xc3x\xff\xe2\x82") == "\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    CHECK(data::printable("\xc2\x9b") ==
          "\xef\xbf\xbd\xef\xbf\xbd");  // an escape sequence's start in one character
    CHECK(data::printable("").empty());
}
