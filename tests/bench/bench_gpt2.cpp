// One training step of GPT-2 (124M): forward, cross-entropy, backward and AdamW, by default on the CPU in f32 with 4 x
// 64 tokens. With a half type the weights are rounded, and the optimizer keeps an f32 master beside its moments. The
// last line of output is JSON in the format of pytorch_gpt2.py; compare_gpt2.py runs both alternately.

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
#include "nn/models/gpt2.h"
#include "nn/optim/adamw.h"
#include "nn/train/precision.h"
#include "tests/bench/measure.h"

using namespace potluck;

int main(int argc, char** argv) {
    int threads = 2, steps = 5, warmup = 2;
    std::int64_t batch = 4, time = 64;
    nn::GPT2Config config;
    std::string trace_file;
    std::int64_t accumulate = 1;
    std::string device_name = "cpu", dtype_name = "f32", precision_name = "f32", recompute_name = "none";
    CLI::App app("One training step of GPT-2");
    app.add_option("--device", device_name, "cpu, cuda, cuda:1, ...");
    app.add_option("--dtype", dtype_name)->check(CLI::IsMember({"f32", "f16", "bf16"}));
    app.add_option("--precision", precision_name, "what Autocast computes in, with parameters of --dtype")
        ->check(CLI::IsMember({"f32", "f16", "bf16"}));
    app.add_option("--recompute", recompute_name)->check(CLI::IsMember({"none", "parts", "blocks"}));
    app.add_option("--accumulate", accumulate, "micro-batches in a step")->check(CLI::PositiveNumber);
    app.add_option("--threads", threads);
    app.add_option("--steps", steps, "measured steps; the median is reported")->check(CLI::PositiveNumber);
    app.add_option("--warmup", warmup, "steps before them");
    app.add_option("--batch", batch);
    app.add_option("--time", time, "tokens in a sequence");
    app.add_option("--layers", config.layers);
    app.add_option("--heads", config.heads);
    app.add_option("--width", config.width);
    app.add_option("--vocabulary", config.vocabulary);
    app.add_option("--trace", trace_file, "write the last step as a Chrome trace");
    CLI11_PARSE(app, argc, argv);

    try {
        set_threads(threads);
        manual_seed(1);
        const Device device = parse_device(device_name);
        config.context = std::max(config.context, time);
        nn::GPT2 model(config);
        model.to(device);
        if (dtype_name != "f32") model.to(dtype_name == "f16" ? DType::f16 : DType::bf16);
        using What = nn::RecomputePolicy::What;
        model.set_recompute({.what = recompute_name == "blocks"  ? What::blocks
                                     : recompute_name == "parts" ? What::attention_and_activation
                                                                 : What::nothing});
        const DType compute = dtype_of(parse_precision(precision_name));
        const detail::LossIsScaled quiet;  // the values do not matter here
        optim::AdamW optimizer(model,
                               {.learning_rate = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
        const Tensor text = randint(0, config.vocabulary, {batch, time + 1});
        const Tensor ids = narrow(text, 1, 0, time).contiguous().to(device);
        const Tensor labels = narrow(text, 1, 1, time).contiguous().to(device);

        std::vector<double> seconds, losses;
        for (int step = 0; step < warmup + steps; ++step) {
            if (!trace_file.empty() && step + 1 == warmup + steps) start_trace();
            const auto start = std::chrono::steady_clock::now();
            Tensor loss;
            {
                const Autocast guard(compute);  // keeps rounded weights for all micro-batches
                for (std::int64_t i = 0; i < accumulate; ++i) {
                    loss = model.loss(ids, labels);
                    loss.backward();
                }
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
            {"dtype", dtype_name},
            {"precision", precision_name},
            {"recompute", recompute_name},
            {"accumulate", accumulate},
            {"batch", batch},
            {"time", time},
            {"seconds_per_step", typical},
            {"seconds", seconds},
            {"tokens_per_second", static_cast<double>(batch * time) / typical},
            {"peak_memory_bytes", bench::peak_process_memory()},
            {"peak_tensor_bytes", memory_statistics(device).peak},
            {"first_loss", losses.front()},
            {"last_loss", losses.back()},
        };
        std::printf("%s\n", result.dump().c_str());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_gpt2: %s\n", error.what());
        return 1;
    }
    return 0;
}
