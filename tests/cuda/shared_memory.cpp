// Kernels that need much shared memory, at widths where it exceeds the limits of GPUs.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/cuda/device.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/emulator.h"
#endif

namespace potluck::test {
namespace {

double tolerance(DType dtype) {
    return dtype == DType::f64 ? 1e-11 : dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 1e-2 : 8e-2;
}

using Op = std::function<Tensor(const std::vector<Tensor>&)>;

/// The op's result and the gradients of its inputs, computed on a device and copied to the CPU.
std::vector<Tensor> run(const std::vector<Tensor>& inputs, const Op& op, Device device) {
    std::vector<Tensor> leaves;
    for (const Tensor& input : inputs) {
        leaves.push_back(input.detach().to(device));
        leaves.back().set_requires_grad();
    }
    const Tensor y = op(leaves);
    backward(y, {.gradient = y.detach()});
    std::vector<Tensor> results{y.detach().to(Device::cpu())};
    for (const Tensor& leaf : leaves) results.push_back(leaf.grad().to(Device::cpu()));
    return results;
}

void check_on_gpu(const std::vector<Tensor>& inputs, const Op& op) {
    const std::vector<Tensor> expected = run(inputs, op, Device::cpu());
    const std::vector<Tensor> got = run(inputs, op, Device::cuda());
    const double bound = tolerance(inputs[0].dtype());
    for (std::size_t i = 0; i < got.size(); ++i) {
        const std::vector<double> a = got[i].to_vector(), b = expected[i].to_vector();
        double worst = 0.0;
        for (std::size_t j = 0; j < a.size(); ++j)
            worst = std::max(worst, std::fabs(a[j] - b[j]) / (1.0 + std::fabs(b[j])));
        CAPTURE(i);
        CHECK(worst < bound);
    }
}

void check_widths(std::initializer_list<std::int64_t> widths) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
        for (const std::int64_t width : widths) {
            CAPTURE(dtype);
            CAPTURE(width);
            Generator numbers(static_cast<std::uint64_t>(width));
            const auto some = [&](const Shape& shape) { return to(randn(shape, {}, &numbers), dtype); };
            const Tensor x = some({5, width}), weight = some({width}), bias = some({width});
            check_on_gpu({x, weight, bias}, [](const auto& in) { return layer_norm(in[0], in[1], in[2]); });
            check_on_gpu({x, weight}, [](const auto& in) { return rms_norm(in[0], in[1]); });
            // With few values a channel's deviation may be nearly 0, and its gradients large and inaccurate.
            check_on_gpu({some({32, width}), weight, bias},
                         [](const auto& in) { return batch_norm(in[0], in[1], in[2]); });
            check_on_gpu({x}, [](const auto& in) { return softmax(in[0]); });
            const Tensor labels = tensor(std::vector<std::int64_t>{0, 1, width - 1, width / 2, 7}, {5});
            check_on_gpu({x}, [&](const auto& in) {
                return cross_entropy(in[0], labels.to(in[0].device()), {.reduction = Reduction::none});
            });
        }
}

}  // namespace

TEST_CASE("cuda: norms, softmax and cross-entropy of every dtype fit at every width") {
    if (!has_cuda_device()) return;
    check_widths({768, 1024, 2048, 4096, 6144, 12288});
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE("cuda: norms, softmax and cross-entropy fit on the card with the least shared memory") {
    emulator::set_card(86);
    check_widths({768, 2048, 6144, 12288});
    emulator::set_card(80);
}
#endif

}  // namespace potluck::test
