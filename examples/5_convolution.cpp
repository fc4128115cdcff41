// A small convolutional network reads the digits of 3_mlp.cpp more accurately, with fewer weights.
// `5_convolution --help` lists the options.

#include <potluck.h>

#include <iostream>
#include <memory>

#include "examples/command_line.h"
#include "examples/digits.h"

using namespace potluck;
using digits::Digits;

namespace {

struct Settings : training::Options {
    std::string path = "examples/data/digits.txt";
    int epochs = 20;
};

std::optional<int> read_command_line(int argc, char** argv, Settings& settings) {
    CLI::App app("Trains a small convolutional network to read handwritten digits.");
    app.option_defaults()->always_capture_default();
    app.add_option("PATH", settings.path, "the file of the digits");
    app.add_option("EPOCHS", settings.epochs, "how often every digit is learned from")
        ->check(command_line::at_least(1));
    command_line::add_training_options(app, settings, "images", /*least_batch=*/2);
    return command_line::read_training(app, argc, argv, settings);
}

struct Net : nn::Module {
    nn::Conv2d first{1, 12, 3, {.padding = 1}}, second{12, 24, 3, {.padding = 1}};
    nn::BatchNorm first_norm{12}, second_norm{24};
    nn::Linear head{96, 10};  // of 24 channels, 2 x 2 each

    void members(nn::Members& m) override {
        m("first", first)("first_norm", first_norm)("second", second)("second_norm", second_norm)("head",
                                                                                                  head);
    }
    Tensor forward(const Tensor& pixels) override {
        Tensor x = pixels.reshape({-1, 1, 8, 8});         // (batch, channels, height, width)
        x = max_pool2d(relu(first_norm(first(x))), 2);    // (batch, 12, 4, 4)
        x = max_pool2d(relu(second_norm(second(x))), 2);  // (batch, 24, 2, 2)
        return head(flatten(x, 1));                       // (batch, 10)
    }
    Tensor loss(const Tensor& x, const Tensor& digits) override { return cross_entropy((*this)(x), digits); }
};

optim::AdamWOptions optimizer_options(const Settings& settings) {
    return {.learning_rate = settings.learning_rate, .weight_decay = 0.1};
}

/// An incomplete last batch takes part, unless it has a single image: that has no variance for batch norm.
data::Loader make_loader(const Digits& digits, const Settings& settings) {
    return data::Loader(data::TensorDataset(digits.images, digits.labels),
                        {.batch = settings.batch,
                         .shuffle = true,
                         .drop_last = digits.labels.count() % settings.batch == 1,
                         .workers = settings.workers,
                         .device = device_of(settings)});
}

/// A training for a trial of --tune.
TrialTraining make_trial(const digits::Split& split, Settings settings, const TunerSetting& setting) {
    settings.batch = setting.batch;
    settings.workers = setting.workers;
    auto net = std::make_unique<Net>();
    net->to(device_of(settings));
    auto optimizer = std::make_unique<optim::AdamW>(*net, optimizer_options(settings));
    return {.module = std::move(net),
            .optimizer = std::move(optimizer),
            .loader = std::make_unique<data::Loader>(make_loader(split.train, settings)),
            .validation = std::make_unique<data::Loader>(make_loader(split.test, settings)),
            .flops_per_token = 6.0 * (64 * 9 * 12 + 16 * 9 * 12 * 24 + 96 * 10)};  // one "token" is an image
}

/// The fraction of images whose largest logit is the right digit.
double accuracy(Net& net, const Digits& digits) {
    const NoGrad not_recorded;
    const nn::EvalMode evaluating(net);  // batch norm uses its running statistics, not this batch
    const Device device = net.head.weight.device();
    return mean(argmax(net(digits.images.to(device)), 1) == digits.labels.to(device)).item();
}

}  // namespace

int main(int argc, char** argv) try {
    Settings settings;
    if (const std::optional<int> status = read_command_line(argc, argv, settings)) return *status;
    set_threads(settings.threads);
    const digits::Split split = digits::split(digits::read_digits(settings.path));
    const auto& [train, test] = split;
    if (settings.tune)
        return training::tune(
            settings, [&](const TunerSetting& setting) { return make_trial(split, settings, setting); },
            setting_of(settings));

    manual_seed(42);
    Net net;
    std::cout << net << "\n";
    net.to(device_of(settings));
    optim::AdamW optimizer(net, optimizer_options(settings));
    data::Loader loader = make_loader(train, settings);
    LossScaler scaler(scaler_options(settings));

    for (int epoch = 1; epoch <= settings.epochs; ++epoch) {
        double sum = 0;
        for (auto [x, y] : loader) {
            Tensor loss;
            {
                const Autocast products_in(dtype_of(parse_precision(settings.precision)));
                loss = net.loss(x, y);
            }
            scaler.backward(loss);
            scaler.step(optimizer);
            optimizer.zero_grad();
            sum += loss.item() * static_cast<double>(x.size(0));
        }
        if (epoch == 1 || epoch % 5 == 0)
            std::cout << "epoch " << epoch << ": loss " << sum / static_cast<double>(train.labels.count())
                      << "\n";
    }
    std::cout << "right on the digits it learned from: " << 100 * accuracy(net, train) << " %\n";
    std::cout << "right on digits it has never seen:   " << 100 * accuracy(net, test) << " %\n";
    return 0;
} catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "error: " << error.what() << "\n";
    return 1;
}
