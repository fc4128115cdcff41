#include "core/device.h"

#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "core/cpu/parallel.h"
#include "core/device_registry.h"
#include "core/error.h"

using namespace potluck;

TEST_CASE("device: names are written and read") {
    CHECK(name_of(Device::cpu()) == "cpu");
    CHECK(name_of(Device::cuda(3)) == "cuda:3");
    CHECK(parse_device("cpu") == Device::cpu());
    CHECK(parse_device("cpu:0") == Device::cpu());
    CHECK(parse_device("cpu:2") == Device::cpu(2));
    CHECK(name_of(Device::cpu(2)) == "cpu:2");
    CHECK(parse_device("cuda") == Device::cuda(0));
    CHECK(parse_device("cuda:12") == Device::cuda(12));
    for (const char* wrong : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999", "CPU",
                              "cpu:", "cpu:-1", "cpu 1", "cpus"}) {
        CAPTURE(wrong);
        CHECK_THROWS_WITH_AS(parse_device(wrong), doctest::Contains("[parse_device]"), Error);
    }
}

TEST_CASE("device: one that is not there is refused by name") {
    for (const Device none : {Device::cuda(41), Device::cpu(60), Device::cpu(-1), Device::cuda(2'000'000)}) {
        const std::string text = "no device " + name_of(none) + " here";
        CHECK_THROWS_WITH_AS(backend(none), doctest::Contains(text.c_str()), Error);
    }
    CHECK_NOTHROW(backend(best_device()));
}

TEST_CASE("device: nothing is registered twice or without kernels") {
    CHECK_THROWS_AS(register_device(Device::cuda(42), nullptr), Error);
    CHECK(&device_entry(Device::cpu()) == &device_entry(Device::cpu()));
}

TEST_CASE("threads: set for all, 0 is the default, negative is refused") {
    const int before = threads();
    CHECK(before >= 1);
    set_threads(1);
    int seen = 0;
    std::thread([&] { seen = threads(); }).join();
    CHECK(seen == 1);
    CHECK_THROWS_WITH_AS(set_threads(-1), doctest::Contains("[set_threads] -1 threads"), Error);
    CHECK_THROWS_WITH_AS(set_threads(2'000'000'000), doctest::Contains("[set_threads] 2000000000 threads"),
                         Error);
    CHECK(threads() == 1);
    set_threads(0);
    CHECK(threads() >= 1);
    set_threads(before);
}

TEST_CASE("parallel_for: fixed pieces, each once; an exception reaches the caller") {
    for (const int count : {1, 2, 5}) {
        const cpu::Team team(count);
        std::vector<int> hits(1000, 0);
        std::vector<int> starts(1000, 0);
        cpu::parallel_for(1000, 64, [&](std::int64_t first, std::int64_t last) {
            starts[static_cast<std::size_t>(first)] = static_cast<int>(last - first);
            for (std::int64_t i = first; i < last; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        CHECK(hits == std::vector<int>(1000, 1));
        CHECK(starts[0] == 64);
        CHECK(starts[960] == 40);
        CHECK_THROWS_AS(cpu::parallel_for(1000, 64,
                                          [](std::int64_t first, std::int64_t) {
                                              if (first == 128) throw Error("test", "planned");
                                          }),
                        Error);
    }
    const cpu::Team team(2);
    cpu::parallel_for(0, 64, [](std::int64_t, std::int64_t) { FAIL("called for nothing"); });
}
