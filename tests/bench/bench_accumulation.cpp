// What a further micro-batch costs: forward and backward of GPT-2 (124M) into gradients that hold a sum, beside the
// same into gradients that do not exist yet. Rounds of one such single pass and the further ones take turns, so that a
// disturbance meets both. The last line of output is JSON: minima and medians in seconds, of the wall's clock and of
// the processors, and the ratio of further to single.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd/autocast.h"
#include "autograd/ops.h"
#include "core/device.h"
#include "core/factories.h"
#include "nn/models/gpt2.h"
#include "nn/optim/adamw.h"
#include "nn/train/precision.h"
#include "tests/bench/measure.h"

using namespace potluck;

namespace {

struct Times {
    std::vector<double> wall, processor;
};

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double minimum(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

template <class Pass>
void measure(Times& times, const Pass& pass) {
    const auto start = std::chrono::steady_clock::now();
    const double processor = processor_seconds();
    pass();
    times.processor.push_back(processor_seconds() - processor);
    times.wall.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace

int main(int argc, char** argv) {
    int threads = 2, rounds = 8, micro_batches = 4;
    std::int64_t batch = 4, time = 64;
    nn::GPT2Config config;
    std::string precision = "f32";
    CLI::App app("The cost of a further micro-batch");
    app.add_option("--threads", threads);
    app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
    app.add_option("--micro-batches", micro_batches, "in a round, with the first")
        ->check(CLI::Range(2, 1000));
    app.add_option("--precision", precision)->check(CLI::IsMember({"f32", "f16", "bf16"}));
    app.add_option("--batch", batch);
    app.add_option("--time", time, "tokens in a sequence");
    app.add_option("--layers", config.layers);
    CLI11_PARSE(app, argc, argv);

    try {
        set_threads(threads);
        manual_seed(1);
        config.context = std::max(config.context, time);
        nn::GPT2 model(config);
        optim::AdamW optimizer(model, {});
        const Tensor text = randint(0, config.vocabulary, {batch, time + 1});
        const Tensor ids = narrow(text, 1, 0, time).contiguous();
        const Tensor labels = narrow(text, 1, 1, time).contiguous();
        const detail::LossIsScaled quiet;  // the values do not matter here
        const Autocast guard(dtype_of(parse_precision(precision)));
        const auto pass = [&] { model.loss(ids, labels).backward(); };

        pass();  // what is made once: memory, rounded weights
        Times single, further;
        for (int round = 0; round < rounds; ++round) {
            optimizer.zero_grad();
            measure(single, pass);
            for (int i = 1; i < micro_batches; ++i) measure(further, pass);
        }
        const nlohmann::json result = {
            {"precision", precision},
            {"threads", threads},
            {"batch", batch},
            {"time", time},
            {"single_wall", {minimum(single.wall), bench::median(single.wall)}},
            {"further_wall", {minimum(further.wall), bench::median(further.wall)}},
            {"single_processor", {minimum(single.processor), bench::median(single.processor)}},
            {"further_processor", {minimum(further.processor), bench::median(further.processor)}},
            {"wall_ratio", minimum(further.wall) / minimum(single.wall)},
            {"wall_ratio_of_medians", bench::median(further.wall) / bench::median(single.wall)},
            {"processor_ratio", minimum(further.processor) / minimum(single.processor)},
            {"processor_ratio_of_medians",
             bench::median(further.processor) / bench::median(single.processor)},
        };
        std::printf("%s\n", result.dump().c_str());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_accumulation: %s\n", error.what());
        return 1;
    }
    return 0;
}
