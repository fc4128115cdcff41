#include "core/safetensors.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/factories.h"
#include "core/memory.h"
#include "tests/core/temporary_folder.h"
#include "tests/on_device.h"

using namespace potluck;
using test::TemporaryFolder;

namespace {

std::string length_bytes(std::uint64_t length) {
    std::string text(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 0xff);
    return text;
}

std::string file_of(const std::string& header, const std::string& data) {
    return length_bytes(header.size()) + header + data;
}

template <class T>
std::string bytes_of(std::initializer_list<T> values) {
    std::string text(values.size() * sizeof(T), '\0');
    std::memcpy(text.data(), std::data(values), text.size());
    return text;
}

TensorFile load(const TemporaryFolder& folder, const std::string& content) {
    test::write_file(folder / "file", content);
    return load_safetensors(folder / "file");
}

/// The loader's message about a bad file, for which it must not allocate memory.
std::string refusal(const std::string& content) {
    const TemporaryFolder folder;
    const auto before = memory_statistics();
    reset_peak_memory();
    try {
        load(folder, content);
    } catch (const Error& error) {
        CHECK(error.op() == "load_safetensors");
        CHECK(memory_statistics().peak == before.current);
        return error.what();
    }
    return "accepted";
}

bool has(const std::string& text, const std::string& part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
    return text.find(part) != std::string::npos;
}

void check_equal(const TensorFile& a, const TensorFile& b) {
    CHECK(a.metadata == b.metadata);
    REQUIRE(a.tensors.size() == b.tensors.size());
    for (const auto& [name, tensor] : a.tensors) {
        CAPTURE(name);
        REQUIRE(b.tensors.count(name) == 1);
        const Tensor& other = b.tensors.at(name);
        CHECK(tensor.shape() == other.shape());
        CHECK(tensor.dtype() == other.dtype());
        CHECK(tensor.to_vector() == other.to_vector());
    }
}

/// Accepted files must also be unchanged after we have written them.
TensorFile accepted(const std::string& content) {
    const TemporaryFolder folder;
    TensorFile first = load(folder, content);
    save_safetensors(folder / "again", first);
    check_equal(first, load_safetensors(folder / "again"));
    return first;
}

const std::string four_zeros(4, '\0');

}  // namespace

TEST_CASE("safetensors: every dtype and shape comes back") {
    const TemporaryFolder folder;
    TensorFile file;
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64, DType::i32,
                              DType::u8, DType::boolean}) {
        const std::string name(name_of(dtype));
        file.tensors[name] = arange(0, 2, 1, {dtype});
        file.tensors[name + ".scalar"] = ones({}, {dtype});
        file.tensors[name + ".empty"] = ones({2, 0}, {dtype});
        file.tensors[name + ".odd"] = ones({1, 3, 1}, {dtype});
    }
    file.tensors["layer.0 \"quoted\" \\ \n \xc3\xa4\xf0\x9f\x8d\xb2"] = tensor({1., 2.});
    file.tensors[""] = tensor({3.});
    file.metadata = {{"format", "pt"}, {"", "empty key"}, {"text", "a \"b\" \xe2\x82\xac"}};
    save_safetensors(folder / "all.safetensors", file);
    check_equal(file, load_safetensors(folder / "all.safetensors"));
    CHECK(folder.file_count() == 1);
    save_safetensors(folder / "nothing.safetensors", {});
    check_equal({}, load_safetensors(folder / "nothing.safetensors"));
}

TEST_CASE("safetensors: what we write follows the format") {
    const TemporaryFolder folder;
    save_safetensors(folder / "x", {{{"a.u8", arange(0, 3, 1, {DType::u8})},
                                     {"b.f32", tensor({1., 2.})},
                                     {"c.f64", tensor(3.0, {DType::f64})},
                                     {"d.f32", tensor({4.})}},
                                    {{"k", "v"}}});
    const std::string content = test::read_file(folder / "x");
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), 8);
    CHECK((8 + length) % 64 == 0);
    const auto header = nlohmann::json::parse(content.substr(8, length));
    CHECK(header.at("__metadata__").at("k") == "v");
    // Sorted by element size (largest first), then by name: every tensor is aligned for its dtype, without gaps.
    CHECK(header.at("c.f64").at("data_offsets") == std::vector<int>{0, 8});
    CHECK(header.at("b.f32").at("data_offsets") == std::vector<int>{8, 16});
    CHECK(header.at("d.f32").at("data_offsets") == std::vector<int>{16, 20});
    CHECK(header.at("a.u8").at("data_offsets") == std::vector<int>{20, 23});
    CHECK(header.at("b.f32").at("dtype") == "F32");
    CHECK(header.at("c.f64").at("shape").empty());
    CHECK(content.size() == 8 + length + 23);
    save_safetensors(folder / "y", load_safetensors(folder / "x"));
    CHECK(test::read_file(folder / "y") == content);
}

TEST_CASE("safetensors: views are written as they look, and nothing else of their storage") {
    const TemporaryFolder folder;
    const Tensor a = arange(0, 6, 1, {DType::f32}).alias({2, 3}, {3, 1}, 0);
    const Tensor big = zeros({1'000'000});
    save_safetensors(folder / "views", {{{"turned", a.alias({3, 2}, {1, 3}, 0)},
                                         {"columns", a.alias({2, 2}, {3, 1}, 1)},
                                         {"rows", a.alias({1, 3}, {3, 1}, 0).broadcast_alias("test", {4, 3})},
                                         {"none", a.alias({0, 3}, {3, 1}, 6)},
                                         {"small part", big.alias({2}, {1}, 10)}},
                                        {}});
    const auto loaded = load_safetensors(folder / "views").tensors;
    CHECK(loaded.at("turned").to_vector() == std::vector<double>{0, 3, 1, 4, 2, 5});
    CHECK(loaded.at("columns").to_vector() == std::vector<double>{1, 2, 4, 5});
    CHECK(loaded.at("rows").to_vector() == std::vector<double>{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2});
    CHECK(loaded.at("none").shape() == Shape{0, 3});
    CHECK(std::filesystem::file_size(folder / "views") < 1000);
}

TEST_CASE("safetensors: views of any device are written as they look") {
    test::on_each_device([] {
        const TemporaryFolder folder;
        const Tensor a = arange(0, 6, 1, {DType::f32}).alias({2, 3}, {3, 1}, 0).to(test::test_device());
        save_safetensors(folder / "views",
                         {{{"turned", a.alias({3, 2}, {1, 3}, 0)},
                           {"columns", a.alias({2, 2}, {3, 1}, 1)},
                           {"rows", a.alias({1, 3}, {3, 1}, 0).broadcast_alias("test", {4, 3})},
                           {"none", a.alias({0, 3}, {3, 1}, 6)}},
                          {}});
        const auto loaded = load_safetensors(folder / "views").tensors;
        CHECK(loaded.at("turned").to_vector() == std::vector<double>{0, 3, 1, 4, 2, 5});
        CHECK(loaded.at("turned").shape() == Shape{3, 2});
        CHECK(loaded.at("columns").to_vector() == std::vector<double>{1, 2, 4, 5});
        CHECK(loaded.at("rows").to_vector() == std::vector<double>{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2});
        CHECK(loaded.at("none").shape() == Shape{0, 3});
        CHECK(std::filesystem::file_size(folder / "views") < 800);
    });
}

TEST_CASE("safetensors: loaded tensors lie in the file's pages; changes stay in this process") {
    const TemporaryFolder folder;
    save_safetensors(folder / "x", {{{"x", full({1'000'000}, 2)}}, {}});
    const auto before = memory_statistics().current;
    Tensor x = load_safetensors(folder / "x").tensors.at("x");  // outlives the TensorFile
    CHECK(memory_statistics().current == before);
    CHECK_FALSE(x.storage()->owns_memory());
    x.data<float>()[7] = 5;
    CHECK(x.to_vector()[7] == 5);
    CHECK(load_safetensors(folder / "x").tensors.at("x").to_vector()[7] == 2);
    save_safetensors(folder / "x", {{{"x", x}}, {}});  // overwrites the file in which x itself is mapped
    CHECK(load_safetensors(folder / "x").tensors.at("x").to_vector()[7] == 5);
    CHECK(x.to_vector()[8] == 2);
    std::filesystem::remove(folder / "x");
    CHECK(x.to_vector()[999'999] == 2);
}

TEST_CASE("safetensors: sizes that do not fit the range are refused with both numbers") {
    has(refusal(file_of(R"({"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}})", four_zeros)),
        "size mismatch: 4000000 bytes expected, 4 given");
    has(refusal(file_of(R"({"t":{"dtype":"I32","shape":[2,2],"data_offsets":[0,4]}})", four_zeros)),
        "16 bytes expected, 4 given");
    has(refusal(file_of(R"({"t":{"dtype":"I32","shape":[2,18446744073709551614],"data_offsets":[0,16]}})",
                        std::string(16, '\0'))),
        "size 18446744073709551614");
    has(refusal(file_of(R"({"t":{"dtype":"I32","shape":[2,9223372036854775807],"data_offsets":[0,16]}})",
                        std::string(16, '\0'))),
        "more than 2^63 - 1 bytes");
    has(refusal(file_of(R"({"t":{"dtype":"I32","shape":[2,99999999999999999999999],"data_offsets":[0,16]}})",
                        std::string(16, '\0'))),
        "whole number below 2^64");
    has(refusal(
            file_of(R"({"t":{"dtype":"F32","shape":[0,9223372036854775807,4],"data_offsets":[0,0]}})", "")),
        "2^63 - 1");
}

TEST_CASE("safetensors: overlap and holes are refused") {
    const std::string two = R"("dtype":"F32","shape":[2,2],"data_offsets":)";
    has(refusal(file_of("{\"a\":{" + two + "[0,16]},\"b\":{" + two + "[0,16]}}", std::string(16, '\0'))),
        "overlaps");
    has(refusal(file_of("{\"a\":{" + two + "[0,16]},\"b\":{" + two + "[8,24]}}", std::string(24, '\0'))),
        "overlaps");
    has(refusal(file_of("{\"a\":{" + two + "[0,16]},\"b\":{" + two + "[20,36]}}", std::string(36, '\0'))),
        "leaves a hole after 16");
    has(refusal(file_of("{\"a\":{" + two + "[4,20]}}", std::string(20, '\0'))), "leaves a hole after 0");
    has(refusal(file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}})", "ab")), "ends before");
    // An empty tensor inside another one is an overlap; between two it is fine.
    const std::string empty_inside =
        R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})";
    has(refusal(file_of(empty_inside, four_zeros)), "overlaps");
}

TEST_CASE("safetensors: a hundred thousand tensors on one range cost neither memory nor time") {
    std::string header = "{";
    for (int i = 0; i < 100'000; ++i)
        header += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
                  R"(":{"dtype":"F32","shape":[200,200],"data_offsets":[0,160000]})";
    header += "}";
    const TemporaryFolder folder;
    test::write_file(folder / "file", file_of(header, std::string(160'000, '\0')));
    const auto status = [](const char* field) {
        std::ifstream file("/proc/self/status");
        for (std::string line; std::getline(file, line);)
            if (line.starts_with(field)) return std::atoll(line.c_str() + std::strlen(field)) * 1024;
        return 0LL;
    };
    std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak counter
    [[maybe_unused]] const auto before = status("VmRSS:");
    const auto start = std::chrono::steady_clock::now();
    CHECK_THROWS_WITH_AS(load_safetensors(folder / "file"), doctest::Contains("overlaps"), Error);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    CHECK(taken.count() < 5.0);
#ifndef __SANITIZE_ADDRESS__
    CHECK(status("VmHWM:") - before < 10 * static_cast<std::int64_t>(header.size()));
#endif
}

TEST_CASE("safetensors: any order of the data in the header") {
    const auto file = accepted(file_of(R"({"b":{"dtype":"I32","shape":[2],"data_offsets":[4,12]},)"
                                       R"("a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}})",
                                       bytes_of<float>({1.5F}) + bytes_of<std::int32_t>({7, 8})));
    CHECK(file.tensors.at("a").to_vector() == std::vector<double>{1.5});
    CHECK(file.tensors.at("b").to_vector() == std::vector<double>{7, 8});
}

TEST_CASE("safetensors: lengths that lie are refused before anything is allocated") {
    for (const std::uint64_t length :
         {~std::uint64_t{0}, ~std::uint64_t{0} - 4, std::uint64_t{1} << 63, std::uint64_t{100'000'001}}) {
        CAPTURE(length);
        has(refusal(length_bytes(length) + "{}"), "the format allows 100000000");
    }
    has(refusal(length_bytes(60)), "the header has 60 bytes, and the file only 0 after the first 8");
    has(refusal(length_bytes(11) + "{}"), "cut short");
    has(refusal(length_bytes(3) + "{}"), "cut short");
    has(refusal(""), "the file has 0 bytes");
    has(refusal("1234567"), "the file has 7 bytes");
    has(refusal(length_bytes(0)), "must begin with '{'");
}

TEST_CASE("safetensors: malformed files are refused, each for its own reason") {
    const std::string good = R"({"t":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}})";
    const std::string data(16, '\0');
    has(refusal(file_of(good, data + "x")), "cover 16 bytes of data, and the file has 17");
    has(refusal(file_of(good, data.substr(2))), "ends at byte 16 of the data, and the file has 14 bytes");
    has(refusal(file_of("\xff\xff\xff", "")), "not UTF-8 at byte 0");
    has(refusal(file_of("{\"a\xc0\x80\":1}", "")), "not UTF-8 at byte 3");
    has(refusal(file_of("{\"a\xed\xa0\x80\":1}", "")), "not UTF-8");
    has(refusal(file_of("{\"a\xf4\x90\x80\x80\":1}", "")), "not UTF-8");
    has(refusal(file_of("{\"a\xe2\x82", "")), "not UTF-8");
    has(refusal(file_of("{not json", "")), "not valid JSON");
    has(refusal(file_of("{\"t\":{", "")), "not valid JSON");
    has(refusal(file_of("{} x", "")), "not valid JSON");
    has(refusal(file_of(std::string("{}\0{", 4), "")), "zero byte");
    has(refusal(file_of("[]", "")), "must begin with '{'");
    has(refusal(file_of(" {}", "")), "must begin with '{'");
    has(refusal(file_of(R"({"t":5})", "")), "has a number in tensor \"t\"");
    has(refusal(file_of(R"({"t":[]})", "")), "has an array");
    has(refusal(file_of(R"({"t":null})", "")), "has null");
    const auto entry = [](const std::string& fields) { return "{\"t\":{" + fields + "}}"; };
    has(refusal(file_of(entry(R"("dtype":"I33","shape":[4],"data_offsets":[0,16])"), data)),
        "unknown dtype \"I33\"");
    has(refusal(file_of(entry(R"("dtype":7,"shape":[4],"data_offsets":[0,16])"), data)), "has a number");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":"4","data_offsets":[0,16])"), data)), "has a text");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[-4],"data_offsets":[0,16])"), data)),
        "negative size (-4)");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4.0],"data_offsets":[0,16])"), data)), "4.0");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[[4]],"data_offsets":[0,16])"), data)),
        "has an array");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4],"data_offsets":[-1,16])"), data)),
        "negative offset");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4],"data_offsets":[16])"), data)),
        "needs two data_offsets");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4],"data_offsets":[0,16,16])"), data)),
        "more than two");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4])"), data)), "has no data_offsets");
    has(refusal(file_of(entry(R"("shape":[4],"data_offsets":[0,16])"), data)), "has no dtype");
    has(refusal(file_of(entry(R"("dtype":"I32","data_offsets":[0,16])"), data)), "has no shape");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4],"data_offsets":[0,16],"x":1)"), data)),
        "unknown field \"x\"");
    has(refusal(file_of(entry(R"("dtype":"I32","shape":[4],"shape":[4],"data_offsets":[0,16])"), data)),
        "the field \"shape\" twice");
    const std::string tensor_t = R"("t":{"dtype":"I32","shape":[4],"data_offsets":[0,16]})";
    has(refusal(file_of("{" + tensor_t + "," + tensor_t + "}", data)), "has tensor \"t\" twice");
    has(refusal(file_of(R"({"__metadata__":{"a":1}})", "")), "__metadata__, which holds texts only");
    has(refusal(file_of(R"({"__metadata__":{"a":{}}})", "")), "__metadata__, which holds texts only");
    has(refusal(file_of(R"({"__metadata__":"a"})", "")), "__metadata__, which holds texts only");
    has(refusal(file_of(R"({"__metadata__":{"a":"1","a":"2"}})", "")), "the metadata has \"a\" twice");
    has(refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})", "")), "__metadata__ twice");
    has(refusal(
            file_of(R"({"t":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", std::string("\0\1\2", 3))),
        "has the byte 2 at 2");
    std::string deep(100'000, '[');
    has(refusal(file_of("{\"t\":" + deep, "")), "has an array");
    std::string many = R"({"t":{"dtype":"U8","data_offsets":[0,1],"shape":[1)";
    for (int i = 0; i < 300; ++i) many += ",1";
    has(refusal(file_of(many + "]}}", "x")), "more than 256 axes");
}

TEST_CASE("safetensors: what the format allows is accepted and comes back") {
    CHECK(
        accepted(file_of(R"({"t":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", bytes_of<float>({2.5F})))
            .tensors.at("t")
            .item() == 2.5);
    CHECK(accepted(file_of(R"({"t":{"dtype":"I32","shape":[2,0],"data_offsets":[0,0]}})", ""))
              .tensors.at("t")
              .shape() == Shape{2, 0});
    CHECK(accepted(file_of("{}      ", "")).tensors.empty());
    const auto file = accepted(file_of(
        R"({"__metadata__":{"framework":"pt","note":"\u00e4"},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
        "\x07"));
    CHECK(file.metadata.at("framework") == "pt");
    CHECK(file.metadata.at("note") == "\xc3\xa4");
    CHECK(accepted(
              file_of(
                  "{\n \"t\" : { \"dtype\" : \"U8\" , \"shape\" : [ 1 ] , \"data_offsets\" : [ 0 , 1 ] } }\n",
                  "\x07"))
              .tensors.at("t")
              .item() == 7);
}

TEST_CASE("safetensors: data at odd places is read right") {
    // 3 bytes of U8 first, and a header of odd length.
    for (const char* blanks : {"", " ", "  ", "   ", "    ", "     ", "      ", "       "}) {
        const std::string header =
            std::string(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                        R"("b":{"dtype":"F64","shape":[2],"data_offsets":[3,19]},)"
                        R"("c":{"dtype":"BF16","shape":[1],"data_offsets":[19,21]}})") +
            blanks;
        const auto file = accepted(file_of(
            header, "abc" + bytes_of<double>({0.1, -7.5}) + bytes_of<std::uint16_t>({bfloat16(3.0F).bits})));
        CHECK(file.tensors.at("b").to_vector() == std::vector<double>{0.1, -7.5});
        CHECK(reinterpret_cast<std::uintptr_t>(file.tensors.at("b").raw_data()) % 8 == 0);
        CHECK(file.tensors.at("c").item() == 3);
    }
}

TEST_CASE("safetensors: paths that cannot be read or written are named") {
    const TemporaryFolder folder;
    CHECK_THROWS_WITH_AS(load_safetensors(folder / "missing"),
                         doctest::Contains("missing cannot be read: No such file"), Error);
    CHECK_THROWS_WITH_AS(load_safetensors(folder.path()), doctest::Contains("no ordinary file"), Error);
    CHECK_THROWS_WITH_AS(save_safetensors(folder / "no/such/x", {}),
                         doctest::Contains("Create its folder first"), Error);
    CHECK_THROWS_WITH_AS(save_safetensors(folder.path(), {}), doctest::Contains("no ordinary file"), Error);
    CHECK_THROWS_AS(save_safetensors("", {}), Error);
    CHECK_THROWS_WITH_AS(save_safetensors(folder / "x", {{{"t", Tensor()}}, {}}),
                         doctest::Contains("\"t\" is undefined"), Error);
    CHECK_THROWS_AS(save_safetensors(folder / "x", {{{"__metadata__", zeros({1})}}, {}}), Error);
    CHECK_THROWS_WITH_AS(save_safetensors(folder / "x", {{{"\xff", zeros({1})}}, {}}),
                         doctest::Contains("not valid UTF-8"), Error);
    CHECK(folder.file_count() == 0);
}

TEST_CASE("write_file_atomically: the old content or the new one, through links, with the user's mask") {
    const TemporaryFolder folder;
    write_file_atomically(folder / "a", "first");
    write_file_atomically(folder / "a", "second");
    CHECK(test::read_file(folder / "a") == "second");
    std::filesystem::create_symlink("a", folder / "link");
    write_file_atomically(folder / "link", "third");
    CHECK(std::filesystem::is_symlink(folder / "link"));
    CHECK(test::read_file(folder / "a") == "third");
    const mode_t mask = umask(022);
    umask(mask);
    struct stat about {};
    REQUIRE(stat((folder / "a").c_str(), &about) == 0);
    CHECK((about.st_mode & 0777) == (0666 & ~mask));
    CHECK_THROWS_WITH_AS(write_file_atomically(folder / "a" + std::string(1, '\0') + "b", "cut off"),
                         doctest::Contains("zero byte"), Error);
    CHECK(test::read_file(folder / "a") == "third");
    write_file_atomically(folder / "empty", "");
    CHECK(std::filesystem::file_size(folder / "empty") == 0);
    CHECK(folder.file_count() == 3);
}
