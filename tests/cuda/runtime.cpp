#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/factories.h"
#include "core/memory.h"
#include "cuda/runtime.h"
#include "tests/cuda/device.h"
#include "tests/expect_error.h"
#if POTLUCK_CUDA_EMULATED
#include <cstdlib>

#include "cuda/cuda_backend.h"
#include "tests/cuda_emulator/state.h"
#endif

using namespace potluck;

TEST_CASE("cuda: a copy of any size there and back gives the same bytes") {
    if (!test::has_cuda_device()) return;
    for (const std::int64_t count :
         {0L, 1L, 3L, 1025L, 1'500'003L}) {  // the last one needs several staging buffers
        std::vector<std::int64_t> values(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int64_t>(i) * 2654435761;
        const Tensor there = tensor(values, {count}).to(Device::cuda());
        CHECK(there.device() == Device::cuda());
        CHECK(there.to(Device::cpu()).to_vector<std::int64_t>() == values);
    }
}

TEST_CASE("cuda: memory is counted, capped and told as on the CPU") {
    if (!test::has_cuda_device()) return;
    const Device device = Device::cuda();
    const std::int64_t before = memory_statistics(device).current;
    {
        const Tensor held = Tensor::empty({1000}, {DType::f32, device});
        CHECK(memory_statistics(device).current == before + 4000);
        set_memory_cap(before + 5000, device);
        const std::string text = test::error_of([&] { (void)Tensor::empty({1000}, {DType::f32, device}); });
        CHECK(test::contains(text, "out of memory on cuda:0"));
        CHECK(test::contains(text, "passes the cap"));
        CHECK(memory_statistics(device).current == before + 4000);
        set_memory_cap(0, device);
    }
    CHECK(memory_statistics(device).current == before);
    release_cached_memory(device);
    CHECK(memory_statistics(device).cached >= 0);
}

TEST_CASE("cuda: a device says what it is") {
    if (!test::has_cuda_device()) return;
    const std::string text = describe(Device::cuda());
    CHECK(text.find("GiB") != std::string::npos);
    CHECK(text.find("compute capability") != std::string::npos);
    CHECK(text.find("runtime") != std::string::npos);
}

TEST_CASE("cuda: a device that is not there is refused by name") {
    CHECK(test::contains(test::error_of([] { (void)describe(Device::cuda(63)); }), "cuda:63"));
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE("cuda: a device without memory pools is refused when it is opened") {
    emulator::set_memory_pools(false);
    CudaBackend device(0);
    const std::string text = test::error_of([&] { (void)device.stream(); });
    emulator::set_memory_pools(true);
    CHECK(test::contains(text, "cuda:0"));
    CHECK(test::contains(text, "memory pools"));
    CHECK(test::contains(text, "driver"));
}

TEST_CASE("cuda emulator: a setting that is no whole number in its range is refused by name") {
    for (const char* bad : {"8GB", "", "-1", "1e9", " 5", "99999999999999999999"}) {
        setenv("POTLUCK_EMULATED_MEMORY", bad, 1);
        const std::string text = test::error_of(
            [] { (void)emulator::setting("POTLUCK_EMULATED_MEMORY", 0, std::int64_t{1} << 40, 7); });
        INFO(text);
        CHECK(test::contains(text, "POTLUCK_EMULATED_MEMORY"));
        CHECK(test::contains(text, std::string("\"") + bad + "\""));
    }
    setenv("POTLUCK_EMULATED_MEMORY", "4096", 1);
    CHECK(emulator::setting("POTLUCK_EMULATED_MEMORY", 0, 1 << 20, 7) == 4096);
    unsetenv("POTLUCK_EMULATED_MEMORY");
    CHECK(emulator::setting("POTLUCK_EMULATED_MEMORY", 0, 1 << 20, 7) == 7);
}
#endif

TEST_CASE("cuda: events order streams, and tell the time between them") {
    if (!test::has_cuda_device()) return;
    const cuda::CurrentDevice current(0);
    const cuda::Stream first;
    const cuda::Stream second;
    const cuda::Event start(true);
    const cuda::Event end(true);
    start.record(first.get());
    end.record(first.get());
    end.block(second.get());
    second.synchronize();
    end.synchronize();
    CHECK(end.elapsed_ms(start) >= 0.0);
}
