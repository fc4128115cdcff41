#include "core/memory.h"

#include <doctest/doctest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "core/factories.h"
#include "core/op_scope.h"
#include "tests/core/fake_device.h"

using namespace potluck;

namespace {

std::int64_t sum_of(const std::map<std::string, std::int64_t>& by_op) {
    return std::accumulate(by_op.begin(), by_op.end(), std::int64_t{0},
                           [](std::int64_t sum, const auto& entry) { return sum + entry.second; });
}

/// A memory cap for one test.
struct Cap {
    explicit Cap(std::int64_t bytes) { set_memory_cap(bytes); }
    ~Cap() { set_memory_cap(0); }
    Cap(const Cap&) = delete;
    Cap& operator=(const Cap&) = delete;
};

constexpr std::int64_t mega = 1 << 20;

Tensor bytes_of(std::int64_t bytes, Device device = Device::cpu()) {
    return empty({bytes}, {DType::u8, device});
}

}  // namespace

TEST_CASE("memory: current, peak and who holds it") {
    reset_peak_memory();
    const MemoryStatistics before = memory_statistics();
    CHECK(before.current == before.peak);
    {
        const OpScope scope("first op");
        const Tensor a = bytes_of(1000);
        Tensor b;
        {
            const OpScope inner("second op");
            b = bytes_of(3000);
        }
        MemoryStatistics now = memory_statistics();
        CHECK(now.current == before.current + 4000);
        CHECK(now.peak == now.current);
        CHECK(now.current_by_op.at("first op") == 1000);
        CHECK(now.current_by_op.at("second op") == 3000);
        CHECK(sum_of(now.current_by_op) == now.current);
        b = Tensor();
        const Tensor c = bytes_of(500);
        now = memory_statistics();
        CHECK(now.current == before.current + 1500);
        CHECK(now.peak == before.current + 4000);
        CHECK(now.current_by_op.count("second op") == 0);
        CHECK(now.peak_by_op.at("second op") == 3000);
        CHECK(now.peak_by_op.at("first op") == 1000);
        CHECK(sum_of(now.peak_by_op) == now.peak);
    }
    CHECK(memory_statistics().current == before.current);
    reset_peak_memory();
    CHECK(memory_statistics().peak == before.current);
}

TEST_CASE("memory: views take none, and the last one frees it") {
    const auto before = memory_statistics().current;
    Tensor view;
    {
        const Tensor x = zeros({100});
        view = x.alias({10}, {10}, 0);
        CHECK(memory_statistics().current == before + 400);
    }
    CHECK(memory_statistics().current == before + 400);
    view = Tensor();
    CHECK(memory_statistics().current == before);
}

TEST_CASE("memory: a cap refuses what passes it, says who holds what, and leaves all as it was") {
    const OpScope scope("big user");
    const Tensor held = bytes_of(5 * mega);
    const std::int64_t current = memory_statistics().current;
    const Cap cap(current + 2 * mega);
    const MemoryStatistics before = memory_statistics();
    try {
        const OpScope inner("matmul");
        bytes_of(3 * mega);
        FAIL("an allocation past the cap went through");
    } catch (const OutOfMemory& error) {
        const std::string text = error.what();
        CAPTURE(text);
        CHECK(error.op() == "matmul");
        CHECK(error.requested_bytes() == 3 * mega);
        CHECK(text.starts_with("[matmul] out of memory on cpu: 3.0 MiB asked while tensors hold "));
        CHECK(text.find("passes the cap of ") != std::string::npos);
        CHECK(text.find("by 1.0 MiB.") != std::string::npos);
        CHECK(text.find("Held by op: big user 5.0 MiB") != std::string::npos);
        CHECK(text.find("smaller batch") != std::string::npos);
        CHECK(text.find("set_memory_cap()") != std::string::npos);
    }
    const MemoryStatistics after = memory_statistics();
    CHECK(after.current == before.current);
    CHECK(after.peak == before.peak);
    CHECK(after.current_by_op == before.current_by_op);
    CHECK_NOTHROW(bytes_of(2 * mega));  // exactly up to the cap
    CHECK_THROWS_AS(bytes_of(2 * mega + 1), OutOfMemory);
    CHECK_THROWS_AS(set_memory_cap(-1), Error);
}

TEST_CASE("memory: what the system does not have is refused, not crashed on") {
    const auto before = memory_statistics().current;
    try {
        bytes_of(std::int64_t{1} << 46);
        FAIL("64 TiB were had");
    } catch (const OutOfMemory& error) {
        CHECK(std::string(error.what()).find("the system has no more to give") != std::string::npos);
    }
    CHECK_THROWS_AS(bytes_of(std::int64_t{1} << 62), OutOfMemory);
    CHECK(memory_statistics().current == before);
}

TEST_CASE("memory: the same sizes again and again cost no new memory") {
    const Device device = test::fake_device();
    set_memory_cap(0, device);
    const auto step = [&] {
        std::vector<Tensor> held;
        for (const std::int64_t size : {100, 200'000, 4096, 100, 5000, 1'000'000})
            held.push_back(bytes_of(size, device));
        held.erase(held.begin(), held.begin() + 3);
        held.push_back(bytes_of(200'000, device));
    };
    step();
    const auto after_first = test::fake_memory();
    for (int i = 0; i < 100; ++i) step();
    CHECK(test::fake_memory().allocations == after_first.allocations);
    CHECK(test::fake_memory().bytes == after_first.bytes);
    release_cached_memory(device);
    CHECK(test::fake_memory().bytes == 0);
    CHECK(memory_statistics(device).cached == 0);
}

TEST_CASE("memory: live and kept blocks never take more than an eighth above what live ones once did") {
    const Device device = test::fake_device();
    release_cached_memory(device);
    std::int64_t most_live = 0;
    std::vector<Tensor> held;
    unsigned random = 1;
    for (int i = 0; i < 20'000; ++i) {
        random = random * 1664525U + 1013904223U;
        if ((random >> 16) % 2 == 0 || held.empty()) {
            held.push_back(bytes_of(64 * (1 + (random >> 20) % 3000), device));
        } else {
            std::swap(held[(random >> 8) % held.size()], held.back());
            held.pop_back();
        }
        if (held.size() > 40) held.clear();
        const MemoryStatistics now = memory_statistics(device);
        most_live = std::max(most_live, now.current);
        const std::int64_t most_blocks = most_live + 40 * 4096;  // blocks are rounded up to pages
        REQUIRE(now.current + now.cached <= most_blocks + most_blocks / 8);
        REQUIRE(test::fake_memory().bytes <= most_blocks + most_blocks / 8);
    }
    held.clear();
    release_cached_memory(device);
    CHECK(test::fake_memory().bytes == 0);
}

TEST_CASE("memory: what is not live at the peak is kept for the next step all the same") {
    const Device device = test::fake_device();
    release_cached_memory(device);
    const auto step = [&] {
        { const Tensor activations = bytes_of(mega, device); }
        const Tensor gradients = bytes_of(9 * mega, device);  // the peak
    };
    for (int i = 0; i < 2; ++i) step();  // the peak is known after the first
    const auto known = test::fake_memory();
    for (int i = 0; i < 10; ++i) step();
    CHECK(test::fake_memory().allocations == known.allocations);
    release_cached_memory(device);
}

TEST_CASE("memory: kept blocks are given back before a request fails") {
    const Device device = test::fake_device();
    release_cached_memory(device);
    test::set_fake_capacity(10 * mega);
    {
        const Tensor a = bytes_of(4 * mega, device);
        const Tensor b = bytes_of(4 * mega, device);
    }
    CHECK(memory_statistics(device).cached == 8 * mega);
    {
        const Tensor c = bytes_of(9 * mega, device);  // fits only without the cached blocks
        CHECK(memory_statistics(device).cached == 0);
        CHECK_THROWS_WITH_AS(bytes_of(2 * mega, device), doctest::Contains("out of memory on cuda:40"),
                             OutOfMemory);
    }
    test::set_fake_capacity(INT64_MAX);
    release_cached_memory(device);
}

TEST_CASE("memory: the cap holds for kept blocks too") {
    const Device device = test::fake_device();
    release_cached_memory(device);
    {
        const Tensor a = bytes_of(4 * mega, device);
        const Tensor b = bytes_of(4 * mega, device);
    }
    set_memory_cap(5 * mega, device);
    CHECK(memory_statistics(device).cached <= 5 * mega);
    {
        const Tensor c = bytes_of(3 * mega, device);
        CHECK(memory_statistics(device).current + memory_statistics(device).cached <= 5 * mega);
    }
    set_memory_cap(0, device);
    release_cached_memory(device);
}

TEST_CASE("memory: threads may allocate and free at once") {
    const auto before = memory_statistics();
    {
        std::vector<std::jthread> workers;
        for (int worker = 0; worker < 4; ++worker)
            workers.emplace_back([worker] {
                std::vector<Tensor> mine(16);
                for (int i = 0; i < 4000; ++i)
                    mine[static_cast<std::size_t>(i) % 16] = bytes_of(1000 + 64 * (i % 7) + worker);
            });
    }
    CHECK(memory_statistics().current == before.current);
    CHECK(memory_statistics().current_by_op == before.current_by_op);
}

TEST_CASE("memory_report: a readable summary") {
    const OpScope scope("reporter");
    const Tensor x = bytes_of(3 * mega);
    const std::string text = memory_report();
    CAPTURE(text);
    CHECK(text.starts_with("cpu: "));
    CHECK(text.find("held by tensors") != std::string::npos);
    CHECK(text.find("no cap") != std::string::npos);
    CHECK(text.find("reporter 3.0 MiB") != std::string::npos);
    CHECK_THROWS_AS(memory_report(Device::cuda(99)), Error);
}

TEST_CASE("memory: what is held while the peak is paused does not raise it") {
    reset_peak_memory();
    const Tensor before = bytes_of(2000);
    const MemoryStatistics at_first = memory_statistics();
    {
        const PausedPeak pause;
        const Tensor large = bytes_of(50'000);
        {
            const PausedPeak nested;
            const Tensor larger = bytes_of(90'000);
        }
        const Tensor again = bytes_of(70'000);
        CHECK(memory_statistics().current == at_first.current + 120'000);
        CHECK(memory_statistics().peak == at_first.peak);
    }
    CHECK(memory_statistics().peak == at_first.peak);
    CHECK(memory_statistics().peak_by_op == at_first.peak_by_op);
    const Tensor after = bytes_of(3000);
    CHECK(memory_statistics().peak == at_first.peak + 3000);
    CHECK(sum_of(memory_statistics().peak_by_op) == memory_statistics().peak);
    {
        const PausedPeak pause;
        reset_peak_memory();
        const Tensor large = bytes_of(50'000);
    }
    CHECK(memory_statistics().peak == memory_statistics().current);
    CHECK(sum_of(memory_statistics().peak_by_op) == memory_statistics().peak);
}
