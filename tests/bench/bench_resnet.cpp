// One training step of ResNet-18 for small images (K. He et al., "Deep Residual Learning for Image Recognition", 2016,
// with a first convolution of 3 x 3 and no first pooling): forward, cross-entropy, backward and SGD with momentum, by
// default on the CPU in f32 with 16 images of 3 x 32 x 32. The last line of output is JSON in the format of
// pytorch_resnet.py, the same step in PyTorch: run the two in turn.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd/autocast.h"
#include "autograd/ops.h"
#include "core/device.h"
#include "core/factories.h"
#include "core/memory.h"
#include "core/trace.h"
#include "core/version.h"
#include "nn/layers/batch_norm.h"
#include "nn/layers/convolution.h"
#include "nn/layers/linear.h"
#include "nn/optim/sgd.h"
#include "nn/train/precision.h"
#include "tests/bench/measure.h"

using namespace potluck;

namespace {

/// relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)).
class BasicBlock : public nn::Module {
public:
    nn::Conv2d conv1, conv2;
    nn::BatchNorm bn1, bn2;
    std::vector<nn::Conv2d> shortcut_conv;  // one where the shape changes
    std::vector<nn::BatchNorm> shortcut_bn;

    BasicBlock(std::int64_t channels, std::int64_t filters, std::int64_t stride)
        : conv1(channels, filters, 3, {.stride = stride, .padding = 1, .bias = false}),
          conv2(filters, filters, 3, {.padding = 1, .bias = false}),
          bn1(filters),
          bn2(filters) {
        if (stride == 1 && channels == filters) return;
        shortcut_conv.emplace_back(channels, filters, 1, nn::Conv2dOptions{.stride = stride, .bias = false});
        shortcut_bn.emplace_back(filters);
    }
    void members(nn::Members& m) override {
        m("conv1", conv1)("bn1", bn1)("conv2", conv2)("bn2", bn2)("shortcut_conv", shortcut_conv)(
            "shortcut_bn", shortcut_bn);
    }
    Tensor forward(const Tensor& x) override {
        const Tensor y = bn2(conv2(relu(bn1(conv1(x)))));
        return relu(y + (shortcut_conv.empty() ? x : shortcut_bn[0](shortcut_conv[0](x))));
    }
};

class ResNet18 : public nn::Module {
public:
    nn::Conv2d conv1{3, 64, 3, {.padding = 1, .bias = false}};
    nn::BatchNorm bn1{64};
    std::vector<BasicBlock> blocks;
    nn::Linear head{512, 10};

    ResNet18() {
        std::int64_t channels = 64;
        for (const std::int64_t filters : {64, 128, 256, 512})
            for (int i = 0; i < 2; ++i) {
                blocks.emplace_back(channels, filters, i == 0 && filters > 64 ? 2 : 1);
                channels = filters;
            }
    }
    void members(nn::Members& m) override { m("conv1", conv1)("bn1", bn1)("blocks", blocks)("head", head); }
    Tensor forward(const Tensor& images) override {
        Tensor x = relu(bn1(conv1(images)));
        for (BasicBlock& block : blocks) x = block(x);
        return head(mean(x, {2, 3}));
    }
};

}  // namespace

int main(int argc, char** argv) {
    int threads = 2, steps = 5, warmup = 2;
    std::int64_t batch = 16, size = 32;
    std::string trace_file, device_name = "cpu", precision_name = "f32";
    CLI::App app("One training step of ResNet-18");
    app.add_option("--device", device_name, "cpu, cuda, cuda:1, ...");
    app.add_option("--precision", precision_name, "what Autocast computes in")
        ->check(CLI::IsMember({"f32", "f16", "bf16"}));
    app.add_option("--threads", threads);
    app.add_option("--steps", steps, "measured steps; the median is reported")->check(CLI::PositiveNumber);
    app.add_option("--warmup", warmup, "steps before them");
    app.add_option("--batch", batch);
    app.add_option("--size", size, "height and width of an image");
    app.add_option("--trace", trace_file, "write the last step as a Chrome trace");
    CLI11_PARSE(app, argc, argv);

    try {
        set_threads(threads);
        manual_seed(1);
        const Device device = parse_device(device_name);
        ResNet18 model;
        model.to(device);
        optim::SGD optimizer(model, {.learning_rate = 0.01, .momentum = 0.9});
        const Tensor images = randn({batch, 3, size, size}).to(device);
        const Tensor labels = randint(0, 10, {batch}).to(device);
        const DType compute = dtype_of(parse_precision(precision_name));
        const detail::LossIsScaled quiet;  // the values do not matter here

        std::vector<double> seconds, losses;
        for (int step = 0; step < warmup + steps; ++step) {
            if (!trace_file.empty() && step + 1 == warmup + steps) start_trace();
            const auto start = std::chrono::steady_clock::now();
            Tensor loss;
            {
                const Autocast guard(compute);
                loss = cross_entropy(model(images), labels);
                loss.backward();
            }
            optimizer.step();
            optimizer.zero_grad();
            losses.push_back(loss.item());
            synchronize(device);
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            if (step >= warmup) seconds.push_back(took.count());
            std::printf("step %d: loss %.4f, %.3f s\n", step, losses.back(), took.count());
            std::fflush(stdout);
        }
        if (!trace_file.empty()) write_trace(trace_file);

        const double typical = bench::median(seconds);
        const nlohmann::json result = {
            {"framework", "potluck " + std::string(version())},
            {"parameters", model.parameter_count()},
            {"threads", threads},
            {"device", describe(device)},
            {"precision", precision_name},
            {"batch", batch},
            {"seconds_per_step", typical},
            {"seconds", seconds},
            {"images_per_second", static_cast<double>(batch) / typical},
            {"peak_memory_bytes", bench::peak_process_memory()},
            {"peak_tensor_bytes", memory_statistics(device).peak},
            {"first_loss", losses.front()},
            {"last_loss", losses.back()},
        };
        std::printf("%s\n", result.dump().c_str());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_resnet: %s\n", error.what());
        return 1;
    }
    return 0;
}
