// A program outside the tree, as a user of an installed copy would write it: fits y = 2x + 1 by gradient descent.
#include <potluck.h>

#include <cstdio>

using namespace potluck;

int main() {
    manual_seed(1);
    nn::Linear line(1, 1);
    optim::SGD optimizer(line, {.learning_rate = 0.1});
    const Tensor x = randn({64, 1});
    const Tensor y = x * 2.0 + 1.0;
    for (int step = 0; step < 200; ++step) {
        Tensor loss = mse_loss(line(x), y);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
    }
    const double loss = mse_loss(line(x), y).item<double>();
    std::printf("loss %s\n", loss < 1e-6 ? "is small" : "is large");
    return loss < 1e-6 ? 0 : 1;
}
