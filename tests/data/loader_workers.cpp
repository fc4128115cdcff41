// Errors that involve threads: exceptions, items that hang, loops that end early.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <thread>

#include "core/factories.h"
#include "core/memory.h"
#include "data/loader.h"
#include "tests/expect_error.h"
#include "tests/on_device.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;

namespace {

double seconds_of(const std::function<void()>& function) {
    const auto start = std::chrono::steady_clock::now();
    function();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A door at which items wait until the test opens it. Shared by the test and by threads that may outlive it.
struct Door {
    std::promise<void> promise;
    std::shared_future<void> opened = promise.get_future().share();
    std::atomic<int> passed = 0;
};

constexpr const char* task_variable = "POTLUCK_LOADER_TASK";

/// Runs this program again for one test case, whose body finds `task` in the environment. Returns its exit status.
int status_of_child(const char* test_case, const std::string& task) {
    const std::string filter = std::string("--test-case=") + test_case;
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        setenv(task_variable, task.c_str(), 1);
        unsetenv("POTLUCK_TEST_RESULTS");
        unsetenv("POTLUCK_TEST_FILTER");
        execl("/proc/self/exe", "test", filter.c_str(), "-m", static_cast<char*>(nullptr));
        _exit(127);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("loader: the error of an item reaches the loop with its text, in place of its batch") {
    for (int workers : {0, 1, 4}) {
        data::Loader loader(
            data::FunctionDataset(12,
                                  [](std::int64_t index, RandomKey) {
                                      if (index == 7) throw std::runtime_error("the lid does not fit");
                                      return data::Example{tensor(static_cast<double>(index)), {}};
                                  }),
            {.batch = 2, .workers = workers});
        int batches = 0;
        const std::string text = error_of([&] {
            for (auto [x, y] : loader) ++batches;
        });
        CHECK(batches == 3);
        CHECK(contains(text, "item 7"));
        CHECK(contains(text, "the lid does not fit"));
        CHECK(loader.state().item == 6);
        // It stays usable, and fails at the same item again.
        CHECK(contains(error_of([&] { loader.next(); }), "item 7"));
    }
}

TEST_CASE("loader: items may throw anything") {
    for (int workers : {0, 2}) {
        const auto text_of = [&](data::FunctionDataset::Function function) {
            return error_of(
                [&] { data::Loader(data::FunctionDataset(2, function), {.workers = workers}).next(); });
        };
        CHECK(contains(text_of([](auto, auto) -> data::Example { throw 42; }), "no std::exception"));
        CHECK(contains(text_of([](auto, auto) -> data::Example { throw Error("soup", "too hot."); }),
                       "[soup] too hot."));
        const std::string text = text_of([](auto, auto) { return data::Example{}; });
        CHECK(contains(text, "[Loader] item 0 of epoch 0 failed: its input is undefined."));
        CHECK(text.rfind("[Loader]") == text.find("[Loader]"));
        data::Loader starved(
            data::FunctionDataset(
                2, [](auto, auto) -> data::Example { throw OutOfMemory("soup", "no pot.", 5); }),
            {.workers = workers});
        CHECK_THROWS_AS(starved.next(), OutOfMemory);
    }
}

TEST_CASE("loader: an item that hangs gives an error that names it, and its thread is left behind") {
    auto door = std::make_shared<Door>();
    std::string text;
    const double seconds = seconds_of([&] {
        data::Loader loader(
            data::FunctionDataset(16,
                                  [door](std::int64_t index, RandomKey) {
                                      if (index == 5) {
                                          door->opened.wait();
                                          ++door->passed;
                                      }
                                      return data::Example{tensor(static_cast<double>(index)), {}};
                                  }),
            {.batch = 2, .workers = 4, .timeout_seconds = 0.5});
        int batches = 0;
        text = error_of([&] {
            for (auto [x, y] : loader) ++batches;
        });
        CHECK(batches == 2);
    });
    CHECK(contains(text, "item 5"));
    CHECK(contains(text, "0.5 s"));
    CHECK(seconds >= 0.5);
    CHECK(seconds < 3.0);
    // The thread still owns the dataset: let it end before the test does.
    CHECK(door->passed == 0);
    door->promise.set_value();
    for (int i = 0; i < 1000 && door->passed == 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(door->passed == 1);
    for (int i = 0; i < 1000 && door.use_count() > 1; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(door.use_count() == 1);
}

TEST_CASE("loader: the timeout is for one item, not for a batch, and slow items are no error") {
    data::Loader loader(
        data::FunctionDataset(8,
                              [](std::int64_t index, RandomKey) {
                                  std::this_thread::sleep_for(std::chrono::milliseconds(100));
                                  return data::Example{tensor(static_cast<double>(index)), {}};
                              }),
        {.batch = 8, .workers = 1, .timeout_seconds = 0.4});
    int batches = 0;
    for (auto [x, y] : loader) ++batches;
    CHECK(batches == 1);
}

TEST_CASE("loader: a loop left early and a loader destroyed with a full queue end at once") {
    test::on_each_device([] {
        for (int workers : {1, 4, 16}) {
            const data::LoaderOptions options{
                .batch = 2, .workers = workers, .read_ahead = 3, .device = test::test_device()};
            const double left = seconds_of([&] {
                for (auto [x, y] : data::Loader(data::TensorDataset(zeros({1000, 4})), options)) break;
            });
            CHECK(left < 2.0);
            const double destroyed = seconds_of([&] {
                data::Loader loader(data::TensorDataset(zeros({1000, 4})), options);
                loader.next();
                std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the queue fills up
                loader.next();                                               // the next one is on its way
            });
            CHECK(destroyed < 2.0);
        }
    });
}

TEST_CASE("loader: left while every worker is in the middle of a long batch, it ends within its patience") {
    auto door = std::make_shared<Door>();
    const double seconds = seconds_of([&] {
        data::Loader loader(
            data::FunctionDataset(64,
                                  [door](std::int64_t index, RandomKey) {
                                      if (index >= 2) door->opened.wait();
                                      return data::Example{tensor(static_cast<double>(index)), {}};
                                  }),
            {.batch = 2, .workers = 4});
        loader.next();
    });
    CHECK(seconds < 2.0);
    door->promise.set_value();
    for (int i = 0; i < 1000 && door.use_count() > 1; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(door.use_count() == 1);
}

TEST_CASE("loader: workers read ahead, and no further than they may") {
    auto fetched = std::make_shared<std::atomic<int>>(0);
    data::Loader loader(
        data::FunctionDataset(100,
                              [fetched](std::int64_t index, RandomKey) {
                                  ++*fetched;
                                  return data::Example{tensor(static_cast<double>(index)), {}};
                              }),
        {.batch = 1, .workers = 2, .read_ahead = 3});
    loader.next();
    for (int i = 0; i < 1000 && *fetched < 7; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(*fetched == 7);  // the one received, and 3 for each of 2 workers
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(*fetched == 7);
}

TEST_CASE("loader: what workers allocated is freed with the loader") {
    const std::int64_t before = memory_statistics().current;
    {
        data::Loader loader(data::FunctionDataset(50,
                                                  [](std::int64_t, RandomKey) {
                                                      return data::Example{zeros({1000}), {}};
                                                  }),
                            {.batch = 5, .workers = 3});
        for (int i = 0; i < 25; ++i) loader.next();
    }
    CHECK(memory_statistics().current == before);
}

TEST_CASE("loader: a program with a thread that hangs still ends, with the exit status it wants") {
    constexpr int wanted = 7;
    if (const char* task = std::getenv(task_variable); task != nullptr) {  // this is the child
        auto door = std::make_shared<Door>();                              // that is never opened
        const data::FunctionDataset hanging(8, [door](std::int64_t, RandomKey) {
            door->opened.wait();
            return data::Example{};
        });
        try {
            data::Loader(hanging, {.workers = 4, .timeout_seconds = 0.2}).next();
        } catch (const Error&) {
            std::exit(wanted);
        }
    } else {
        const double seconds =
            seconds_of([&] { CHECK(status_of_child("loader: a program with a thread*", "hang") == wanted); });
        CHECK(seconds < 5.0);
    }
}

TEST_CASE("loader: a program that leaves its loop early ends well") {
    if (const char* task = std::getenv(task_variable); task != nullptr) {  // this is the child
        for (auto [x, y] :
             data::Loader(data::TensorDataset(zeros({1000, 4})),
                          {.batch = 2, .workers = std::atoi(task), .device = test::devices().back()}))
            break;
    } else {
        for (const char* workers : {"1", "4", "16"})
            CHECK(status_of_child("loader: a program that leaves*", workers) == 0);
    }
}

TEST_CASE("loader: says how long it was waited for, with workers and without, in loops, passes and next()") {
    const data::FunctionDataset slow(4, [](std::int64_t index, RandomKey) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return data::Example{full({1}, static_cast<double>(index)), {}};
    });
    for (int workers : {0, 1}) {
        data::Loader loader(slow, {.workers = workers});
        CHECK(loader.waiting_seconds() == 0.0);
        for (const data::Batch& batch : loader) CHECK(batch.inputs.defined());
        const double loop = loader.waiting_seconds();
        CHECK(loop >= 0.015);
        for (const data::Batch& batch : loader.pass()) CHECK(batch.inputs.defined());
        const double pass = loader.waiting_seconds();
        CHECK(pass >= loop + 0.015);
        CHECK(loader.next().inputs.defined());
        CHECK(loader.waiting_seconds() >= pass + 0.004);
        CHECK(loader.waiting_seconds() < 10.0);
    }
    // Who comes late finds everything read ahead.
    const data::FunctionDataset slower(3, [](std::int64_t index, RandomKey) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return data::Example{full({1}, static_cast<double>(index)), {}};
    });
    data::Loader ahead(slower, {.workers = 1, .read_ahead = 4});
    auto loop = ahead.begin();
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    const double first = ahead.waiting_seconds();
    ++loop;
    ++loop;
    CHECK(ahead.waiting_seconds() - first < 0.1);
}
