#include "core/trace.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

struct Event {
    std::string name;
    int thread;
    std::int64_t start_ns, end_ns;
};

struct Recording {
    std::mutex mutex;
    std::atomic<bool> running{false};
    std::int64_t start_ns = 0;
    std::vector<Event> events;
};

Recording& recording() {
    static auto& instance = *new Recording;  // never destroyed: threads may end after main
    return instance;
}

/// Small numbers, in the order in which threads first record something.
int thread_number() {
    static std::atomic<int> next{1};
    thread_local const int number = next.fetch_add(1);
    return number;
}

}  // namespace

void start_trace() {
    Recording& all = recording();
    const std::lock_guard lock(all.mutex);
    if (all.running)
        throw Error("start_trace", "a trace is being recorded already. End it with write_trace() first.");
    all.events.clear();
    all.start_ns = trace::now_ns();
    all.running = true;
}

void write_trace(const std::string& path) {
    Recording& all = recording();
    const std::lock_guard lock(all.mutex);
    if (!all.running) throw Error("write_trace", "no trace is being recorded. Begin one with start_trace().");
    const auto microseconds = [](std::int64_t ns) { return static_cast<double>(ns) / 1000.0; };
    std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    for (const Event& event : all.events) {
        const auto name =
            nlohmann::json(event.name).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        text += fmt::format(R"({{"name": {}, "ph": "X", "pid": 1, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}})",
                            name, event.thread, microseconds(event.start_ns - all.start_ns),
                            microseconds(event.end_ns - event.start_ns));
        text += &event == &all.events.back() ? "\n" : ",\n";
    }
    text += "]}\n";
    write_file_atomically(path, text);  // when it fails the recording goes on, and nothing is lost
    all.running = false;
    all.events.clear();
    all.events.shrink_to_fit();
}

bool is_tracing() noexcept { return recording().running.load(std::memory_order_relaxed); }

namespace trace {

void record(const char* name, std::int64_t start_ns, std::int64_t end_ns) {
    Recording& all = recording();
    const int thread = thread_number();
    const std::lock_guard lock(all.mutex);
    if (!all.running || start_ns < all.start_ns) return;  // began before this recording
    all.events.push_back({name, thread, start_ns, end_ns});
}

std::int64_t now_ns() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace trace
}  // namespace potluck
