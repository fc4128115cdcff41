// The state of a file when saving it is interrupted by a kill or a full disk.

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "core/factories.h"
#include "core/safetensors.h"
#include "tests/core/temporary_folder.h"
#include "tests/skip.h"

using namespace potluck;
using test::TemporaryFolder;

namespace {

/// Numbers that parent and child share.
struct Shared {
    std::atomic<std::int64_t> completed{0};
};

Shared& shared_page() {
    void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    return *new (page) Shared;
}

/// A child repeatedly saves new states to one path and is killed at random moments; the file must always be complete.
void kill_while_saving(int kills, std::int64_t count) {
    const TemporaryFolder folder;
    const std::string path = folder / "state.safetensors";
    Shared& shared = shared_page();
    const TensorFile state{{{"step", zeros({1}, {DType::i64})}, {"data", zeros({count}, {DType::i32})}}, {}};
    std::mt19937 random(1);
    std::int64_t step = 0;
    const auto set = [&](std::int64_t value) {
        *state.tensors.at("step").data<std::int64_t>() = value;
        std::fill_n(state.tensors.at("data").data<std::int32_t>(), count, static_cast<std::int32_t>(value));
    };
    set(0);
    const auto start = std::chrono::steady_clock::now();
    save_safetensors(path, state);
    const std::chrono::duration<double, std::micro> one_save = std::chrono::steady_clock::now() - start;
    auto longest_wait = static_cast<unsigned>(3 * one_save.count() + 10'000);
    // On a slow machine there are more attempts, until some child has saved something.
    for (int kill_count = 0; kill_count < kills || (step == 0 && kill_count < kills + 10); ++kill_count) {
        if (kill_count >= kills) longest_wait *= 2;
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            for (std::int64_t next = step + 1;; ++next) {
                set(next);
                save_safetensors(path, state);
                shared.completed = next;
            }
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % longest_wait));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        const std::int64_t completed = std::max(step, shared.completed.load());
        const TensorFile loaded = load_safetensors(path);
        step = loaded.tensors.at("step").item<std::int64_t>();
        CHECK((step == completed || step == completed + 1));
        const auto data = loaded.tensors.at("data").to_vector<std::int32_t>();
        CHECK(static_cast<std::int64_t>(data.size()) == count);
        CHECK(std::count(data.begin(), data.end(), static_cast<std::int32_t>(step)) == count);
    }
    CHECK(step > 0);
    munmap(&shared, 4096);
}

struct Unmount {
    const std::string& path;
    ~Unmount() { umount(path.c_str()); }
};

/// Saving fails in the middle: an Error with the reason, the old file, and nothing else in the folder.
void check_full_disk(const std::string& folder, const TensorFile& small, const TensorFile& large) {
    const std::string path = folder + "/state.safetensors";
    save_safetensors(path, small);
    CHECK_THROWS_WITH_AS(save_safetensors(path, large), doctest::Contains("Free some space there"), Error);
    CHECK(load_safetensors(path).tensors.at("x").to_vector() == small.tensors.at("x").to_vector());
    CHECK(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()) ==
          1);
    save_safetensors(path, small);  // there is space for what did fit
}

}  // namespace

TEST_CASE("save_safetensors: killed at any moment, the file is the last or the last but one state") {
    kill_while_saving(5, 1 << 20);
}

TEST_CASE("save_safetensors: killed at 50 moments with 200 MB" * doctest::test_suite("long")) {
    kill_while_saving(50, 50 << 20);
}

TEST_CASE("save_safetensors: a limit on the size of files leaves the old one") {
    const TemporaryFolder folder;
    const TensorFile small{{{"x", ones({1000})}}, {}};
    const TensorFile large{{{"x", ones({1'000'000})}}, {}};
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1'000'000, before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    check_full_disk(folder.path(), small, large);
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
}

TEST_CASE("save_safetensors: a full disk leaves the old file") {
    const TemporaryFolder folder;
    if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=6m") != 0) {
        test::skip("no right to mount a small file system");
        return;
    }
    const Unmount at_end{folder.path()};
    const TensorFile small{{{"x", ones({1 << 18})}}, {}};
    const TensorFile large{{{"x", zeros({5 << 18})}},
                           {}};  // 5 MiB: too much beside the old 1 MiB and the header
    check_full_disk(folder.path(), small, large);
}
