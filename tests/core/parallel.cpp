#include "core/cpu/parallel.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/error.h"

using namespace potluck;

namespace {

/// Restores the number of threads at the end.
struct ThreadsGuard {
    int before = threads();
    ~ThreadsGuard() { set_threads(before); }
};

}  // namespace

TEST_CASE("parallel_for covers every element once, in pieces that do not depend on the threads") {
    const ThreadsGuard guard;
    for (const int count_of_threads : {1, 2, 3}) {
        set_threads(count_of_threads);
        for (const std::int64_t count : {0, 1, 9, 10, 11, 1000}) {
            std::vector<int> visits(static_cast<std::size_t>(count), 0);
            const cpu::Team team(threads());
            cpu::parallel_for(count, 10, [&](std::int64_t first, std::int64_t last) {
                CHECK(first % 10 == 0);
                CHECK(last == std::min<std::int64_t>(first + 10, count));
                for (std::int64_t i = first; i < last; ++i) ++visits[static_cast<std::size_t>(i)];
            });
            for (const int visited : visits) CHECK(visited == 1);
        }
    }
}

TEST_CASE("when several pieces fail, the error is that of the first, with any number of threads") {
    const ThreadsGuard guard;
    for (const int count_of_threads : {1, 2, 4}) {
        set_threads(count_of_threads);
        for (int round = 0; round < 50; ++round) {
            std::string message;
            const cpu::Team team(threads());
            try {
                cpu::parallel_for(640, 10, [](std::int64_t first, std::int64_t) {
                    if (first < 30) {  // the first to fail is the last to finish
                        volatile int work = 0;
                        for (int i = 0; i < 2000; ++i) work = work + i;
                    }
                    if (first >= 20) throw Error("test", std::to_string(first));
                });
            } catch (const Error& error) {
                message = error.what();
            }
            CHECK(message == "[test] 20");
        }
    }
}
