#include "core/capture.h"

#include <doctest/doctest.h>

#include <memory>
#include <thread>

#include "autograd/anomaly.h"
#include "autograd/ops.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/cuda/device.h"
#include "tests/expect_error.h"
#if POTLUCK_CUDA_EMULATED
#include "cuda/cuda_backend.h"
#include "tests/cuda_emulator/emulator.h"
#endif

namespace potluck::test {

TEST_CASE("cuda: capture, what the work holds by value lives as long as the recording") {
    if (!has_cuda_device()) return;
    Tensor y;
    const auto recorded = [&y](Tensor weight) {
        return capture(Device::cuda(), [&y, weight] { y = weight * 3.0; });
    };
    const auto graph = recorded(ones({3}, {DType::f32, Device::cuda()}));
    graph->replay();
    CHECK(y.to_vector() == std::vector<double>{3.0, 3.0, 3.0});
}

TEST_CASE("cuda: capture, work that seeds the random numbers is refused") {
    if (!has_cuda_device()) return;
    const std::string text = error_of([] {
        (void)capture(Device::cuda(), [] {
            manual_seed(5);
            (void)rand({3}, {DType::f32, Device::cuda()});
        });
    });
    CHECK(contains(text, "seeds the device's random numbers"));
}

TEST_CASE("cuda: capture, a bad id in a replay is told, and the device goes on") {
    if (!has_cuda_device()) return;
    const Tensor weight = ones({5, 4}, {DType::f32, Device::cuda()});
    const Tensor ids = zeros({2}, {DType::i64, Device::cuda()});
    Tensor y = embedding(weight, ids);
    const auto graph = capture(Device::cuda(), [&] { y = embedding(weight, ids); });
    graph->replay();
    CHECK(sum(y).item() == 8.0);
    ids.fill_(9);
    CHECK(contains(error_of([&] { graph->replay(); }), "[embedding] id 9 at position 0 is outside 0..4"));
    ids.fill_(1);
    graph->replay();
    CHECK(sum(y).item() == 8.0);
}

TEST_CASE("cuda: capture, the anomaly check says that it cannot look at recorded work") {
    if (!has_cuda_device()) return;
    const Tensor x = ones({3}, {DType::f32, Device::cuda()});
    Tensor leaf = ones({3}, {DType::f32, Device::cuda()});
    leaf.set_requires_grad(true);
    const std::string text = error_of([&] {
        (void)capture(Device::cuda(), [&] {
            const AnomalyCheck guard;
            (void)(leaf * x);
        });
    });
    INFO(text);
    CHECK(contains(text, "anomaly check"));
    CHECK(contains(text, "recorded"));
    const auto graph = capture(Device::cuda(), [&] { (void)(leaf * x); });  // the device stays usable
    graph->replay();
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE("cuda: capture, work on another device is refused instead of being done once") {
    emulator::configure(2, std::int64_t{8} << 30);
    {
        CudaBackend other(1);
        const std::string text =
            error_of([&] { (void)capture(Device::cuda(), [&] { (void)other.stream(); }); });
        CHECK(contains(text, "cuda:0"));
        CHECK(contains(text, "cuda:1"));
        const Tensor x = ones({3}, {DType::f32, Device::cuda()});
        Tensor y;
        const auto graph =
            capture(Device::cuda(), [&] { y = x + ones({3}).to(Device::cuda()); });  // the CPU is free
        graph->replay();
        CHECK(sum(y).item() == 6.0);
    }
    CHECK_NOTHROW(synchronize(Device::cuda()));
    emulator::configure(1, std::int64_t{8} << 30);
}
#endif

TEST_CASE("cuda: a thread's bad element is told to that thread") {
    if (!has_cuda_device()) return;
    const Tensor weight = ones({5, 4}, {DType::f32, Device::cuda()});
    constexpr int calls = 50;
    const auto refused = [&](std::int64_t id) {
        int count = 0;
        const Tensor ids = full({2}, id, {DType::i64, Device::cuda()});
        for (int i = 0; i < calls; ++i) {
            try {
                (void)embedding(weight, ids);
                backend(Device::cuda()).synchronize();
            } catch (const Error&) {
                ++count;
            }
        }
        return count;
    };
    int of_good = 0;
    std::thread other([&] { of_good = refused(2); });
    const int of_bad = refused(9);
    other.join();
    CHECK(of_good == 0);
    CHECK(of_bad == calls);
}

}  // namespace potluck::test
