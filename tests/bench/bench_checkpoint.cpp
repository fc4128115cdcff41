// What a checkpoint costs. Everything is done in turn, and the fastest of some rounds counts, since other programs use the
// same processor and disk:
//   - for how long a save beside the training (CheckpointWriter) holds it up, over a memcpy() of the same state;
//   - how fast the state is written, over dd with conv=fsync of as many bytes in the same folder;
//   - the share of the checksums, in seconds of the processor.
//
//     bench_checkpoint [megabytes of weights] [folder]      (default 256 /tmp; the optimizer has twice as many)

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/factories.h"
#include "nn/layers/linear.h"
#include "nn/optim/adamw.h"
#include "nn/train/checkpoint_writer.h"

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

/// The fastest of some rounds.
class Fastest {
public:
    void add(double seconds) { seconds_ = seconds_ == 0.0 ? seconds : std::min(seconds_, seconds); }
    double seconds() const { return seconds_; }

private:
    double seconds_ = 0.0;
};

void write_by_dd(const std::string& folder, std::int64_t bytes) {
    const std::string command =
        fmt::format("dd if=/dev/zero of='{}/dd' bs=1M count={} conv=fsync 2>/dev/null", folder,
                    (bytes + (1 << 20) - 1) >> 20);
    if (std::system(command.c_str()) != 0) throw Error("bench_checkpoint", "dd failed: " + command);
}

void measure(std::int64_t megabytes, const std::string& folder) {
    nn::Linear model(1024, megabytes * 256, {.bias = false, .initialize = false});
    optim::AdamW optimizer(model);
    model.weight.set_grad(ones(model.weight.shape()));
    optimizer.step();
    std::vector<Tensor> tensors = {model.weight.detach()};
    for (const auto& [name, tensor] : optimizer.state_dict()) tensors.push_back(tensor);
    std::int64_t bytes = 0;
    for (const Tensor& tensor : tensors) bytes += tensor.bytes();

    std::filesystem::create_directories(folder);
    CheckpointWriter writer(folder);
    const auto remove_last = [&] { std::filesystem::remove_all(writer.wait()); };  // which takes time, too
    const double first_save = seconds_of([&] { writer.save(model, optimizer, {}); });
    remove_last();
    Tensor copy;
    const auto copy_all = [&] {
        auto* to = static_cast<std::byte*>(copy.raw_data());
        for (const Tensor& tensor : tensors) {
            std::memcpy(to, tensor.raw_data(), static_cast<std::size_t>(tensor.bytes()));
            to += tensor.bytes();
        }
    };
    const double first_copy = seconds_of([&] {
        copy = Tensor::empty({bytes}, {DType::u8});
        copy_all();
    });
    Fastest copying, holding_up, writing, waiting, dd, hashing;
    constexpr int rounds = 7;
    for (int round = 1; round <= rounds; ++round) {
        copying.add(seconds_of(copy_all));
        holding_up.add(seconds_of([&] { writer.save(model, optimizer, {.step = 2 * round}); }));
        writing.add(seconds_of([&] { writer.wait(); }));
        remove_last();
        dd.add(seconds_of([&] { write_by_dd(folder, bytes); }));
        std::filesystem::remove(folder + "/dd");
        waiting.add(seconds_of([&] { writer.save_and_wait(model, optimizer, {.step = 2 * round + 1}); }));
        remove_last();
        hashing.add(processor_seconds_of([&] {
            Checksum checksum;
            for (const Tensor& tensor : tensors) checksum.add(tensor.raw_data(), tensor.bytes());
            if (checksum.text().empty()) std::abort();
        }));
    }
    const auto rate = [&](double seconds) { return static_cast<double>(bytes) * 1e-6 / seconds; };
    fmt::print("{:.0f} MB, the fastest of {} rounds\n", static_cast<double>(bytes) * 1e-6, rounds);
    fmt::print("  memcpy               {:.4f} s  {:6.0f} MB/s\n", copying.seconds(), rate(copying.seconds()));
    fmt::print("  held up by save()    {:.4f} s  {:6.0f} MB/s  {:.2f} of memcpy\n", holding_up.seconds(),
               rate(holding_up.seconds()), holding_up.seconds() / copying.seconds());
    fmt::print("  the first one        {:.4f} s, into fresh memory, which memcpy takes {:.4f} s for\n",
               first_save, first_copy);
    fmt::print("  dd conv=fsync        {:.4f} s  {:6.0f} MB/s\n", dd.seconds(), rate(dd.seconds()));
    fmt::print("  written beside       {:.4f} s  {:6.0f} MB/s  {:.2f} of dd's rate\n", writing.seconds(),
               rate(writing.seconds()), dd.seconds() / writing.seconds());
    fmt::print("  written and waited   {:.4f} s  {:6.0f} MB/s  {:.2f} of dd's rate\n", waiting.seconds(),
               rate(waiting.seconds()), dd.seconds() / waiting.seconds());
    fmt::print(
        "  checksums            {:.4f} s of the processor, {:.2f} % of what is waited for without them\n",
        hashing.seconds(), 100 * hashing.seconds() / (waiting.seconds() - hashing.seconds()));
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
