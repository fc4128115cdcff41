// From which checkpoint a run goes on: the newest that is sound, or the start where that is allowed.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <string>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/nn/train/scale.h"

using namespace potluck;
using test::check_error;
using test::read_lines;
namespace fs = std::filesystem;

namespace {

struct Outcome {
    TrainingSummary summary;
    double weight = 0.0;
    std::int64_t updates = 0;  // of this process
};

Outcome train(const std::string& run, std::int64_t steps, std::int64_t stop_at = -1) {
    test::Scale model(0.0);
    optim::SGD optimizer(model, {.learning_rate = 1.0});
    data::Loader loader(test::ones_dataset(4));
    Outcome outcome;
    outcome.summary = Trainer(model, optimizer, loader,
                              {.steps = steps,
                               .run_folder = run,
                               .resume_if_possible = true,
                               .checkpoint_every = 2,
                               .keep_checkpoints = 0,
                               .quiet = true,
                               .should_stop = [&] { return outcome.updates == stop_at; },
                               .on_step = [&](const StepMetrics&) { ++outcome.updates; }})
                          .fit();
    outcome.weight = model.value();
    return outcome;
}

void flip(const std::string& file) {
    std::string content = test::read_file(file);
    content.back() = static_cast<char>(content.back() ^ 1);
    test::write_file(file, content);
}

void check_whole(const std::string& run, const Outcome& outcome, std::int64_t steps) {
    CHECK(outcome.summary.steps == steps);
    CHECK(outcome.weight == -static_cast<double>(steps));
    const auto lines = read_lines(run + "/metrics.jsonl");
    REQUIRE(static_cast<std::int64_t>(lines.size()) == steps);
    for (std::int64_t i = 0; i < steps; ++i) CHECK(lines[static_cast<std::size_t>(i)]["step"] == i + 1);
}

}  // namespace

TEST_CASE("trainer: resume_if_possible begins a run where there is none, and goes on where there is one") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "runs/one";
    Outcome outcome = train(run, 10, 5);
    check_whole(run, outcome, 5);
    outcome = train(run, 10);
    CHECK(outcome.updates == 5);
    check_whole(run, outcome, 10);
    outcome = train(run, 10);
    CHECK(outcome.updates == 0);
    check_whole(run, outcome, 10);
    CHECK(outcome.summary.checkpoint.ends_with("step_00000010"));
}

TEST_CASE("trainer: resume_if_possible begins again where the program ended before the first checkpoint") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "run";
    fs::create_directories(run + "/checkpoints/step_00000002.partial");
    test::write_file(run + "/metrics.jsonl", "{\"step\":1,\"loss\":9.0}\n{\"step\":2,\"lo");
    check_whole(run, train(run, 3), 3);
}

TEST_CASE("trainer: resume_if_possible passes over what is damaged") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "run";
    const std::string checkpoints = run + "/checkpoints/";
    train(run, 6);
    flip(checkpoints + "step_00000006/model-0.safetensors");
    Outcome outcome = train(run, 8);
    CHECK(outcome.updates == 4);
    check_whole(run, outcome, 8);
}

TEST_CASE("trainer: resume_if_possible does not begin anew beside checkpoints that are all damaged") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "run";
    train(run, 4);
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(run)) {
        if (entry.path().filename() == "model-0.safetensors") flip(entry.path().string());
        if (entry.is_regular_file()) files[entry.path().string()] = test::read_file(entry.path().string());
    }
    const auto check_refused = [&] {
        check_error([&] { train(run, 10); },
                    {"[load_checkpoint] none of the checkpoints", "step_00000002/model-0.safetensors",
                     "step_00000004/model-0.safetensors", "not what was written", "another folder"});
    };
    check_refused();
    for (const auto& [path, content] : files) CHECK(test::read_file(path) == content);
    fs::create_directories(run + "/checkpoints/step_00000006.partial");
    check_refused();
    fs::remove(run + "/checkpoints/step_00000004/manifest.json");
    check_error([&] { train(run, 10); }, {"step_00000004 is not complete", "step_00000006.partial"});
    flip(run + "/checkpoints/step_00000002/model-0.safetensors");  // it was brought back from a copy
    check_whole(run, train(run, 10), 10);
}

TEST_CASE("trainer: resume and resume_if_possible do not go together, and need a folder") {
    test::Scale model(0.0);
    optim::SGD optimizer(model);
    data::Loader loader(test::ones_dataset(4));
    check_error(
        [&] {
            Trainer(model, optimizer, loader,
                    {.steps = 1, .run_folder = "run", .resume = true, .resume_if_possible = true});
        },
        {"[trainer]", "resume and resume_if_possible are both set"});
    check_error([&] { Trainer(model, optimizer, loader, {.steps = 1, .resume_if_possible = true}); },
                {"[trainer]", "need a run_folder"});
}

TEST_CASE("checkpoint: what was passed over is told, the unfinished ones too") {
    const test::TemporaryFolder folder;
    test::Scale model(1.0);
    optim::SGD optimizer(model);
    for (const std::int64_t step : {2, 4, 6})
        save_checkpoint(folder.path(), model, optimizer, {.step = step});
    flip(folder / "step_00000006/model-0.safetensors");
    fs::create_directories(folder / "step_00000003.partial");  // older than what is taken
    fs::create_directories(folder / "step_00000008.partial");
    ResumedCheckpoint resumed = load_latest_checkpoint_if_any(folder.path(), model, optimizer);
    CHECK(resumed.path == folder / "step_00000004");
    CHECK(resumed.state.step == 4);
    REQUIRE(resumed.damaged.size() == 2);
    CHECK(resumed.damaged[0] == (folder / "step_00000008.partial") +
                                    " was never finished: the program ended while it was written.");
    CHECK(resumed.damaged[1].find("step_00000006/model-0.safetensors is not what was written") !=
          std::string::npos);
    for (const std::int64_t step : {2, 4}) flip(folder / fmt::format("step_{:08}/model-0.safetensors", step));
    const std::vector<std::string> all_of_them = {
        "step_00000008.partial", "step_00000003.partial", "step_00000006/model-0.safetensors",
        "step_00000004/model-0.safetensors", "step_00000002/model-0.safetensors"};
    check_error([&] { load_latest_checkpoint(folder.path(), model, optimizer); }, all_of_them);
    check_error([&] { load_latest_checkpoint_if_any(folder.path(), model, optimizer); }, all_of_them);
    for (const std::int64_t step : {2, 4, 6}) fs::remove_all(folder / fmt::format("step_{:08}", step));
    resumed = load_latest_checkpoint_if_any(folder.path(), model, optimizer);
    CHECK(resumed.path.empty());
    CHECK(resumed.damaged.size() == 2);
    check_error([&] { load_latest_checkpoint(folder.path(), model, optimizer); },
                {"no complete checkpoint", "step_00000008.partial", "step_00000003.partial"});
    CHECK(load_latest_checkpoint_if_any(folder / "absent", model, optimizer).path.empty());
}
