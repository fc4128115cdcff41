// Loaders that hand out batches on a CUDA device: copied beside what it computes, and nobody waits.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "core/factories.h"
#include "core/memory.h"
#include "data/loader.h"
#include "nn/layers/linear.h"
#include "nn/optim/sgd.h"
#include "nn/train/trainer.h"
#include "tests/cuda/device.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda/emulator_support.h"
#endif

using namespace potluck;

namespace {

const Device gpu = Device::cuda();

/// Items whose input is full of their number, and whose target is that number.
struct Numbered {
    std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);

    data::FunctionDataset dataset(std::int64_t size, std::int64_t width, bool has_targets = true) const {
        return data::FunctionDataset(size, [made = made, width, has_targets](std::int64_t index, RandomKey) {
            data::Example example{full({width}, index), {}};
            if (has_targets) example.target = full({}, index, {DType::i64});
            ++*made;
            return example;
        });
    }

    /// Waits until the workers have made this many items and put them together.
    void wait_for(int items) const {
        using namespace std::chrono_literals;
        for (int i = 0; i < 2000 && *made < items; ++i) std::this_thread::sleep_for(5ms);
        REQUIRE(*made >= items);
        std::this_thread::sleep_for(100ms);
    }
};

}  // namespace

TEST_CASE("cuda loader: batches are on the device, and they are those of the CPU") {
    if (!test::has_cuda_device()) return;
    const data::TensorDataset dataset(rand({11, 3}), arange(0, 11));
    for (const int workers : {0, 2}) {
        data::Loader here(dataset, {.batch = 4, .shuffle = true, .seed = 1});
        data::Loader there(dataset,
                           {.batch = 4, .shuffle = true, .workers = workers, .seed = 1, .device = gpu});
        for (int i = 0; i < 7; ++i) {
            const data::Batch expected = here.next(), batch = there.next();
            CHECK(batch.inputs.device() == gpu);
            CHECK(batch.targets.device() == gpu);
            CHECK(batch.inputs.to_vector() == expected.inputs.to_vector());
            CHECK(batch.targets.to_vector() == expected.targets.to_vector());
            CHECK(batch.host_targets.to_vector() == expected.targets.to_vector());
            CHECK(batch.host_targets.storage()->is_pinned());
            CHECK(there.state() == here.state());
        }
    }
}

TEST_CASE("cuda loader: the next batch is copied while the device has this one") {
    if (!test::has_cuda_device()) return;
    const Numbered numbered;
    constexpr std::int64_t width = 10'000, batch_bytes = 2 * width * 4;
    data::Loader loader(numbered.dataset(20, width),
                        {.batch = 2, .workers = 1, .read_ahead = 3, .device = gpu});
    const std::int64_t before = memory_statistics(gpu).current;
    data::Batch batch = loader.next();
    numbered.wait_for(8);
#if POTLUCK_CUDA_EMULATED
    const std::uint64_t waits = emulator::host_waits();
#endif
    batch = loader.next();
#if POTLUCK_CUDA_EMULATED
    CHECK(emulator::host_waits() == waits);
#endif
    // This one, and the next, whose copy has begun.
    CHECK(memory_statistics(gpu).current - before >= 2 * batch_bytes);
    CHECK(memory_statistics(gpu).current - before < 3 * batch_bytes);
    CHECK(loader.state().item == 4);  // what is on its way does not count
    CHECK(batch.inputs.to_vector()[0] == 2.0);

    // Another share, or another place: what is on its way is not handed out.
    numbered.wait_for(10);
    loader.set_share(data::Share{1, 1});
    CHECK(loader.next().targets.to_vector() == std::vector<double>{5});
    loader.set_share({});
    CHECK(loader.next().targets.to_vector() == std::vector<double>{6, 7});
    loader.set_state({.epoch = 0, .item = 16, .size = 20});
    CHECK(loader.next().targets.to_vector() == std::vector<double>{16, 17});
    CHECK(loader.next().targets.to_vector() == std::vector<double>{18, 19});
    CHECK(loader.next().targets.to_vector() == std::vector<double>{0, 1});
}

TEST_CASE("cuda loader: an item that fails while it is fetched ahead fails in its turn") {
    if (!test::has_cuda_device()) return;
    const Numbered numbered;
    const data::FunctionDataset good = numbered.dataset(8, 3);
    const data::FunctionDataset bad(8, [=](std::int64_t index, RandomKey key) {
        if (index == 4) throw Error("soup", "too hot.");
        return good.get(index, key);
    });
    data::Loader loader(bad, {.batch = 2, .workers = 1, .read_ahead = 4, .device = gpu});
    loader.next();
    numbered.wait_for(4);
    CHECK(loader.next().targets.to_vector() == std::vector<double>{2, 3});
    CHECK_THROWS_WITH_AS(loader.next(), doctest::Contains("too hot"), Error);
    CHECK(loader.state().item == 4);
}

TEST_CASE("cuda loader: memory is not given to another batch before all copies and ops are through with it") {
    if (!test::has_cuda_device()) return;
    for (const auto& [workers, has_targets] : {std::pair(0, true), std::pair(2, true), std::pair(2, false)}) {
        data::Loader loader(Numbered().dataset(200, 1000, has_targets),
                            {.batch = 2, .workers = workers, .device = gpu});
        const Tensor sum = zeros({1000}, {DType::f32, gpu});
        int batches = 0;
#if POTLUCK_CUDA_EMULATED
        emulator::set_late_answers(true);
        // The first batch takes fresh memory; from then on nothing makes the host wait.
        std::uint64_t waits = 0;
#endif
        for (auto [x, y] : loader) {
            sum.add_(potluck::sum(x * 2.0, {0}));
            ++batches;
#if POTLUCK_CUDA_EMULATED
            if (batches == 1) waits = emulator::host_waits();
            CHECK(emulator::host_waits() == waits);
#endif
        }
#if POTLUCK_CUDA_EMULATED
        emulator::set_late_answers(false);
        test::expect_no_fault();
#endif
        CHECK(batches == 100);
        CHECK(sum.to_vector() == std::vector<double>(1000, 199.0 * 200.0));
    }
}

TEST_CASE(
    "cuda loader: a loop that is left early ends at once, with batches on their way and in pinned memory") {
    if (!test::has_cuda_device()) return;
    for (const int workers : {1, 4, 16}) {
        const Numbered numbered;
        const auto start = std::chrono::steady_clock::now();
        {
            data::Loader loader(numbered.dataset(1000, 1000),
                                {.batch = 2, .workers = workers, .read_ahead = 4, .device = gpu});
            int batches = 0;
            for (auto [x, y] : loader)
                if (++batches == 2) break;
            loader.next();
            numbered.wait_for(4 * workers);  // the queue is full
        }
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    }
    synchronize(gpu);
    release_cached_memory();
    release_cached_memory(gpu);
#if POTLUCK_CUDA_EMULATED
    test::expect_no_fault();
#endif
}

TEST_CASE("cuda loader: a training has the same losses, and waits once an update") {
    if (!test::has_cuda_device()) return;
    Generator generator(3);
    const Tensor inputs = rand({24, 5}, {}, &generator);
    const Tensor targets = randint(0, 3, {24}, {DType::i64}, &generator);
    std::vector<std::vector<double>> losses;
    for (const auto& [workers, device] :
         {std::pair(0, std::optional<Device>()), std::pair(0, std::optional(gpu)),
          std::pair(2, std::optional(gpu))}) {
        manual_seed(4);
        nn::Linear net(5, 3);
        net.to(gpu);
        optim::SGD optimizer(net, {.learning_rate = 0.1});
        data::Loader loader(data::TensorDataset(inputs, targets),
                            {.batch = 3, .shuffle = true, .workers = workers, .seed = 7, .device = device});
        std::vector<double> seen;
        TrainerOptions options{.steps = 9, .accumulate = 2, .quiet = true};
        options.loss = [&](const Tensor& x, const Tensor& y) { return cross_entropy(net(x), y); };
#if POTLUCK_CUDA_EMULATED
        std::vector<std::uint64_t> waits;
#endif
        options.on_step = [&](const StepMetrics& metrics) {
            seen.push_back(metrics.loss);
#if POTLUCK_CUDA_EMULATED
            waits.push_back(emulator::host_waits());
#endif
        };
        Trainer(net, optimizer, loader, options).fit();
        losses.push_back(seen);
#if POTLUCK_CUDA_EMULATED
        if (device)  // the first update makes room for itself
            for (std::size_t i = 2; i < waits.size(); ++i) CHECK(waits[i] - waits[i - 1] == 1);
#endif
    }
    CHECK(losses[0].size() == 9);
    CHECK(losses[1] == losses[0]);
    CHECK(losses[2] == losses[0]);
}
