// A small convolutional network learns to tell ten kinds of clothes apart: files of images, transforms on workers, and the
// Trainer. `6_fashion_mnist --help` lists the options.
//
// The images are Debian's package dataset-fashion-mnist (H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image
// Dataset for Benchmarking Machine Learning Algorithms", 2017): 60,000 to learn from and 10,000 for the test, 28 x 28, grey.
// Five epochs take 300 seconds of a processor core (two cores: about 190 seconds) and recognise 91.5 % of the test images.

#include <potluck.h>

#include <array>
#include <filesystem>
#include <memory>
#include <string>

#include <fmt/core.h>

#include "examples/command_line.h"

using namespace potluck;
namespace fs = std::filesystem;

namespace {

struct Settings : training::Options {
    std::string data = "/usr/share/datasets/fashion-mnist";
    std::int64_t epochs = 5;
    double weight_decay = 0.05;
    std::uint64_t seed = 42;
    std::int64_t checkpoint_every = 600;
    std::int64_t log_every = 100;
    std::string run_folder, resume;
    Settings() { batch = 100; }
};

std::optional<int> read_command_line(int argc, char** argv, Settings& settings) {
    using command_line::at_least;
    CLI::App app("Trains a convolutional network on Fashion-MNIST. Ctrl-C saves a checkpoint.");
    app.option_defaults()->always_capture_default();
    app.add_option("--data", settings.data, "the folder of the four files of the dataset");
    app.add_option("--epochs", settings.epochs, "how often every image is learned from")->check(at_least(1));
    app.add_option("--weight-decay", settings.weight_decay, "pull of weights towards 0")
        ->check(at_least(0.0));
    app.add_option("--seed", settings.seed, "the same seed gives the same bits")->check(at_least(0));
    app.add_option("--checkpoint-every", settings.checkpoint_every, "steps; 0: only at the end")
        ->check(at_least(0));
    command_line::add_training_options(app, settings, "images", /*least_batch=*/2);
    app.add_option("--log-every", settings.log_every, "steps between lines when the output is no terminal")
        ->check(at_least(1));
    app.add_option("--run-folder", settings.run_folder, "where the run is kept (default: nowhere)");
    app.add_option("--resume", settings.resume,
                   "folder of a run to go on with; give its other options again");
    if (const std::optional<int> status =
            command_line::read_training(app, argc, argv, settings, {"--resume"}))
        return status;
    if (!settings.resume.empty() && !settings.run_folder.empty())
        throw Error("resume", "--resume names the run folder already. Leave --run-folder out.");
    if (!settings.resume.empty()) settings.run_folder = settings.resume;
    if (settings.run_folder.empty()) settings.checkpoint_every = 0;
    return std::nullopt;
}

/// Images (count, 28, 28, 1) u8 with their classes (count) i64: those named `part`, "train" or "t10k".
data::TensorDataset read_images(const std::string& folder, const std::string& part) {
    const fs::path images = fs::path(folder) / (part + "-images-idx3-ubyte.gz");
    const fs::path labels = fs::path(folder) / (part + "-labels-idx1-ubyte.gz");
    for (const fs::path& file : {images, labels})
        if (!fs::exists(file))
            throw Error("data",
                        fmt::format("{} is not there. On Debian and Ubuntu `sudo apt-get install "
                                    "dataset-fashion-mnist` brings it; or name its folder with --data.",
                                    file.string()));
    return data::TensorDataset(data::read_idx(images.string()).unsqueeze(3),
                               data::read_idx(labels.string()).to(DType::i64));
}

struct Net : nn::Module {
    nn::Conv2d first{1, 32, 3, {.padding = 1}}, second{32, 64, 3, {.padding = 1}};
    nn::BatchNorm first_norm{32}, second_norm{64};
    nn::Linear hidden{3136, 128}, head{128, 10};

    void members(nn::Members& m) override {
        m("first", first)("first_norm", first_norm)("second", second)("second_norm", second_norm);
        m("hidden", hidden)("head", head);
    }
    Tensor forward(const Tensor& images) override {                 // (batch, 1, 28, 28)
        Tensor x = max_pool2d(relu(first_norm(first(images))), 2);  // (batch, 32, 14, 14)
        x = max_pool2d(relu(second_norm(second(x))), 2);            // (batch, 64, 7, 7), 3136 numbers each
        return head(relu(hidden(flatten(x, 1))));                   // (batch, 10)
    }
    Tensor loss(const Tensor& images, const Tensor& classes) override {
        return cross_entropy((*this)(images), classes);
    }
};

/// Of forward and backward of an image: 6 for each of the net's products of two numbers.
constexpr double flops_per_image = 6.0 * (28 * 28 * 9 * 32 + 14 * 14 * 9 * 32 * 64 + 3136 * 128 + 128 * 10);

constexpr std::array<const char*, 10> names = {"T-shirt", "trousers", "pullover", "dress", "coat",
                                               "sandal",  "shirt",    "sneaker",  "bag",   "ankle boot"};

/// Prints how many images of each class are recognised. Returns the share of all.
double test(Net& net, const data::Loader& loader) {
    const NoGrad not_recorded;
    const nn::EvalMode evaluating(net);
    std::array<std::int64_t, 10> images{}, right{};
    for (const data::Batch& batch : loader.pass()) {
        const auto answers = argmax(net(batch.inputs), 1).to_vector<std::int64_t>();
        const auto classes = batch.targets.to_vector<std::int64_t>();
        for (std::size_t i = 0; i < classes.size(); ++i) {
            const auto label = static_cast<std::size_t>(classes[i]);
            ++images.at(label);
            if (answers[i] == classes[i]) ++right.at(label);
        }
    }
    std::int64_t all_right = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
        fmt::print("  {:<12} {:>4} of {}\n", names.at(i), right.at(i), images.at(i));
        all_right += right.at(i);
    }
    return static_cast<double>(all_right) / static_cast<double>(loader.size());
}

/// The images, and how they come to the network.
struct Images {
    data::TensorDataset train, test;
};

// Pixels of the training images are 0.286 on average, with a standard deviation of 0.353.
const std::vector<double> mean = {0.286}, stddev = {0.353};

/// Of the training images, moved and mirrored at random.
data::Loader make_loader(const Images& images, const Settings& settings) {
    const data::ImageTransform transform(
        {.padding = 2, .crop = 28, .random_crop = true, .flip = 0.5, .mean = mean, .stddev = stddev});
    return data::Loader(data::TransformedDataset(images.train, transform), {.batch = settings.batch,
                                                                            .shuffle = true,
                                                                            .drop_last = true,
                                                                            .workers = settings.workers,
                                                                            .seed = settings.seed,
                                                                            .device = device_of(settings)});
}

/// Of the first `count` test images.
data::Loader make_test_loader(const Images& images, const Settings& settings, std::int64_t count) {
    const data::ImageTransform transform({.mean = mean, .stddev = stddev});
    const std::int64_t there = std::min(count, images.test.size());
    const data::FunctionDataset first(
        there, [&images](std::int64_t index, RandomKey key) { return images.test.get(index, key); });
    return data::Loader(data::TransformedDataset(first, transform),
                        {.batch = 500, .workers = settings.workers, .device = device_of(settings)});
}

optim::AdamWOptions optimizer_options(const Settings& settings) {
    return {.learning_rate = settings.learning_rate, .weight_decay = settings.weight_decay};
}

/// A training for a trial of --tune.
TrialTraining make_trial(const Images& images, Settings settings, const TunerSetting& setting) {
    settings.batch = setting.batch;
    settings.workers = setting.workers;
    auto net = std::make_unique<Net>();
    net->to(device_of(settings));
    auto optimizer = std::make_unique<optim::AdamW>(*net, optimizer_options(settings));
    return {.module = std::move(net),
            .optimizer = std::move(optimizer),
            .loader = std::make_unique<data::Loader>(make_loader(images, settings)),
            .validation = std::make_unique<data::Loader>(make_test_loader(images, settings, 2000)),
            .flops_per_token = flops_per_image};
}

}  // namespace

int main(int argc, char** argv) try {
    Settings settings;
    if (const std::optional<int> status = read_command_line(argc, argv, settings)) return *status;
    set_threads(settings.threads);
    manual_seed(settings.seed);
    const Device device = device_of(settings);
    const Images images{read_images(settings.data, "train"), read_images(settings.data, "t10k")};
    if (settings.tune)
        return training::tune(
            settings, [&](const TunerSetting& setting) { return make_trial(images, settings, setting); },
            setting_of(settings));
    data::Loader loader = make_loader(images, settings);
    const data::Loader test_loader = make_test_loader(images, settings, images.test.size());

    Net net;
    net.to(device);
    fmt::print("{} parameters, {} images, on {}\n", net.parameter_count(), loader.size(), describe(device));
    optim::AdamW optimizer(net, optimizer_options(settings));
    const std::int64_t steps = settings.epochs * loader.batches();
    TrainerOptions options{.steps = steps};
    options.schedule = optim::cosine_schedule(
        {.peak = settings.learning_rate, .steps = steps, .warmup = std::min<std::int64_t>(100, steps / 2)});
    options.run_folder = settings.run_folder;
    options.resume = !settings.resume.empty();
    options.checkpoint_every = settings.checkpoint_every;
    options.log_every = settings.log_every;
    options.flops_per_token = flops_per_image;
    options.precision = parse_precision(settings.precision);
    options.should_stop = [] { return training::stop_requested.load(); };
    training::stop_on_signals();
    if (!Trainer(net, optimizer, loader, options).fit().finished) return training::interrupted;
    fmt::print("right on images it has never seen:\n");
    fmt::print("{:.2f} % of them\n", 100 * test(net, test_loader));
    fmt::print("it waited {:.1f} s for images\n", loader.waiting_seconds());
    return 0;
} catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
}
