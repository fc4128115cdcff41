#include "data/image_transform.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "core/factories.h"
#include "data/loader.h"
#include "tests/expect_error.h"

using namespace potluck;
using data::ImageSize;
using data::ImageTransform;
using potluck::test::contains;
using potluck::test::error_of;
using Bytes = std::vector<std::uint8_t>;

namespace {

Bytes bytes_of(const Tensor& image) { return image.to_vector<std::uint8_t>(); }

/// A random image whose pixels follow from the seed.
Tensor random_image(const Shape& shape, std::uint64_t seed = 1) {
    Generator generator(seed);
    return randint(0, 256, shape, {DType::u8}, &generator);
}

/// By its definition: every new pixel is a weighted mean over all old ones, in two dimensions at once.
std::vector<double> resized(const Tensor& image, ImageSize size) {
    const std::int64_t height = image.size(0), width = image.size(1), channels = image.size(2);
    const auto weight = [](std::int64_t i, std::int64_t old_pixel, std::int64_t old_size,
                           std::int64_t new_size) {
        const double ratio = static_cast<double>(old_size) / static_cast<double>(new_size);
        const double distance =
            std::abs(static_cast<double>(old_pixel) + 0.5 - (static_cast<double>(i) + 0.5) * ratio);
        return std::max(0.0, 1.0 - distance / std::max(1.0, ratio));
    };
    const Bytes pixels = bytes_of(image);
    std::vector<double> result;
    for (std::int64_t y = 0; y < size.height; ++y)
        for (std::int64_t x = 0; x < size.width; ++x)
            for (std::int64_t c = 0; c < channels; ++c) {
                double sum = 0.0, weights = 0.0;
                for (std::int64_t row = 0; row < height; ++row)
                    for (std::int64_t column = 0; column < width; ++column) {
                        const double w =
                            weight(y, row, height, size.height) * weight(x, column, width, size.width);
                        weights += w;
                        sum += w * pixels[static_cast<std::size_t>((row * width + column) * channels + c)];
                    }
                result.push_back(sum / weights);
            }
    return result;
}

RandomKey key_of(std::uint64_t number) { return data::item_key(5, 0, static_cast<std::int64_t>(number)); }

}  // namespace

TEST_CASE("image transform: resize is a weighted mean of the old pixels") {
    const Tensor image = random_image({13, 17, 3});
    for (const ImageSize size : {ImageSize(13, 17), ImageSize(26, 34), ImageSize(5, 4), ImageSize(1, 1),
                                 ImageSize(40, 3), ImageSize(3, 40), ImageSize(12, 18)}) {
        const Tensor result = data::resize_image(image, size);
        REQUIRE(result.shape() == Shape{size.height, size.width, 3});
        const Bytes pixels = bytes_of(result);
        const std::vector<double> expected = resized(image, size);
        double furthest = 0.0;
        for (std::size_t i = 0; i < pixels.size(); ++i)
            furthest = std::max(furthest, std::abs(pixels[i] - expected[i]));
        CHECK(furthest <= 0.501);  // half for the rounding
    }
    const Tensor step = tensor(Bytes{0, 255}, {1, 2, 1});
    CHECK(bytes_of(data::resize_image(step, {1, 4})) == Bytes{0, 64, 191, 255});
    CHECK(bytes_of(data::resize_image(step, {1, 1})) == Bytes{128});
    CHECK(bytes_of(data::resize_image(tensor(Bytes{9}, {1, 1, 1}), {2, 3})) == Bytes(6, 9));
    const Tensor white = full({30, 20, 1}, 255, {DType::u8});
    CHECK(bytes_of(data::resize_image(white, 7)) == Bytes(49, 255));
}

TEST_CASE("image transform: crop, also beyond the edges") {
    const Tensor image = tensor(Bytes{1, 2, 3, 4, 5, 6}, {2, 3, 1});
    CHECK(bytes_of(data::crop_image(image, 0, 1, {2, 2})) == Bytes{2, 3, 5, 6});
    CHECK(bytes_of(data::crop_image(image, -1, -1, {3, 3})) == Bytes{0, 0, 0, 0, 1, 2, 0, 4, 5});
    CHECK(bytes_of(data::crop_image(image, 1, 2, {2, 2})) == Bytes{6, 0, 0, 0});
    for (const std::int64_t far :
         {std::int64_t{2}, std::int64_t{3}, std::int64_t{-2}, std::int64_t{1000},
          std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()})
        CHECK(bytes_of(data::crop_image(image, far, 0, {2, 1})) == Bytes{0, 0});
    for (const std::int64_t far :
         {std::int64_t{3}, std::int64_t{-1}, std::int64_t{-1000}, std::numeric_limits<std::int64_t>::max(),
          std::numeric_limits<std::int64_t>::min()})
        CHECK(bytes_of(data::crop_image(image, 0, far, {2, 1})) == Bytes{0, 0});
    const Tensor colours = random_image({4, 5, 3});
    CHECK(bytes_of(data::crop_image(colours, 0, 0, {4, 5})) == bytes_of(colours));
}

TEST_CASE("image transform: flip, and normalise to planes of f32") {
    const Tensor image = tensor(Bytes{1, 2, 3, 4, 5, 6, 7, 8}, {2, 2, 2});
    CHECK(bytes_of(data::flip_image(image)) == Bytes{3, 4, 1, 2, 7, 8, 5, 6});
    CHECK(bytes_of(data::flip_image(data::flip_image(image))) == bytes_of(image));
    const Tensor planes = data::normalize_image(image, {0.5, 0.0}, {0.25, 1.0});
    CHECK(planes.shape() == Shape{2, 2, 2});
    CHECK(planes.dtype() == DType::f32);
    CHECK(planes.to_vector<float>()[1] == static_cast<float>((3 / 255.0 - 0.5) / 0.25));
    CHECK(planes.to_vector<float>()[4] == static_cast<float>(2 / 255.0));
    const Tensor plain = data::normalize_image(tensor(Bytes{0, 255}, {1, 2, 1}));
    CHECK(plain.to_vector() == std::vector<double>{0.0, 1.0});
}

TEST_CASE("image transform: without options it only normalises, and the steps come in their order") {
    const Tensor image = random_image({6, 8, 3});
    CHECK(ImageTransform()(image, key_of(1)).to_vector() == data::normalize_image(image).to_vector());
    const ImageTransform all({.resize = {4, 6}, .padding = 1, .crop = {4, 4}, .flip = 1.0});
    const Tensor expected = data::normalize_image(
        data::flip_image(data::crop_image(data::resize_image(image, {4, 6}), 0, 1, {4, 4})));
    CHECK(all(image, key_of(1)).to_vector() == expected.to_vector());
    const ImageTransform padded({.padding = 2});
    CHECK(padded(image, key_of(1)).shape() == Shape{3, 10, 12});
    const ImageTransform middle({.crop = 4});
    CHECK(middle(image, key_of(3)).to_vector() ==
          data::normalize_image(data::crop_image(image, 1, 2, 4)).to_vector());
}

TEST_CASE("image transform: what is random follows from the key, and every place is as likely as another") {
    Tensor image = Tensor::empty({4, 5, 1}, {DType::u8});
    for (std::int64_t i = 0; i < 20; ++i) image.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i + 1);
    const ImageTransform transform({.padding = 1, .crop = {4, 5}, .random_crop = true, .flip = 0.25});
    std::vector<int> places(9, 0);
    int flips = 0;
    constexpr int rounds = 9000;
    for (int i = 0; i < rounds; ++i) {
        const RandomKey key = key_of(static_cast<std::uint64_t>(i));
        const std::vector<double> seen = transform(image, key).to_vector();
        if (i % 100 == 0) CHECK(transform(image, key).to_vector() == seen);
        // Two neighbours tell the place and the direction: pixel (1, 2) is the image's (row, column + 1).
        const auto at = [&](std::size_t row, std::size_t column) {
            return static_cast<int>(std::lround(seen[row * 5 + column] * 255)) - 1;
        };
        const bool is_flipped = at(1, 2) < at(1, 1);
        const int middle = at(1, 2);
        const int row = middle / 5, column = middle % 5 - 1;
        REQUIRE(row >= 0);
        REQUIRE(row < 3);
        REQUIRE(column >= 0);
        REQUIRE(column < 3);
        ++places[static_cast<std::size_t>(row * 3 + column)];
        flips += is_flipped ? 1 : 0;
    }
    // Six standard deviations of a binomial count.
    for (const int count : places) CHECK(std::abs(count - rounds / 9) < 6 * std::sqrt(rounds * 8 / 81.0));
    CHECK(std::abs(flips - rounds / 4) < 6 * std::sqrt(rounds * 3 / 16.0));
    const ImageTransform never({.flip = 0.0}), always({.flip = 1.0});
    for (std::uint64_t i = 0; i < 100; ++i) {
        CHECK(never(image, key_of(i)).to_vector() == data::normalize_image(image).to_vector());
        CHECK(always(image, key_of(i)).to_vector() ==
              data::normalize_image(data::flip_image(image)).to_vector());
    }
}

TEST_CASE("image transform: in a loader, the same bits for any number of workers, others in every epoch") {
    const data::TransformedDataset dataset(
        data::TensorDataset(random_image({20, 6, 6, 3}), arange(0, 20)),
        ImageTransform({.padding = 2, .crop = 6, .random_crop = true, .flip = 0.5}));
    std::vector<std::vector<double>> epochs;
    for (const int workers : {0, 1, 4}) {
        data::Loader loader(dataset, {.batch = 3, .shuffle = true, .workers = workers, .seed = 3});
        for (std::size_t epoch = 0; epoch < 3; ++epoch) {
            std::vector<double> seen;
            for (auto [x, y] : loader) {
                CHECK(x.shape() == Shape{y.count(), 3, 6, 6});
                for (const double value : x.to_vector()) seen.push_back(value);
            }
            if (workers == 0)
                epochs.push_back(seen);
            else
                CHECK(seen == epochs[epoch]);
        }
    }
    CHECK(std::set(epochs.begin(), epochs.end()).size() == 3);

    // Unshuffled, so that only the random numbers differ; and a resumed loop draws what the unbroken one did.
    data::Loader whole(dataset, {.batch = 4, .workers = 2});
    std::vector<std::vector<double>> batches;
    for (int i = 0; i < 15; ++i) batches.push_back(whole.next().inputs.to_vector());
    CHECK(batches[0] != batches[5]);
    CHECK(batches[0] != batches[10]);
    data::Loader first(dataset, {.batch = 4, .workers = 4});
    for (int i = 0; i < 7; ++i) first.next();
    data::Loader second(dataset, {.batch = 4});
    second.set_state(first.state());
    for (std::size_t i = 7; i < 15; ++i) CHECK(second.next().inputs.to_vector() == batches[i]);

    // Shares make up the whole batch.
    data::Loader left(dataset, {.batch = 4, .share = data::Share{0, 1}});
    data::Loader right(dataset, {.batch = 4, .workers = 2, .share = data::Share{1, 3}});
    for (std::size_t i = 0; i < 7; ++i) {
        std::vector<double> both = left.next().inputs.to_vector();
        for (const double value : right.next().inputs.to_vector()) both.push_back(value);
        CHECK(both == batches[i]);
    }
}

TEST_CASE("image transform: a transform's random numbers are not those of the dataset below it") {
    const auto draw = [](RandomKey key) {
        Generator generator = data::generator_of(key);
        return rand({2}, {}, &generator);
    };
    const data::FunctionDataset numbers(3, [&](std::int64_t, RandomKey key) {
        return data::Example{draw(key), tensor(1.0)};
    });
    const auto keep_both = [&](const Tensor& input, RandomKey key) {
        std::vector<double> all = input.to_vector();
        for (const double number : draw(key).to_vector()) all.push_back(number);
        return tensor(all, {static_cast<std::int64_t>(all.size())});
    };
    const data::TransformedDataset twice(data::TransformedDataset(numbers, keep_both), keep_both);
    CHECK(twice.size() == 3);
    std::set<double> seen;
    for (std::int64_t i = 0; i < 3; ++i) {
        const data::Example example = twice.get(i, data::item_key(1, 0, i));
        CHECK(example.target.item() == 1.0);
        for (const double number : example.input.to_vector()) seen.insert(number);
    }
    CHECK(seen.size() == 18);
    CHECK(contains(error_of([&] { data::TransformedDataset(numbers, {}); }), "the function is empty"));
    data::TransformedDataset moved(numbers, keep_both);
    const data::TransformedDataset other = std::move(moved);
    CHECK(contains(error_of([&] { (void)moved.size(); }), "moved from"));
    CHECK(contains(error_of([&] { moved.get(0, {}); }), "moved from"));
}

TEST_CASE("image transform: what makes no sense is refused with its values") {
    const Tensor image = random_image({4, 5, 3});
    const auto options = [](data::ImageTransformOptions given) {
        return error_of([&] { (void)ImageTransform(given); });
    };
    CHECK(contains(options({.resize = {3, 0}}), "3 x 0"));
    CHECK(contains(options({.crop = -2}), "-2 x -2"));
    CHECK(contains(options({.padding = -1}), "padding is -1"));
    CHECK(contains(options({.random_crop = true}), "crop is not"));
    CHECK(contains(options({.flip = 1.5}), "flip is 1.5"));
    CHECK(contains(options({.flip = std::nan("")}), "flip is nan"));
    CHECK(contains(options({.mean = {INFINITY}}), "a mean is inf"));
    CHECK(contains(options({.stddev = {0.0}}), "a stddev is 0"));
    CHECK(contains(error_of([&] {
                       (void)ImageTransform({.crop = {5, 5}})(image, {});
                   }),
                   "the crop of 5 x 5 is larger than the image, which is 4 x 5"));
    CHECK(contains(error_of([&] { (void)ImageTransform({.mean = {0.5}})(image, {}); }),
                   "mean has 1 numbers for an image of 3 channels"));
    for (const Tensor& wrong : {Tensor(), zeros({4, 5, 3}), zeros({4, 5}, {DType::u8}),
                                zeros({0, 5, 3}, {DType::u8}), image.alias({5, 4, 3}, {3, 15, 1}, 0)}) {
        CHECK(contains(error_of([&] { data::flip_image(wrong); }), "[flip_image] the image is"));
        CHECK(contains(error_of([&] { data::crop_image(wrong, 0, 0, 2); }), "[crop_image]"));
        CHECK(contains(error_of([&] { data::resize_image(wrong, 2); }), "[resize_image]"));
        CHECK(contains(error_of([&] { data::normalize_image(wrong); }), "[normalize_image]"));
        CHECK(contains(error_of([&] { (void)ImageTransform()(wrong, {}); }), "[ImageTransform]"));
    }
    CHECK(contains(error_of([&] { data::resize_image(image, {0, 3}); }), "0 x 3"));
    CHECK(contains(error_of([&] { data::resize_image(image, {3, 1 << 21}); }), "3 x 2097152"));
}
