#include "data/image_folder.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "core/factories.h"
#include "data/image_transform.h"
#include "data/loader.h"
#include "tests/data/image_files.h"
#include "tests/expect_error.h"

using namespace potluck;
using data::ImageFolder;
using data::OnDamaged;
using potluck::test::contains;
using potluck::test::error_of;
using potluck::test::TemporaryFolder;
using Items = std::vector<std::int64_t>;

namespace {

/// A grey image of 2 x 2 whose pixels are all `value`.
std::string plain(int value) { return data::encode_png(full({2, 2, 1}, value, {DType::u8})); }

/// Two classes, ten images; those with the numbers in `damaged` are cut off.
void fill(const TemporaryFolder& folder, const Items& damaged) {
    for (int i = 0; i < 10; ++i) {
        std::string file = plain(10 * i);
        if (std::find(damaged.begin(), damaged.end(), i) != damaged.end()) file.resize(file.size() / 2);
        folder.write((i < 6 ? "apple/" : "pear/") + std::to_string(i) + ".png", file);
    }
}

/// The first pixel of every item of an epoch, in tens, and the labels behind them.
Items read(data::Loader& loader) {
    Items seen, labels;
    for (auto [x, y] : loader)
        for (std::int64_t i = 0; i < y.count(); ++i) {
            seen.push_back(x.to_vector<std::int64_t>()[static_cast<std::size_t>(i * 12)] / 10);
            labels.push_back(y.to_vector<std::int64_t>()[static_cast<std::size_t>(i)]);
        }
    seen.insert(seen.end(), labels.begin(), labels.end());
    return seen;
}

}  // namespace

TEST_CASE("image folder: classes and images are in the order of their names") {
    const TemporaryFolder folder;
    for (const char* name : {"dog/2.png", "dog/10.PNG", "dog/night/1.png", "Cat/b.jpg", "Cat/a.JPEG"})
        folder.write(name, plain(50));
    folder.write("dog/notes.txt", "not an image");
    folder.write("dog/.hidden.png", "x");
    folder.write(".git/1.png", "x");
    folder.write("readme.png", "x");
    const ImageFolder photos(folder.path().string());
    CHECK(photos.classes() == std::vector<std::string>{"Cat", "dog"});
    REQUIRE(photos.size() == 5);
    std::vector<std::string> names;
    Items labels;
    for (std::int64_t i = 0; i < photos.size(); ++i) {
        names.push_back(std::filesystem::relative(photos.path(i), folder.path()).string());
        labels.push_back(photos.label(i));
    }
    CHECK(names ==
          std::vector<std::string>{"Cat/a.JPEG", "Cat/b.jpg", "dog/10.PNG", "dog/2.png", "dog/night/1.png"});
    CHECK(labels == Items{0, 0, 1, 1, 1});
    const data::Example example = photos.get(3, {});
    CHECK(example.input.shape() == Shape{2, 2, 3});
    CHECK(example.target.item<std::int64_t>() == 1);
    CHECK(example.target.dtype() == DType::i64);
    CHECK(ImageFolder(folder.path().string(), {.channels = 1}).get(0, {}).input.shape() == Shape{2, 2, 1});
    CHECK(photos.skipped().empty());
}

TEST_CASE("image folder: links to classes and files are followed, but not round in a circle") {
    const TemporaryFolder elsewhere, folder;
    elsewhere.write("1.png", plain(1));
    folder.write("b/2.png", plain(2));
    std::filesystem::create_directory_symlink(elsewhere.path(), folder.path() / "a");
    std::filesystem::create_symlink(elsewhere.path() / "1.png", folder.path() / "b" / "3.png");
    std::filesystem::create_directory_symlink(folder.path(), folder.path() / "b" / "round");
    const ImageFolder photos(folder.path().string());
    CHECK(photos.classes() == std::vector<std::string>{"a", "b"});
    CHECK(photos.size() == 3);
    CHECK(photos.get(2, {}).input.to_vector<std::int64_t>()[0] == 1);
}

TEST_CASE("image folder: folders that cannot serve are refused") {
    const TemporaryFolder folder;
    const auto text_of = [&](const std::filesystem::path& path) {
        return error_of([&] { ImageFolder(path.string()); });
    };
    CHECK(contains(text_of(folder.path() / "missing"), "missing: No such file"));
    CHECK(contains(text_of(folder.path()), "has no folder in it"));
    folder.write("empty/notes.txt", "x");
    CHECK(contains(text_of(folder.path()), "empty has no file in it"));
    CHECK(contains(text_of(folder.path()), "1 other files"));
    folder.write("empty/1.png", plain(1));
    ImageFolder photos(folder.path().string());
    CHECK(contains(error_of([&] { photos.get(1, {}); }), "image 1 of 1"));
    CHECK(contains(error_of([&] { (void)photos.path(-1); }), "image -1 of 1"));
    CHECK(contains(error_of([&] { ImageFolder(folder.path().string(), {.channels = 2}); }), "channels is 2"));
    CHECK(contains(error_of([&] { ImageFolder(folder.path().string(), {.most_pixels = 0}); }),
                   "most_pixels is 0"));
    const ImageFolder other = std::move(photos);
    CHECK(contains(error_of([&] { (void)photos.size(); }), "moved from"));
    CHECK(contains(error_of([&] { (void)photos.skipped(); }), "moved from"));
}

TEST_CASE("image folder: a damaged image stops the loop, and its name and the reason are told") {
    const TemporaryFolder folder;
    fill(folder, {7});
    for (const int workers : {0, 1, 4}) {
        data::Loader loader(ImageFolder(folder.path().string()), {.batch = 2, .workers = workers});
        for (int i = 0; i < 3; ++i) loader.next();
        const std::string text = error_of([&] { loader.next(); });
        CHECK(contains(text, "item 7 of epoch 0 failed"));
        CHECK(contains(text, "pear/7.png: the PNG is damaged"));
    }
}

TEST_CASE("image folder: skipped images are replaced by the next ones, the same for all workers and shares") {
    const TemporaryFolder folder;
    fill(folder, {2, 5, 8, 9});
    const Items whole = {0, 1, 3, 3, 4, 6, 6, 7, 0, 0, /*labels*/ 0, 0, 0, 0, 0, 1, 1, 1, 0, 0};
    Items shuffled;
    for (const int workers : {0, 1, 4}) {
        const ImageFolder photos(folder.path().string(), {.damaged = OnDamaged::skip});
        data::Loader loader(photos, {.batch = 3, .workers = workers});
        CHECK(read(loader) == whole);
        CHECK(read(loader) == whole);
        const std::vector<data::SkippedImage> skipped =
            photos.skipped();  // the loader's copy counts here, too
        REQUIRE(skipped.size() == 4);
        CHECK(contains(skipped[1].path, "apple/5.png"));
        CHECK(contains(skipped[1].reason, "the PNG is damaged"));

        data::Loader mixed(photos, {.batch = 3, .shuffle = true, .workers = workers, .seed = 2});
        const Items order = read(mixed);
        if (shuffled.empty()) shuffled = order;
        CHECK(order == shuffled);

        // Shares, and a resumed loop that has not yet met the damaged ones.
        data::Loader left(photos, {.batch = 4, .workers = workers, .share = data::Share{0, 2}});
        CHECK(left.next().targets.to_vector<std::int64_t>() == Items{0, 0});
        data::Loader resumed(ImageFolder(folder.path().string(), {.damaged = OnDamaged::skip}),
                             {.batch = 3, .workers = workers});
        data::Loader before(photos, {.batch = 3, .workers = workers});
        before.next();
        resumed.set_state(before.state());
        while (resumed.state().epoch == 0)
            CHECK(resumed.next().inputs.to_vector() == before.next().inputs.to_vector());
    }
}

TEST_CASE("image folder: when no image can be read there is an Error, also with skip") {
    const TemporaryFolder folder;
    folder.write("a/1.png", "");
    folder.write("a/2.png", "x");
    const ImageFolder photos(folder.path().string(), {.damaged = OnDamaged::skip});
    for (int i = 0; i < 2; ++i) {
        CHECK_THROWS_AS(photos.get(0, {}), data::DamagedImage);
        CHECK_THROWS_AS(photos.get(1, {}), data::DamagedImage);
    }
    CHECK(photos.skipped().size() == 2);
    // A file that is gone is not damaged: somebody changes the folder.
    folder.write("a/3.png", plain(3));
    const ImageFolder more(folder.path().string(), {.damaged = OnDamaged::skip});
    std::filesystem::remove(folder.path() / "a" / "3.png");
    CHECK(contains(error_of([&] { more.get(2, {}); }), "cannot read"));
}

TEST_CASE("image folder: images of several sizes make a batch when a transform makes them alike") {
    const TemporaryFolder folder;
    folder.write("a/1.png", data::encode_png(test::smooth_image(5, 9, 4)));
    folder.write("a/2.jpg", test::jpeg_file({.pixels = test::smooth_image(30, 20, 1)}));
    folder.write("b/3.jpg", test::jpeg_file({.pixels = test::smooth_image(8, 8, 3)}));
    const ImageFolder photos(folder.path().string());
    data::Loader plain_loader(photos, {.batch = 3});
    CHECK(contains(error_of([&] { plain_loader.next(); }), "cannot be in one batch"));
    data::Loader loader(data::TransformedDataset(photos, data::ImageTransform({.resize = {6, 7}})),
                        {.batch = 3, .workers = 2});
    const data::Batch batch = loader.next();
    CHECK(batch.inputs.shape() == Shape{3, 3, 6, 7});
    CHECK(batch.targets.to_vector<std::int64_t>() == Items{0, 0, 1});
}
