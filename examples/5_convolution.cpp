// A small convolutional network reads the digits of 3_mlp.cpp more accurately, with fewer weights.
//
//     5_convolution [PATH [EPOCHS]]     examples/data/digits.txt and 20 unless given

#include <potluck.h>

#include <cstdlib>
#include <iostream>

#include "examples/digits.h"

using namespace potluck;
using digits::Digits;

namespace {

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
};

/// The fraction of images whose largest logit is the right digit.
double accuracy(Net& net, const Digits& digits) {
    const NoGrad not_recorded;
    const nn::EvalMode evaluating(net);  // batch norm uses its running statistics, not this batch
    return mean(argmax(net(digits.images), 1) == digits.labels).item();
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
    // 1437 images leave a smaller last batch, but not one with a single image, which has no variance for batch norm.
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
    std::cout << "right on digits it has never seen:   " << 100 * accuracy(net, test) << " %\n";
} catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
}
