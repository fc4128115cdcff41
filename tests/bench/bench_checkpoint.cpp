// What the checksums of a checkpoint cost: saves a model of the given size, takes the checksum of the same bytes alone,
// in turn, and prints the share of the second in the first. Checksums are counted in seconds of the processor, so that
// other programs on the machine do not count; saving, which waits for the disk, in those of the clock.
//
//     bench_checkpoint [megabytes of weights] [folder]      (default 256 /tmp; the optimizer has twice as many)

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/factories.h"
#include "nn/layers/linear.h"
#include "nn/optim/adamw.h"
#include "nn/train/checkpoint.h"

namespace {

using namespace potluck;

template <class Work>
double processor_seconds_of(Work&& work) {
    const std::clock_t start = std::clock();
    work();
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

template <class Work>
double seconds_of(Work&& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void measure(std::int64_t megabytes, const std::string& folder) {
    nn::Linear model(1024, megabytes * 256, {.bias = false, .initialize = false});
    optim::AdamW optimizer(model);
    model.weight.set_grad(ones(model.weight.shape()));
    optimizer.step();
    std::vector<Tensor> tensors = {model.weight.detach()};
    for (const auto& [name, tensor] : optimizer.state_dict()) tensors.push_back(tensor);
    std::vector<double> saving, hashing;
    std::int64_t bytes = 0;
    for (int round = 0; round < 7; ++round) {
        saving.push_back(seconds_of([&] { save_checkpoint(folder, model, optimizer, {}); }));
        bytes = 0;
        hashing.push_back(processor_seconds_of([&] {
            Checksum checksum;
            for (const Tensor& tensor : tensors) {
                checksum.add(tensor.raw_data(), tensor.bytes());
                bytes += tensor.bytes();
            }
            if (checksum.text().empty()) std::abort();
        }));
    }
    fmt::print(
        "{:.0f} MB: saving {:.3f} s (median of {}; {:.2f} to {:.2f}), checksums alone {:.4f} s ({:.1f} "
        "GB/s): {:.2f} %\n",
        static_cast<double>(bytes) * 1e-6, median(saving), saving.size(),
        *std::min_element(saving.begin(), saving.end()), *std::max_element(saving.begin(), saving.end()),
        median(hashing), static_cast<double>(bytes) * 1e-9 / median(hashing),
        100 * median(hashing) / (median(saving) - median(hashing)));
}

}  // namespace

int main(int argc, char** argv) {
    const std::int64_t megabytes = argc > 1 ? std::atoll(argv[1]) : 256;
    const std::string folder = std::string(argc > 2 ? argv[2] : "/tmp") + "/bench_checkpoint";
    try {
        measure(std::max<std::int64_t>(megabytes, 1), folder);
        std::filesystem::remove_all(folder);
    } catch (const std::exception& error) {
        std::filesystem::remove_all(folder);
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
}
