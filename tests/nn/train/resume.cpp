// A run that was stopped and resumed in another process gives the same bits as an uninterrupted one, with any number of
// threads.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <random>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;

namespace {

constexpr const char* task_variable = "POTLUCK_RESUME_TASK";

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::string() : std::string(value);
}

/// The work of a child process: trains to step 20, or stops at step `stop`.
void train(const std::string& folder, bool resume, std::int64_t stop, int thread_count, DType dtype) {
    set_threads(thread_count);
    manual_seed(resume ? 99 : 5);  // a resumed run must not depend on the initial state of the process
    nn::GPT2 model({.vocabulary = 40, .context = 16, .width = 32, .heads = 2, .layers = 2, .dropout = 0.1});
    model.to(dtype);
    optim::AdamW optimizer(model, {.weight_decay = 0.1});
    Generator generator(8);
    const Tensor tokens = randint(0, 40, {700}, {DType::i64}, &generator);
    // 43 windows: epochs end in the middle of the run, with an incomplete batch and an incomplete accumulation.
    data::Loader loader(data::TokenWindows(tokens, 16, 16),
                        {.batch = 4, .shuffle = true, .workers = resume ? 2 : 1, .seed = 21});
    std::int64_t done = 0;
    Trainer(model, optimizer, loader,
            {.steps = 20,
             .accumulate = 2,
             .clip = 1.0,
             .schedule = optim::cosine_schedule({.peak = 1e-2, .steps = 20, .warmup = 4}),
             .run_folder = folder,
             .resume = resume,
             .checkpoint_every = 3,
             .quiet = true,
             .should_stop = [&] { return done == stop; },
             .on_step = [&](const StepMetrics& metrics) { done = metrics.step; }})
        .fit();
}

/// Starts this program again, for one test case whose body finds `task` in the environment.
pid_t start_child(const std::string& test_case, const std::string& task) {
    const std::string filter = "--test-case=" + test_case;
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        setenv(task_variable, task.c_str(), 1);
        unsetenv("POTLUCK_TEST_RESULTS");
        unsetenv("POTLUCK_TEST_FILTER");
        execl("/proc/self/exe", "test", filter.c_str(), "--no-intro", "--no-version", "-m",
              static_cast<char*>(nullptr));
        _exit(127);
    }
    return child;
}

/// Runs this program again, for the training above.
void train_in_a_new_process(const std::string& folder, bool resume, std::int64_t stop, int thread_count,
                            DType dtype) {
    const std::string task = folder + "\n" + (resume ? "1" : "0") + " " + std::to_string(stop) + " " +
                             std::to_string(thread_count) + " " + std::to_string(static_cast<int>(dtype));
    const pid_t child = start_child("resume: a new process*", task);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    REQUIRE(WEXITSTATUS(status) == 0);
}

/// The result of a run: the losses in its file, and the bytes of its last checkpoint.
struct Outcome {
    std::vector<std::string> losses;
    std::string model, optimizer, manifest;

    friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(const std::string& folder) {
    Outcome outcome;
    std::int64_t step = 0;
    for (const auto& line : test::read_lines(folder + "/metrics.jsonl")) {
        CHECK(line["step"] == ++step);
        outcome.losses.push_back(line["loss"].dump() + " " + line["gradient_norm"].dump());
    }
    const std::string checkpoint = folder + "/checkpoints/step_00000020/";
    outcome.model = test::read_file(checkpoint + "model-0.safetensors");
    outcome.optimizer = test::read_file(checkpoint + "optimizer-0.safetensors");
    outcome.manifest = test::read_file(checkpoint + "manifest.json");
    CHECK(step == 20);
    CHECK_FALSE(outcome.model.empty());
    return outcome;
}

void check_equal(const Outcome& a, const Outcome& b) {
    CHECK(a.losses == b.losses);
    CHECK(a.model == b.model);
    CHECK(a.optimizer == b.optimizer);
    CHECK(a.manifest == b.manifest);
}

}  // namespace

TEST_CASE("resume: a new process goes on with the same bits, with 1 and with 2 threads") {
    const std::string task = environment(task_variable);
    if (!task.empty()) {  // this is the child process
        const std::size_t line_end = task.find('\n');
        std::istringstream numbers(task.substr(line_end + 1));
        int resume = 0, thread_count = 0, dtype = 0;
        std::int64_t stop = 0;
        numbers >> resume >> stop >> thread_count >> dtype;
        train(task.substr(0, line_end), resume == 1, stop, thread_count, static_cast<DType>(dtype));
        return;
    }
    for (const DType dtype : {DType::f32, DType::bf16}) {
        const test::TemporaryFolder folder;
        std::map<int, Outcome> unbroken;
        for (const int thread_count : {1, 2}) {
            INFO(name_of(dtype), " with ", thread_count, " threads");
            const std::string whole = folder / ("whole" + std::to_string(thread_count));
            const std::string broken = folder / ("broken" + std::to_string(thread_count));
            train_in_a_new_process(whole, false, -1, thread_count, dtype);
            train_in_a_new_process(broken, false, 10, thread_count, dtype);
            CHECK(latest_checkpoint(broken + "/checkpoints").value().ends_with("step_00000010"));
            train_in_a_new_process(broken, true, -1, thread_count, dtype);
            unbroken[thread_count] = outcome_of(whole);
            check_equal(outcome_of(broken), unbroken[thread_count]);
        }
        check_equal(unbroken[1], unbroken[2]);
    }
}

TEST_CASE("resume: a run that is killed while it saves leaves a checkpoint that loads") {
    const std::string task = environment(task_variable);
    const auto make = [] {
        manual_seed(6);
        return nn::GPT2({.vocabulary = 100, .context = 16, .width = 64, .heads = 2, .layers = 2});
    };
    if (!task.empty()) {  // this is the child process: it saves until it is killed
        nn::GPT2 model = make();
        optim::AdamW optimizer(model);
        model.loss(zeros({1, 8}, {DType::i64}), zeros({1, 8}, {DType::i64})).backward();
        optimizer.step();
        for (std::int64_t step = 1; step < 100000; ++step)
            save_checkpoint(task, model, optimizer, {.step = step % 7}, 2);
        return;
    }
    const test::TemporaryFolder folder;
    nn::GPT2 model = make();
    optim::AdamW optimizer(model);
    for (int kill_at = 0; kill_at < 5; ++kill_at) {
        const pid_t child = start_child("resume: a run that is killed*", folder.path());
        while (!latest_checkpoint(folder.path())) usleep(1000);
        usleep(static_cast<useconds_t>(20000 + 7919 * kill_at));
        kill(child, SIGKILL);
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status));
        const std::optional<std::string> latest = latest_checkpoint(folder.path());
        REQUIRE(latest.has_value());
        load_checkpoint(*latest, model, optimizer);
    }
}

namespace {

/// The work of a child that is killed: goes on from the newest checkpoint and saves after every update, beside the
/// training or not. `steps` is where the run ends.
void train_and_save(const std::string& folder, bool beside, bool saves, std::int64_t steps) {
    manual_seed(latest_checkpoint(folder + "/checkpoints") ? 99 : 5);
    nn::GPT2 model({.vocabulary = 40, .context = 16, .width = 64, .heads = 2, .layers = 2, .dropout = 0.1});
    optim::AdamW optimizer(model, {.weight_decay = 0.1});
    Generator generator(8);
    const Tensor tokens = randint(0, 40, {700}, {DType::i64}, &generator);
    data::Loader loader(data::TokenWindows(tokens, 16, 16), {.batch = 4, .shuffle = true, .seed = 21});
    Trainer(model, optimizer, loader,
            {.steps = steps,
             .clip = 1.0,
             .schedule = optim::cosine_schedule({.peak = 1e-2, .steps = 1000, .warmup = 4}),
             .run_folder = folder,
             .resume_if_possible = true,
             .checkpoint_every = saves ? 1 : 0,
             .async_checkpoints = beside,
             .quiet = true})
        .fit();
}

std::string task_of(const std::string& folder, bool beside, bool saves, std::int64_t steps) {
    return folder + "\n" + (beside ? "1 " : "0 ") + (saves ? "1 " : "0 ") + std::to_string(steps);
}

std::int64_t newest_step(const std::string& run) {
    const std::optional<std::string> newest = latest_checkpoint(run + "/checkpoints");
    return newest ? step_of(*newest) : 0;
}

bool is_saving(const std::string& run) {
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints", gone))
        if (entry.path().extension() == ".partial") return true;
    return false;
}

/// Kills a run at random moments, most of them while it saves, and lets it go on each time. Each time the newest
/// checkpoint is sound and as far as the one before, and in the end the losses are those of a run that nobody killed.
void kill_and_resume(const std::string& test_case, int kills, bool beside) {
    if (const std::string task = environment(task_variable); !task.empty()) {  // this is the child
        const std::size_t line_end = task.find('\n');
        std::istringstream numbers(task.substr(line_end + 1));
        bool child_beside = false, saves = false;
        std::int64_t steps = 0;
        numbers >> child_beside >> saves >> steps;
        train_and_save(task.substr(0, line_end), child_beside, saves, steps);
        return;
    }
    const test::TemporaryFolder folder;
    const std::string run = folder / "killed", whole = folder / "whole";
    std::mt19937 random(1);
    std::int64_t reached = 0;
    int while_saving = 0;
    std::uint32_t longest_wait = 20'000;  // microseconds; learns how long this machine needs for a save
    for (int i = 0; i < kills; ++i) {
        const pid_t child = start_child(test_case, task_of(run, beside, true, 1'000'000));
        int status = 0;
        while (newest_step(run) <= reached) {
            REQUIRE(waitpid(child, &status, WNOHANG) == 0);
            usleep(1000);
        }
        usleep(static_cast<useconds_t>(random() % 20'000));
        while (!is_saving(run)) REQUIRE(waitpid(child, &status, WNOHANG) == 0);
        usleep(static_cast<useconds_t>(random() % longest_wait));
        kill(child, SIGKILL);
        REQUIRE(waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status));
        const bool was_saving = is_saving(run);
        while_saving += was_saving ? 1 : 0;
        longest_wait = was_saving ? longest_wait * 5 / 4 : std::max(longest_wait / 2, std::uint32_t{1});
        nn::GPT2 model({.vocabulary = 40, .context = 16, .width = 64, .heads = 2, .layers = 2});
        optim::AdamW optimizer(model);
        const std::int64_t step =
            load_checkpoint(latest_checkpoint(run + "/checkpoints").value(), model, optimizer).step;
        CHECK(step > reached);
        reached = step;
    }
    MESSAGE("killed ", kills, " times, ", while_saving,
            " of them while a checkpoint was being written, at step ", reached, " at last");
    // A few kills may all have come late.
    CHECK((kills < 20 || 3 * while_saving > kills));
    for (const std::string& finished : {run, whole}) {
        const pid_t child = start_child(test_case, task_of(finished, beside, false, reached + 5));
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        REQUIRE(WIFEXITED(status));
        REQUIRE(WEXITSTATUS(status) == 0);
    }
    const auto losses_of = [](const std::string& finished) {
        std::vector<std::string> losses;
        for (const auto& line : test::read_lines(finished + "/metrics.jsonl"))
            losses.push_back(line["step"].dump() + " " + line["loss"].dump());
        return losses;
    };
    CHECK(static_cast<std::int64_t>(losses_of(run).size()) == reached + 5);
    CHECK(losses_of(run) == losses_of(whole));
    // Nothing is left of what was being written or removed: the two newest are kept.
    const std::filesystem::directory_iterator checkpoints(run + "/checkpoints");
    CHECK(std::distance(checkpoints, std::filesystem::directory_iterator()) == 2);
    const auto newest = [](const std::string& finished) {
        return latest_checkpoint(finished + "/checkpoints").value() + "/";
    };
    for (const char* file : {"model-0.safetensors", "optimizer-0.safetensors", "manifest.json"})
        CHECK(test::read_file(newest(run) + file) == test::read_file(newest(whole) + file));
}

}  // namespace

TEST_CASE("resume: killed at random moments of saves that training waits for") {
    kill_and_resume("resume: killed at random moments of saves that*", 4, false);
}

TEST_CASE("resume: killed at random moments of saves beside the training") {
    kill_and_resume("resume: killed at random moments of saves beside*", 6, true);
}

TEST_CASE("resume: killed at 50 moments of saves that training waits for" * doctest::test_suite("long")) {
    kill_and_resume("resume: killed at 50 moments*", 50, false);
}

TEST_CASE("resume: killed at 200 moments of saves beside the training" * doctest::test_suite("long")) {
    kill_and_resume("resume: killed at 200 moments*", 200, true);
}
