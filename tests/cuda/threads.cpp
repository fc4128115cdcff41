// Two threads that use one CUDA device.

#include <doctest/doctest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "core/capture.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/cuda/device.h"

namespace potluck::test {
namespace {

/// Repeats a product and a convolution with their gradients: every round looks up the plans.
std::vector<double> train(std::uint64_t seed) {
    Generator numbers(seed);
    const TensorOptions options{DType::f32, Device::cuda()};
    Tensor weight = randn({6, 5}, options, &numbers), filter = randn({4, 3, 3, 3}, options, &numbers);
    weight.set_requires_grad(true);
    filter.set_requires_grad(true);
    const Tensor x = randn({7, 6}, options, &numbers), images = randn({2, 3, 5, 5}, options, &numbers);
    std::vector<double> found;
    for (int round = 0; round < 10; ++round) {
        const Tensor loss = sum(matmul(x, weight)) + sum(conv2d(images, filter, Tensor(), {.padding = 1}));
        loss.backward();
        found.push_back(loss.item());
    }
    for (const Tensor& gradient : {weight.grad(), filter.grad()})
        for (const double value : gradient.to_vector()) found.push_back(value);
    return found;
}

}  // namespace

TEST_CASE("cuda: two threads multiply and convolve on one device, each as it would alone") {
    if (!has_cuda_device()) return;
    const std::vector<double> alone = train(1), other_alone = train(2);
    std::vector<double> together;
    std::thread other([&] { together = train(2); });
    CHECK(train(1) == alone);
    other.join();
    CHECK(together == other_alone);
}

TEST_CASE("cuda: a thread frees tensors while another records work") {
    if (!has_cuda_device()) return;
    const TensorOptions options{DType::f32, Device::cuda()};
    const Tensor x = ones({64}, options);
    for (int round = 0; round < 5; ++round) {
        std::vector<Tensor> of_recording;
        Tensor y;
        std::thread other;
        const auto graph = capture(Device::cuda(), [&] {
            for (int i = 0; i < 20; ++i) of_recording.push_back(x * static_cast<double>(i));
            other = std::thread([taken = std::move(of_recording)]() mutable { taken.clear(); });
            y = x;
            for (int i = 0; i < 20; ++i) y = y + x;
            other.join();
        });
        graph->replay();
        CHECK(sum(y).item() == 21.0 * 64.0);
    }
}

}  // namespace potluck::test
