#include "data/text.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/factories.h"
#include "data/tokenizer.h"
#include "tests/expect_error.h"
#include "tests/skip.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;
namespace files = std::filesystem;

namespace {

/// A folder that is removed when the test ends.
class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string name = (files::temp_directory_path() / "potluck_text_XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        files::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    std::string path() const { return path_.string(); }
    void write(const std::string& name, std::string_view content) const {
        files::create_directories((path_ / name).parent_path());
        std::ofstream(path_ / name, std::ios::binary) << content;
    }

private:
    files::path path_;
};

std::vector<std::string> names_of(const std::vector<data::TextFile>& texts, const TemporaryFolder& folder) {
    std::vector<std::string> names;
    for (const data::TextFile& text : texts) names.push_back(text.path.substr(folder.path().size() + 1));
    return names;
}

Tensor tokens(std::int64_t count) { return arange(0, count); }

}  // namespace

TEST_CASE("text: a file comes byte for byte") {
    const TemporaryFolder folder;
    const std::string content = std::string("\xef\xbb\xbf") + "caf\xc3\xa9\r\n\xff\xfe" +
                                std::string(9000, 'x') + std::string(1, '\0');
    folder.write("a.txt", content);  // a zero byte this late does not make it binary
    const auto texts = data::read_text(folder / "a.txt");
    REQUIRE(texts.size() == 1);
    CHECK(texts[0].content == content);
    CHECK(texts[0].path == folder / "a.txt");
}

TEST_CASE("text: a folder gives its text files in the order of their paths, without what is no text") {
    const TemporaryFolder folder;
    folder.write("b.txt", "b");
    folder.write("a/z.txt", "z");
    folder.write("a/deeper/y.md", "y");
    folder.write("c", "c");
    folder.write(".git/config", "no");
    folder.write("a/.hidden", "no");
    folder.write("build/log.txt", "no");
    folder.write("out/build.ninja", "no");
    folder.write("out/x.txt", "no");
    folder.write("image.png", std::string_view("\x89PNG\0\0", 6));
    folder.write("empty.txt", "");
    files::create_symlink(folder.path(), folder / "circle");
    files::create_symlink(folder / "b.txt", folder / "link.txt");
    const auto texts = data::read_text(folder.path());
    CHECK(names_of(texts, folder) == std::vector<std::string>{"a/deeper/y.md", "a/z.txt", "b.txt", "c"});
    // Several paths in the given order.
    CHECK(names_of(data::read_text({folder / "c", folder / "a"}), folder) ==
          std::vector<std::string>{"c", "a/deeper/y.md", "a/z.txt"});
}

TEST_CASE("text: what cannot be read is one clear error that names the path") {
    const TemporaryFolder folder;
    CHECK(contains(error_of([&] { data::read_text(folder / "missing.txt"); }), "missing.txt does not exist"));
    folder.write("empty.txt", "");
    CHECK(contains(error_of([&] { data::read_text(folder / "empty.txt"); }), "empty.txt is empty"));
    folder.write("binary", std::string_view("ab\0cd", 5));
    const std::string binary = error_of([&] { data::read_text(folder / "binary"); });
    CHECK(contains(binary, "is binary"));
    CHECK(contains(binary, "position 2"));
    const std::string nothing = error_of([&] { data::read_text(folder.path()); });
    CHECK(contains(nothing, "has no text file"));
    CHECK(contains(nothing, "1 empty and 1 binary"));
    CHECK(contains(error_of([] { data::read_text(""); }), "path is empty"));
    CHECK(contains(error_of([] { data::read_text(std::vector<std::string>{}); }), "no path"));
    CHECK(contains(error_of([] { data::read_text("/dev/null"); }), "neither a file nor a folder"));
    CHECK(contains(error_of([&] { data::read_text((folder / "empty.txt") + "/below"); }), "below"));
}

TEST_CASE("text: a file without permission to read is an error, alone or in a folder") {
    if (geteuid() == 0) {
        potluck::test::skip("root may read every file");
        return;
    }
    const TemporaryFolder folder;
    folder.write("a.txt", "text");
    folder.write("secret.txt", "text");
    files::permissions(folder / "secret.txt", files::perms::none);
    CHECK(contains(error_of([&] { data::read_text(folder / "secret.txt"); }), "Permission denied"));
    CHECK(contains(error_of([&] { data::read_text(folder.path()); }), "secret.txt"));
}

TEST_CASE("split: the end of every file is for validation, cut at a line, and no byte is lost or doubled") {
    std::string numbers;
    for (int i = 0; i < 100; ++i) numbers += std::to_string(1000 + i) + "\n";  // 5 bytes per line
    const std::vector<data::TextFile> texts{{"a", numbers}, {"b", "short"}, {"c", "x\n" + numbers + "z"}};
    const data::TextSplit split = data::split_text(texts, 0.1);
    CHECK(split.train == numbers.substr(0, 450) + "short" + "x\n" + numbers.substr(0, 455));
    CHECK(split.validation == numbers.substr(450) + numbers.substr(455) + "z");
    CHECK(split.train.size() + split.validation.size() == numbers.size() * 2 + 5 + 2 + 1);
}

TEST_CASE("split: fractions at the limits, and a line too long to cut at") {
    const std::vector<data::TextFile> line{{"a", std::string(100, 'x')}};
    CHECK(data::split_text(line, 0.0).validation.empty());
    CHECK(data::split_text(line, 0.0).train.size() == 100);
    CHECK(data::split_text(line, 0.25).validation.size() == 25);
    std::string euros;
    for (int i = 0; i < 10; ++i) euros += "\xe2\x82\xac";
    const data::TextSplit split =
        data::split_text({{"a", euros}}, 0.25);  // 7.5 bytes: back to a character's start
    CHECK(split.validation.size() == 9);
    CHECK(split.train + split.validation == euros);
    CHECK(data::split_text({{"a", ""}}, 0.5).train.empty());
    CHECK(contains(error_of([&] { data::split_text(line, 1.0); }), "1"));
    CHECK(contains(error_of([&] { data::split_text(line, -0.1); }), "-0.1"));
    CHECK(
        contains(error_of([&] { data::split_text(line, std::numeric_limits<double>::quiet_NaN()); }), "nan"));
}

TEST_CASE("token windows: a text shorter than a window and its target is refused with both numbers") {
    for (std::int64_t count : {0, 1, 8}) {
        const std::string text = error_of([&] { data::TokenWindows windows(tokens(count), 8); });
        CHECK(contains(text, std::to_string(count) + " tokens"));
        CHECK(contains(text, "window of 8"));
        CHECK(contains(text, "at least 9"));
    }
}

TEST_CASE("token windows: the target is the input moved on by one") {
    const data::TokenWindows one(tokens(9), 8);
    CHECK(one.size() == 1);
    CHECK(one.get(0, {}).input.to_vector<std::int64_t>() ==
          std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(one.get(0, {}).target.to_vector<std::int64_t>() ==
          std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8});
    const data::TokenWindows two(tokens(10), 8);
    CHECK(two.size() == 2);
    CHECK(two.get(1, {}).input.to_vector<std::int64_t>().front() == 1);
    CHECK(two.get(1, {}).target.to_vector<std::int64_t>().back() == 9);
    CHECK(contains(error_of([&] { two.get(2, {}); }), "2 of 2"));
}

TEST_CASE("token windows: strides, and tokens of every integer dtype") {
    const data::TokenWindows windows(tokens(12), 4, 3);  // starts 0, 3, 6
    CHECK(windows.size() == 3);
    CHECK(windows.get(2, {}).target.to_vector<std::int64_t>() == std::vector<std::int64_t>{7, 8, 9, 10});
    for (DType dtype : {DType::u8, DType::i32, DType::i64}) {
        const data::TokenWindows text(data::ByteTokenizer::encode("hello\xff", dtype), 5);
        const data::Example item = text.get(0, {});
        CHECK(item.input.dtype() == DType::i64);
        CHECK(item.target.to_vector<std::int64_t>() == std::vector<std::int64_t>{'e', 'l', 'l', 'o', 255});
    }
    const data::TokenWindows every_second(tokens(20).alias({10}, {2}, 0), 4);
    CHECK(every_second.get(1, {}).input.to_vector<std::int64_t>() == std::vector<std::int64_t>{2, 4, 6, 8});
}

TEST_CASE("token windows: windows, strides, shapes and dtypes out of range are refused") {
    CHECK(contains(error_of([] { data::TokenWindows windows(tokens(9), 0); }), "window is 0"));
    CHECK(contains(error_of([] { data::TokenWindows windows(tokens(9), -3); }), "window is -3"));
    CHECK(contains(error_of([] { data::TokenWindows windows(tokens(9), 2, 0); }), "stride is 0"));
    CHECK(contains(error_of([] { data::TokenWindows windows(zeros({9}), 2); }), "f32"));
    CHECK(contains(error_of([] { data::TokenWindows windows(zeros({3, 3}, {DType::i64}), 2); }), "(3, 3)"));
    CHECK(contains(error_of([] { data::TokenWindows windows(Tensor(), 2); }), "undefined"));
}

TEST_CASE("token windows: training and validation windows share no byte") {
    std::string text;
    for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i < 180 ? 'a' : 'b'));
    const data::TextSplit split = data::split_text({{"a", text}}, 0.1);
    const data::TokenWindows train(data::ByteTokenizer::encode(split.train), 8);
    const data::TokenWindows validation(data::ByteTokenizer::encode(split.validation), 8);
    for (std::int64_t i = 0; i < train.size(); ++i)
        for (std::int64_t id : train.get(i, {}).target.to_vector<std::int64_t>()) CHECK(id == 'a');
    for (std::int64_t i = 0; i < validation.size(); ++i)
        for (std::int64_t id : validation.get(i, {}).input.to_vector<std::int64_t>()) CHECK(id == 'b');
}
