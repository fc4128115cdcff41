// A small network learns to read handwritten digits (examples/data/README.md names their source).
//
//     3_mlp [PATH [EPOCHS]]     examples/data/digits.txt and 20 unless given

#include <potluck.h>

#include <cstdlib>
#include <iostream>

#include "examples/digits.h"

using namespace potluck;
using digits::Digits;

namespace {

struct Net : nn::Module {
    nn::Linear up{64, 64}, down{64, 10};
    void members(nn::Members& m) override { m("up", up)("down", down); }
    Tensor forward(const Tensor& x) override { return down(relu(up(x))); }
};

/// The fraction of images whose largest logit is the right digit.
double accuracy(Net& net, const Digits& digits) {
    const NoGrad not_recorded;
    return mean(argmax(net(digits.images), 1) == digits.labels).item();
}

void show(const Tensor& image) {
    for (std::int64_t row = 0; row < 8; ++row) {
        for (double ink : image.narrow(0, row * 8, 8).to_vector())
            std::cout << (ink > 0.6 ? '#' : ink > 0.2 ? '+' : '.');
        std::cout << "\n";
    }
}

}  // namespace

int main(int argc, char** argv) try {
    const Digits all = digits::read_digits(argc > 1 ? argv[1] : "examples/data/digits.txt");
    const int epochs = argc > 2 ? std::atoi(argv[2]) : 20;
    if (epochs < 1) throw Error("epochs", "must be a whole number of at least 1.");
    const auto [train, test] = digits::split(all);

    manual_seed(42);
    Net net;
    std::cout << net << "\n";
    optim::AdamW optimizer(net, {.learning_rate = 3e-3, .weight_decay = 0.1});
    data::Loader loader(data::TensorDataset(train.images, train.labels),
                        {.batch = 64, .shuffle = true, .workers = 2});

    for (int epoch = 1; epoch <= epochs; ++epoch) {
        double sum = 0;
        for (auto [x, y] : loader) {
            Tensor loss = cross_entropy(net(x), y);
            loss.backward();
            optimizer.step();
            optimizer.zero_grad();
            sum += loss.item() * static_cast<double>(x.size(0));
        }
        if (epoch == 1 || epoch % 5 == 0)
            std::cout << "epoch " << epoch << ": loss " << sum / static_cast<double>(train.labels.count())
                      << "\n";
    }
    std::cout << "right on the digits it learned from: " << 100 * accuracy(net, train) << " %\n";
    std::cout << "right on digits it has never seen:   " << 100 * accuracy(net, test) << " %\n\n";

    show(test.images[0]);
    const NoGrad not_recorded;
    const Tensor chances = softmax(net(test.images.narrow(0, 0, 1)))[0];  // (10)
    const auto guess = argmax(chances).item<std::int64_t>();
    std::cout << "is read as a " << guess << " (" << 100 * chances[guess].item() << " % sure)\n";
} catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
}
