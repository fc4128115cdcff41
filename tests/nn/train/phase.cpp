// Where the time of an update goes.

#include "nn/train/phase.h"

#include <doctest/doctest.h>

#include <chrono>
#include <set>
#include <thread>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

/// One weight; forward sleeps.
struct Slow : nn::Module {
    Tensor w = nn::parameter(ones({1}));
    void members(nn::Members& m) override { m("w", w); }
    Tensor loss(const Tensor& inputs, const Tensor&) override {
        sleep_ms(20);
        return mean(w * inputs);
    }
};

}  // namespace

TEST_CASE("phase: seconds add up, and shares are those of the total") {
    PhaseSeconds seconds;
    CHECK(seconds.total() == 0.0);
    CHECK(seconds.share(Phase::data) == 0.0);
    seconds[Phase::data] = 1.0;
    seconds[Phase::other] = 3.0;
    PhaseSeconds more;
    more[Phase::data] = 4.0;
    seconds += more;
    CHECK(seconds[Phase::data] == 5.0);
    CHECK(seconds.total() == 8.0);
    CHECK(seconds.share(Phase::data) == 0.625);
    std::set<std::string> names;
    for (const Phase phase : phases) names.insert(name_of(phase));
    CHECK(names.size() == phase_count);
}

TEST_CASE("phase: a timer tells phases apart, also those that come again") {
    PhaseTimer timer(Device::cpu());
    CHECK(timer.seconds().total() == 0.0);
    for (int round = 0; round < 2; ++round) {
        timer.begin(Phase::forward);
        sleep_ms(10);
        timer.begin(Phase::backward);
        timer.begin(Phase::backward);
        sleep_ms(20);
    }
    timer.end();
    sleep_ms(30);  // belongs to nobody
    const PhaseSeconds seconds = timer.seconds();
    CHECK(seconds[Phase::forward] >= 0.02);
    CHECK(seconds[Phase::backward] >= 0.04);
    CHECK(seconds.total() == doctest::Approx(seconds[Phase::forward] + seconds[Phase::backward]));
    PhaseSeconds scoped;
    {
        const PhaseScope saving(scoped, Phase::saving);
        sleep_ms(5);
    }
    CHECK(scoped[Phase::saving] >= 0.005);
    CHECK(scoped.total() == scoped[Phase::saving]);
}

TEST_CASE("phase: an update says what it spent in each, and a trace shows it") {
    on_each_device([] {
        Slow model;
        model.to(test_device());
        optim::SGD optimizer(model, {.learning_rate = 0.1});
        OneDevice execution(model, optimizer);
        const std::vector<data::Batch> batches(2, {.inputs = potluck::ones({4, 1})});
        const TemporaryFolder folder;
        start_trace();
        const UpdateResult result = execution.update(batches, {.learning_rate = 0.1});
        write_trace(folder / "trace.json");
        CHECK(result.time[Phase::forward] >= 0.04);
        for (const Phase phase : {Phase::copy, Phase::backward, Phase::optimizer}) {
            INFO(name_of(phase));
            CHECK(result.time[phase] > 0.0);
            CHECK(result.time[phase] < 10.0);
        }
        CHECK(result.time[Phase::data] + result.time[Phase::saving] + result.time[Phase::other] == 0.0);
        std::map<std::string, int> shown;
        const auto trace = nlohmann::json::parse(read_file(folder / "trace.json"));
        for (const auto& event : trace.at("traceEvents")) ++shown[event.at("name")];
        CHECK(shown["phase: copy"] == 2);
        CHECK(shown["phase: forward"] == 2);
        CHECK(shown["phase: backward"] == 2);
        CHECK(shown["phase: optimizer"] == 1);
        CHECK(shown["phase: other"] == 0);

        data::Batch none = batches.front();  // an update without targets has no end that the host waits for
        none.targets = potluck::full({4}, -100, {DType::i64});
        CHECK(execution.update(std::vector{none}, {.learning_rate = 0.1}).time.total() == 0.0);
    });
}

}  // namespace potluck::test
