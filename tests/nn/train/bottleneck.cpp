#include "nn/train/bottleneck.h"

#include <doctest/doctest.h>

#include "tests/expect_error.h"

namespace potluck::test {
namespace {

using Kind = Bottleneck::Kind;

/// 10 s of updates on a device of 1 TFLOP/s and 100 GB/s that need half of what it can compute.
BottleneckFacts computing() {
    BottleneckFacts facts{.updates = 100, .flops = 5e12, .flops_per_second = 1e12, .bytes_per_second = 1e11};
    facts.time[Phase::forward] = 3.0;
    facts.time[Phase::backward] = 6.0;
    facts.time[Phase::optimizer] = 1.0;
    return facts;
}

Kind kind_of(const BottleneckFacts& facts) { return find_bottleneck(facts).value().kind; }

}  // namespace

TEST_CASE("bottleneck: input, from a tenth of the time on, whatever else is slow") {
    BottleneckFacts facts = computing();
    facts.time[Phase::data] = 1.0;  // of 11 s
    CHECK(kind_of(facts) == Kind::compute);
    facts.time[Phase::data] = 1.2;
    CHECK(kind_of(facts) == Kind::input);
    facts.time[Phase::data] = 10.0;
    const Bottleneck bottleneck = find_bottleneck(facts).value();
    CHECK(bottleneck.kind == Kind::input);
    CHECK(contains(bottleneck.reason, "waits for data 50 % of its time"));
    CHECK(contains(bottleneck.reason, "2.00 times as fast"));
    // Validation and saving are no part of it.
    facts.time[Phase::data] = 1.2;
    facts.time[Phase::validation] = facts.time[Phase::saving] = 100.0;
    CHECK(kind_of(facts) == Kind::input);
    // It needs no rates.
    facts.flops_per_second = facts.bytes_per_second = 0.0;
    CHECK(kind_of(facts) == Kind::input);
}

TEST_CASE("bottleneck: bandwidth when the batches take long to copy") {
    BottleneckFacts facts = computing();
    facts.time[Phase::copy] = 2.0;
    const Bottleneck bottleneck = find_bottleneck(facts).value();
    CHECK(bottleneck.kind == Kind::bandwidth);
    CHECK(contains(bottleneck.reason, "Copying the batches to the device takes 17 %"));
}

TEST_CASE("bottleneck: compute or bandwidth, whichever needs more at least") {
    BottleneckFacts facts = computing();
    const Bottleneck computes = find_bottleneck(facts).value();
    CHECK(computes.kind == Kind::compute);
    CHECK(contains(computes.reason, "at least 50 % of the time at the measured 1000 GFLOP/s"));
    CHECK_FALSE(contains(computes.reason, "small"));
    // 100 updates of 6 GB of activations, written and read: 1200 GB at 100 GB/s are 12 s of these 10.
    facts.memory.activations = 6'000'000'000;
    CHECK(kind_of(facts) == Kind::bandwidth);
    facts.memory.activations = 2'000'000'000;
    CHECK(kind_of(facts) == Kind::compute);
    facts.flops = 1e12;
    facts.memory.activations = 0;
    CHECK(contains(find_bottleneck(facts).value().reason, "many small ops"));
}

TEST_CASE("bottleneck: none where nothing is known") {
    CHECK_FALSE(find_bottleneck({}).has_value());
    BottleneckFacts facts = computing();
    facts.bytes_per_second = 0.0;
    CHECK_FALSE(find_bottleneck(facts).has_value());
    facts = computing();
    facts.updates = 0;
    CHECK_FALSE(find_bottleneck(facts).has_value());
}

TEST_CASE("bottleneck: the bytes of an update") {
    const MemoryUse memory{.parameters = 10, .optimizer_state = 20, .gradients = 11, .activations = 1000};
    CHECK(least_bytes_of_update(memory, 1.0) == 2 * 10 + 2 * 1000 + 11 + 11 + 2 * 10 + 2 * 20);
    CHECK(least_bytes_of_update(memory, 3.0) == 3 * (2 * 10 + 2 * 1000 + 11) + 11 + 2 * 10 + 2 * 20);
}

}  // namespace potluck::test
