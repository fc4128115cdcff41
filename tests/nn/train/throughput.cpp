// What a training tells about its speed: in metrics.jsonl, summary.json, report.html and tensorboard/.

#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/nn/train/scale.h"

namespace potluck::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Items that take `milliseconds` each.
data::FunctionDataset slow_items(int milliseconds) {
    return data::FunctionDataset(64, [milliseconds](std::int64_t, RandomKey) {
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        return data::Example{ones({8}), zeros({}, {DType::i64})};
    });
}

/// A forward of at least some milliseconds.
struct Net : nn::Module {
    nn::Linear linear{8, 4};
    int milliseconds = 0;
    void members(nn::Members& m) override { m("linear", linear); }
    Tensor forward(const Tensor& x) override {
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        return linear(x);
    }
    Tensor loss(const Tensor& x, const Tensor& y) override { return cross_entropy((*this)(x), y); }
};

json read_json(const std::string& path) { return json::parse(read_file(path)); }

double total_of(const json& time) {
    double total = 0.0;
    for (const auto& [name, seconds] : time.items()) total += seconds.get<double>();
    return total;
}

struct Trained {
    TrainingSummary summary;
    std::vector<json> lines;
    std::string report;
};

Trained train(const std::string& folder, const data::FunctionDataset& items, TrainerOptions options,
              int forward_ms, data::LoaderOptions loading = {.batch = 4}) {
    manual_seed(3);
    Net net;
    net.milliseconds = forward_ms;
    optim::AdamW optimizer(net);
    data::Loader loader(items, loading);
    options.run_folder = folder;
    options.quiet = true;
    Trained trained{Trainer(net, optimizer, loader, options).fit(), {}, {}};
    trained.lines = read_lines(folder + "/metrics.jsonl");
    trained.report = read_file(folder + "/report.html");
    return trained;
}

}  // namespace

TEST_CASE("throughput: the phases of a step add up to the wall clock, and its rates to its counts") {
    const TemporaryFolder folder;
    const auto start = std::chrono::steady_clock::now();
    const Trained trained =
        train(folder / "run", slow_items(1), {.steps = 12, .accumulate = 2, .checkpoint_every = 4}, 3);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    REQUIRE(trained.lines.size() == 12);
    double total = 0.0;
    for (const json& line : trained.lines) {
        CHECK(line["samples"] == 8);
        CHECK(line["tokens"] == 8);
        CHECK(line["samples_per_second"].get<double>() * line["seconds"].get<double>() ==
              doctest::Approx(8.0));
        const json& time = line["time"];
        CHECK(time.size() == phase_count);
        CHECK(time["data"].get<double>() >= 0.008);
        CHECK(time["forward"].get<double>() >= 0.006);
        CHECK(time["validation"] == 0.0);
        // The checkpoint of step 4 was saved after its line.
        CHECK((time["saving"].get<double>() > 0.0) == (line["step"] == 5 || line["step"] == 9));
        CHECK(total_of(time) >= line["seconds"].get<double>());
        CHECK(line["mfu"].get<double>() > 0.0);
        CHECK_FALSE(line.contains("resumed"));
        total += total_of(time);
    }
    CHECK(total <= wall);
    CHECK(total_of(trained.lines[4]["time"]) - trained.lines[4]["time"]["saving"].get<double>() ==
          doctest::Approx(trained.lines[4]["seconds"].get<double>()).epsilon(0.5));

    const json summary = read_json(folder / "run/summary.json");
    const double peak = summary["peak_flops_per_second"].get<double>();
    CHECK(peak > 1e7);
    CHECK(summary["peak_name"].get<std::string>().find("product of two f32 matrices") != std::string::npos);
    CHECK(summary["mfu_formula"].get<std::string>().find(summary["peak_name"].get<std::string>()) !=
          std::string::npos);
    const double flops = 6.0 * (8 * 4 + 4);  // of a sample, for want of a better number
    CHECK(summary["mfu"].get<double>() ==
          doctest::Approx(flops * summary["tokens_per_second"].get<double>() / peak));
    for (const json& line : trained.lines)
        CHECK(line["mfu"].get<double>() ==
              doctest::Approx(flops * line["tokens_per_second"].get<double>() / peak).epsilon(1e-4));
    CHECK(summary["samples_per_second"] == summary["tokens_per_second"]);
    CHECK(total_of(summary["time"]) >= total);
    const json& memory = summary["memory"];
    CHECK(memory["parameters"] == (8 * 4 + 4) * 4);
    CHECK(memory["gradients"] == (8 * 4 + 4) * 4);
    CHECK(memory["optimizer_state"].get<int>() >= 2 * (8 * 4 + 4) * 4);
    CHECK(memory["before"].get<std::int64_t>() >= 0);
}

TEST_CASE("throughput: measuring what the device can do counts into no peak of memory") {
    const TemporaryFolder folder;
    reset_peak_memory();
    const std::int64_t before = memory_statistics().peak;
    const Trained trained = train(folder / "run", slow_items(0), {.steps = 2}, 0);
    CHECK(trained.summary.mfu.has_value());
    CHECK(trained.summary.peak_memory_bytes - before < 100'000);  // the smallest product takes 3 MB
}

TEST_CASE("throughput: the report names the input when the training waits for it, and only then") {
    const TemporaryFolder folder;
    const Trained waits = train(folder / "waits", slow_items(30), {.steps = 10}, 1);
    REQUIRE(waits.summary.bottleneck.has_value());
    CHECK(waits.summary.bottleneck->kind == Bottleneck::Kind::input);
    CHECK(waits.report.find("The limit is input.") != std::string::npos);
    CHECK(read_json(folder / "waits/summary.json")["bottleneck"]["limit"] == "input");
    CHECK(waits.summary.time.share(Phase::data) > 0.5);

    // The same items ahead of time: what a step takes is enough for them.
    const Trained ahead =
        train(folder / "ahead", slow_items(1), {.steps = 10}, 40, {.batch = 2, .workers = 1});
    REQUIRE(ahead.summary.bottleneck.has_value());
    CHECK(ahead.summary.bottleneck->kind != Bottleneck::Kind::input);
    CHECK(ahead.report.find("The limit is input.") == std::string::npos);
    CHECK(ahead.report.find("The limit is ") != std::string::npos);
}

TEST_CASE(
    "throughput: a resumed run has one report and one story for TensorBoard, in files of both processes") {
    const TemporaryFolder folder;
    const std::string run = folder / "run";
    TrainerOptions options{.steps = 10, .checkpoint_every = 3};
    options.settings = {{"--colour", "blue & green"}};
    options.should_stop = [&, asked = 0]() mutable { return ++asked == 3; };
    Trained trained = train(run, slow_items(0), options, 0);
    CHECK(trained.report.find("stopped at step 3") != std::string::npos);
    const std::string first = run + "/tensorboard/events.out.tfevents.00000.potluck";
    const std::string events = read_file(first);

    options.should_stop = {};
    options.resume = true;
    trained = train(run, slow_items(0), options, 0);
    REQUIRE(trained.lines.size() == 10);
    for (const json& line : trained.lines) CHECK(line.contains("resumed") == (line["step"] == 4));
    CHECK(trained.report.find("finished") != std::string::npos);
    CHECK(trained.report.find("resumed at step 4") != std::string::npos);
    CHECK(trained.report.find("blue &amp; green") != std::string::npos);
    CHECK(read_file(first) == events);
    CHECK(fs::exists(run + "/tensorboard/events.out.tfevents.00001.potluck"));
    // Nothing is left to do: no new file of events, and the report stays whole.
    trained = train(run, slow_items(0), options, 0);
    CHECK_FALSE(fs::exists(run + "/tensorboard/events.out.tfevents.00002.potluck"));
    CHECK(trained.report.find("resumed at step 4") != std::string::npos);
    CHECK(trained.lines.size() == 10);
}

TEST_CASE("throughput: a run of an older version goes on") {
    const TemporaryFolder folder;
    const std::string run = folder / "run";
    TrainerOptions options{.steps = 3};
    train(run, slow_items(0), options, 0);
    fs::remove_all(run + "/tensorboard");
    fs::remove(run + "/report.html");
    std::string old;
    for (int step = 1; step <= 3; ++step)
        old += "{\"step\":" + std::to_string(step) +
               ",\"epoch\":0,\"loss\":1.5,\"learning_rate\":0.1,\"gradient_norm\":1.0,\"tokens\":4,"
               "\"seconds\":0.1,"
               "\"tokens_per_second\":40.0,\"memory_bytes\":1000,\"val_loss\":2.0}\n";
    write_file(run + "/metrics.jsonl", old);
    options.steps = 5;
    options.resume = true;
    const Trained trained = train(run, slow_items(0), options, 0);
    REQUIRE(trained.lines.size() == 5);
    CHECK(read_file(run + "/metrics.jsonl").starts_with(old));
    CHECK(trained.lines[4]["time"].size() == phase_count);
    CHECK(trained.report.find("validation 2 at step 3") != std::string::npos);
}

TEST_CASE("throughput: a trace shows phases and curves of a training") {
    const TemporaryFolder folder;
    start_trace();
    TrainerOptions options{.steps = 4, .checkpoint_every = 2};
    train(folder / "run", slow_items(0), options, 0);
    write_trace(folder / "trace.json");
    std::map<std::string, int> spans, counts;
    const json trace = read_json(folder / "trace.json");
    for (const json& event : trace.at("traceEvents"))
        ++(event.at("ph") == "C" ? counts : spans)[event.at("name")];
    for (const char* name : {"loader: wait", "phase: copy", "phase: forward", "phase: backward",
                             "phase: optimizer", "phase: saving"}) {
        INFO(std::string(name));
        CHECK(spans[name] >= 2);
    }
    for (const char* name :
         {"tokens/s", "samples/s", "mfu", "peak memory, bytes", "share of data", "share of other"}) {
        INFO(std::string(name));
        CHECK(counts[name] == 4);
    }
}

TEST_CASE(
    "throughput: pictures come into the report at the end, and what goes wrong with them ends nothing") {
    const TemporaryFolder folder;
    TrainerOptions options{.steps = 2, .checkpoint_every = 1};
    int asked = 0;
    options.pictures = [&] {
        ++asked;
        return std::vector<ReportPicture>{{zeros({4, 4, 1}, {DType::u8}), "seven", "one"}};
    };
    CHECK(train(folder / "good", slow_items(0), options, 0).report.find("seven, not one") !=
          std::string::npos);
    CHECK(asked == 1);
    options.pictures = [] { return std::vector<ReportPicture>{{zeros({4, 4}), "seven", "one"}}; };
    const Trained bad = train(folder / "bad", slow_items(0), options, 0);
    CHECK(bad.summary.finished);
    CHECK(bad.report.find("running") != std::string::npos);  // the one of the last checkpoint
}

}  // namespace potluck::test
