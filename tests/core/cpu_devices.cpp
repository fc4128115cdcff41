// CPU devices beside the first: the same kernels with their own threads, memory and random numbers.

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <numeric>
#include <thread>

#include "core/backend.h"
#include "core/cpu/parallel.h"
#include "core/device_registry.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/safetensors.h"
#include "tests/core/temporary_folder.h"

using namespace potluck;

namespace {

/// Shared by all cases here: devices exist until the process ends.
Device second_cpu() {
    static const Device device = add_cpu_device({.threads = 3});
    return device;
}

/// Removes the cap at the end.
struct CapGuard {
    Device device;
    ~CapGuard() { set_memory_cap(0, device); }
};

/// The largest team size that was reported, and the number of threads that took part.
int team_of(int threads) {
    const cpu::Team team(threads);
    std::atomic<int> seen{0};
    cpu::parallel_for(64, 1, [&](std::int64_t, std::int64_t) { seen = omp_get_num_threads(); });
    return seen;
}

}  // namespace

TEST_CASE("cpu devices: a new one takes the next number and is listed beside the first") {
    const Device device = second_cpu();
    CHECK(device.is_cpu());
    CHECK(device != Device::cpu());
    CHECK(name_of(device) == fmt::format("cpu:{}", device.index));
    CHECK(parse_device(name_of(device)) == device);
    const std::vector<Device> all = registered_devices();
    CHECK(all[0] == Device::cpu());
    CHECK(std::count(all.begin(), all.end(), device) == 1);
    CHECK(device_count() == static_cast<int>(all.size()));
    const Device next = add_cpu_device();
    CHECK(next.index > device.index);
    CHECK(device_count() == static_cast<int>(all.size()) + 1);
    CHECK(describe(device).find("3 of ") != std::string::npos);
}

TEST_CASE("cpu devices: options that cannot be add none") {
    const int before = device_count();
    CHECK_THROWS_WITH_AS(add_cpu_device({.threads = -1}), doctest::Contains("[add_cpu_device] -1 threads"),
                         Error);
    CHECK_THROWS_AS(add_cpu_device({.threads = 2'000'000'000}), Error);
    CHECK_THROWS_WITH_AS(add_cpu_device({.memory_cap = -5}),
                         doctest::Contains("[add_cpu_device] a memory cap of -5 bytes"), Error);
    CHECK_THROWS_WITH_AS(set_memory_cap(-5), doctest::Contains("[set_memory_cap]"), Error);
    CHECK(device_count() == before);
}

TEST_CASE("cpu devices: threads are set for each") {
    const Device device = second_cpu();
    const int of_first = threads();
    CHECK(threads(device) == 3);
    set_threads(2, device);
    CHECK(threads(device) == 2);
    CHECK(threads() == of_first);
    set_threads(0, device);
    CHECK(threads(device) >= 1);
    set_threads(3, device);
    CHECK_THROWS_WITH_AS(set_threads(-1, device), doctest::Contains("[set_threads] -1 threads"), Error);
    CHECK_THROWS_WITH_AS(set_threads(1, Device::cpu(60)), doctest::Contains("no device cpu:60 here"), Error);
}

TEST_CASE("cpu devices: a team has the size of its device, in two threads at once") {
    CHECK(team_of(3) == 3);
    CHECK(team_of(1) == 1);
    int two = 0;
    int four = 0;
    std::thread a([&] {
        for (int i = 0; i < 20; ++i) two += team_of(2);
    });
    std::thread b([&] {
        for (int i = 0; i < 20; ++i) four += team_of(4);
    });
    a.join();
    b.join();
    CHECK(two == 40);
    CHECK(four == 80);
}

TEST_CASE("cpu devices: a kernel without a team is told, not run with another device's") {
    CHECK_THROWS_WITH_AS(cpu::parallel_for(10, 1, [](std::int64_t, std::int64_t) {}),
                         doctest::Contains("names no team"), Error);
}

TEST_CASE("cpu devices: tensors, host reads, printing and saving") {
    const Device device = second_cpu();
    const auto on_device = [&](DType dtype) { return TensorOptions{dtype, device}; };
    const Tensor x = tensor({{1., 2., 3.}, {4., 5., 6.}}, on_device(DType::f32));
    CHECK(x.device() == device);
    CHECK(x.data<float>()[5] == 6.0F);
    const Tensor turned = x.alias({3, 2}, {1, 3}, 0);
    CHECK(turned.to_vector() == std::vector<double>{1, 4, 2, 5, 3, 6});
    CHECK(turned.alias({}, {}, 5).item() == 6);
    CHECK(to_string(turned) == fmt::format("[[1. 4.]\n [2. 5.]\n [3. 6.]] ({})", device));
    CHECK(arange(0, 4, 1, on_device(DType::i64)).device() == device);
    CHECK(arange(0, 4, 1, on_device(DType::i32)).to_vector() == std::vector<double>{0, 1, 2, 3});
    CHECK(eye(2, on_device(DType::f32)).to_vector() == std::vector<double>{1, 0, 0, 1});
    CHECK(zeros({0}, on_device(DType::f32)).to_vector().empty());

    const test::TemporaryFolder folder;
    save_safetensors(folder / "x.safetensors", {{{"turned", turned}, {"x", x}}, {}});
    const TensorFile loaded = load_safetensors(folder / "x.safetensors");
    CHECK(loaded.tensors.at("turned").to_vector() == turned.to_vector());
    CHECK(loaded.tensors.at("x").device() == Device::cpu());
}

TEST_CASE("cpu devices: each books its own memory, under its own cap") {
    const Device device = second_cpu();
    const std::int64_t first = memory_statistics().current;
    const std::int64_t second = memory_statistics(device).current;
    const Tensor x = zeros({1000}, {DType::f32, device});
    CHECK(memory_statistics(device).current == second + 4000);
    CHECK(memory_statistics().current == first);

    const CapGuard guard{device};
    set_memory_cap(second + 6000, device);
    CHECK_THROWS_WITH_AS(zeros({1000}, {DType::f32, device}), doctest::Contains(name_of(device).c_str()),
                         OutOfMemory);
    CHECK_NOTHROW(zeros({100'000}));
    CHECK(memory_statistics().cap == 0);
    CHECK(memory_statistics(device).current == second + 4000);

    const Device small = add_cpu_device({.threads = 1, .memory_cap = 1000});
    CHECK(memory_statistics(small).cap == 1000);
    CHECK_THROWS_AS(zeros({1000}, {DType::f32, small}), OutOfMemory);
}

TEST_CASE("cpu devices: kernels keep their temporaries out of the books of others") {
    // Reductions of columns, convolutions of transposed inputs, pooling with transposed indices: all copy first.
    const Device device = second_cpu();
    const TensorOptions options{DType::f16, device};
    const Tensor x = ones({1, 4, 8, 8}, options);
    const Tensor turned = x.alias({1, 4, 8, 8}, {256, 64, 1, 8}, 0);
    const Tensor weight = ones({2, 4, 3, 3}, options);
    Tensor y = empty({1, 2, 6, 6}, options);
    Tensor dx = empty({1, 4, 8, 8}, options);
    Tensor dweight = empty({2, 4, 3, 3}, options);
    Tensor none;
    Tensor column_maxima = empty({1, 8}, options);
    Tensor pooled = empty({1, 4, 4, 4}, options);
    Tensor places = empty({1, 4, 4, 4}, {DType::i64, device});
    PoolSpec pool;
    pool.kernel = pool.stride = {2, 2};
    set_memory_cap(memory_statistics().current + 1);  // the first CPU cannot allocate
    const CapGuard guard{Device::cpu()};
    CHECK_NOTHROW(backend(device).convolution(turned, weight, none, {}, y));
    CHECK_NOTHROW(backend(device).convolution_backward(turned, weight, y, {}, dx, dweight, none));
    CHECK_NOTHROW(
        backend(device).reduce(ReduceOp::max, x.alias({1, 8, 32}, {256, 1, 8}, 0), 1, column_maxima));
    CHECK_NOTHROW(backend(device).max_pool(x, pool, pooled, places));
    const Tensor turned_places = places.alias({1, 4, 4, 4}, {64, 16, 1, 4}, 0);
    CHECK_NOTHROW(backend(device).max_pool_backward(turned_places, pooled, pool, dx));
    CHECK_NOTHROW(backend(device).fill(dx, 1));
}

TEST_CASE("cpu devices: generators are independent, and begin with the seed of the first") {
    const RandomKey before = default_generator().state();
    manual_seed(77);
    const Device device = add_cpu_device();
    CHECK(default_generator(device).state().seed == 77);
    CHECK(default_generator(device).state().offset == 0);
    const Tensor first = randn({1000});
    CHECK(default_generator(device).state().offset == 0);
    const Tensor second = randn({1000}, {DType::f32, device});
    CHECK(first.to_vector() == second.to_vector());
    manual_seed(78);
    CHECK(default_generator(device).state().seed == 78);
    default_generator().set_state(before);
}
