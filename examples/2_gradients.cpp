// Gradients for fitting a line to points: by hand, by the tape, and by finite differences.

#include <potluck.h>

#include <iostream>

using namespace potluck;

namespace {

/// The mean squared vertical distance of the points (x, y) from the line y = slope * x + offset.
Tensor distance(const Tensor& slope, const Tensor& offset, const Tensor& x, const Tensor& y) {
    return mean(square(slope * x + offset - y));
}

}  // namespace

int main() {
    const Tensor x = tensor({0, 1, 2, 3});
    const Tensor y = tensor({1, 3, 5, 7});  // on the line 2 x + 1

    // By hand. With error e = slope x + offset - y, the loss is mean(e^2), so by the chain rule
    //     d loss / d slope  = mean(2 e x)
    //     d loss / d offset = mean(2 e)
    const double slope_now = 0.5, offset_now = 0.0;
    const Tensor error = slope_now * x + offset_now - y;
    std::cout << "by hand:   d slope = " << mean(2 * error * x).item()
              << ", d offset = " << mean(2 * error).item() << "\n";

    // By the tape: if leaves require gradients, every op records how to compute its gradient.
    Tensor slope = tensor(slope_now), offset = tensor(offset_now);
    slope.set_requires_grad();
    offset.set_requires_grad();
    const Tensor loss = distance(slope, offset, x, y);
    std::cout << "\nthe tape, from the leaves to the loss:\n" << tape_to_text(loss) << "\n";
    loss.backward();
    std::cout << "by tape:   d slope = " << slope.grad().item() << ", d offset = " << offset.grad().item()
              << "\n";

    // By finite differences: a small step to each side.
    const double step = 1e-2;
    const auto loss_at = [&](double at) { return distance(tensor(at), offset.detach(), x, y).item(); };
    std::cout << "by trying: d slope = "
              << (loss_at(slope_now + step) - loss_at(slope_now - step)) / (2 * step) << "\n\n";

    // Gradient descent, step by step: the core of every optimizer.
    for (int update = 0; update <= 200; ++update) {
        slope.set_grad({});  // gradients accumulate until they are dropped
        offset.set_grad({});
        const Tensor current = distance(slope, offset, x, y);
        current.backward();
        if (update % 50 == 0)
            std::cout << "update " << update << ": loss " << current.item() << ", slope " << slope.item()
                      << ", offset " << offset.item() << "\n";
        const NoGrad not_recorded;  // an update is not part of the computation
        slope.add_(slope.grad(), -0.1);
        offset.add_(offset.grad(), -0.1);
    }

    // Recording the gradient itself gives second derivatives: (t^3)'' = 6 t, which is 12 at t = 2.
    Tensor t = tensor(2.0);
    t.set_requires_grad();
    const Tensor first = gradients(t * t * t, {t}, {.create_graph = true})[0];
    const Tensor second = gradients(first, {t})[0];
    std::cout << "\nt^3 at 2: first derivative " << first.item() << ", second " << second.item() << "\n";

    // Operations that would give a wrong gradient are refused.
    const Tensor saved = square(slope);  // saves slope for its backward
    {
        const NoGrad not_recorded;
        slope.fill_(100);
    }
    try {
        saved.backward();
    } catch (const Error& refused) {
        std::cout << "refused: " << refused.what() << "\n";
    }
}
