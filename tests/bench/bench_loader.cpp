// How many items a second a loader hands out with 0, 1 and 2 workers, one after the other in each of several rounds: images
// of files (decoded, resized to 256 x 256, cropped to 224 x 224, flipped, normalised), small images of memory (28 x 28,
// cropped and normalised), and windows of 64 tokens. The loop does nothing with them, so the loader is all that is measured:
// medians of the rounds, and seconds of the processor for when other programs run on the machine.
//
//     bench_loader [folder of images, one folder for each class]     (default: 300 x 400 PNG that it makes itself)

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/factories.h"
#include "data/image_folder.h"
#include "data/image_transform.h"
#include "data/loader.h"
#include "data/text.h"
#include "tests/bench/measure.h"

namespace {

using namespace potluck;
namespace fs = std::filesystem;

constexpr int most_workers = 2, rounds = 5;

struct Speed {
    double items_per_second = 0.0;
    double processor_microseconds = 0.0;  // of an item, of all threads together
};

/// Of reading `batches` batches, and what the workers read ahead meanwhile.
Speed speed_of(data::Loader& loader, std::int64_t batches) {
    loader.next();  // the workers are there
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t processor_start = std::clock();
    std::int64_t items = 0;
    for (std::int64_t i = 0; i < batches; ++i) items += loader.next().inputs.size(0);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const double processor_seconds = static_cast<double>(std::clock() - processor_start) / CLOCKS_PER_SEC;
    const auto count = static_cast<double>(items);
    return {count / seconds.count(), processor_seconds / count * 1e6};
}

void measure(const char* name, const std::shared_ptr<const data::Dataset>& dataset, std::int64_t batch,
             std::int64_t batches) {
    std::vector<std::vector<double>> rates(most_workers + 1), costs(most_workers + 1);
    for (int round = 0; round < rounds; ++round)
        for (std::size_t workers = 0; workers < rates.size(); ++workers) {
            data::Loader loader(dataset,
                                {.batch = batch, .shuffle = true, .workers = static_cast<int>(workers)});
            const Speed speed = speed_of(loader, batches);
            rates[workers].push_back(speed.items_per_second);
            costs[workers].push_back(speed.processor_microseconds);
        }
    for (std::size_t workers = 0; workers < rates.size(); ++workers)
        fmt::print("{:<22} {} workers {:>9.0f} a second (at most {:.0f}), {:.1f} us of the processor each\n",
                   name, workers, bench::median(rates[workers]),
                   *std::max_element(rates[workers].begin(), rates[workers].end()),
                   bench::median(costs[workers]));
}

/// 64 images that do not compress much, as photos do.
void make_images(const fs::path& folder) {
    fs::create_directories(folder / "only");
    for (int i = 0; i < 64; ++i) {
        Tensor image = Tensor::empty({300, 400, 3}, {DType::u8});
        const std::vector<std::uint8_t> noise =
            randint(0, 24, {300, 400, 3}, {DType::u8}).to_vector<std::uint8_t>();
        for (std::size_t p = 0; p < noise.size(); ++p)
            image.data<std::uint8_t>()[p] = static_cast<std::uint8_t>(noise[p] + p / 1800 + p % 1200 / 20);
        data::write_png((folder / "only" / fmt::format("{}.png", i)).string(), image);
    }
}

void measure_all(const std::string& images) {
    using data::ImageTransform, data::TransformedDataset;
    measure("images of files",
            std::make_shared<TransformedDataset>(
                data::ImageFolder(images),
                ImageTransform({.resize = 256, .crop = 224, .random_crop = true, .flip = 0.5})),
            16, 12);
    measure("images of 28 x 28",
            std::make_shared<TransformedDataset>(
                data::TensorDataset(randint(0, 256, {10'000, 28, 28, 1}, {DType::u8}), arange(0, 10'000)),
                ImageTransform({.padding = 2, .crop = 28, .random_crop = true, .flip = 0.5})),
            100, 200);
    measure("windows of 64 tokens",
            std::make_shared<data::TokenWindows>(randint(0, 256, {1'000'000}, {DType::u8}), 64), 4, 5000);
}

}  // namespace

int main(int argc, char** argv) {
    const fs::path made = fs::temp_directory_path() / "potluck_bench_loader";
    try {
        if (argc < 2) make_images(made);
        measure_all(argc < 2 ? made.string() : argv[1]);
        fs::remove_all(made);
    } catch (const std::exception& error) {
        fs::remove_all(made);
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
}
