#include "core/trace.h"

#include <atomic>
#include <chrono>
#include <cmath>
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

struct Count {
    std::string name;
    std::int64_t time_ns;
    double value;
};

struct Recording {
    std::mutex mutex;
    std::atomic<bool> running{false};
    std::int64_t start_ns = 0;
    std::vector<Event> events;
    std::vector<Count> counts;
};

Recording& recording() {
    static auto& instance = *new Recording;  // never destroyed: threads may end after main
    return instance;
}

/// Small numbers, in the order in which the threads first record an event.
int thread_number() {
    static std::atomic<int> next{1};
    thread_local const int number = next.fetch_add(1);
    return number;
}

std::string quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void start_trace() {
    Recording& all = recording();
    const std::lock_guard lock(all.mutex);
    if (all.running)
        throw Error("start_trace", "a trace is being recorded already. End it with write_trace() first.");
    all.events.clear();
    all.counts.clear();
    all.start_ns = trace::now_ns();
    all.running = true;
}

void write_trace(const std::string& path) {
    Recording& all = recording();
    const std::lock_guard lock(all.mutex);
    if (!all.running) throw Error("write_trace", "no trace is being recorded. Begin one with start_trace().");
    const auto microseconds = [](std::int64_t ns) { return static_cast<double>(ns) / 1000.0; };
    std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    const char* before = "";
    for (const Event& event : all.events) {
        text +=
            fmt::format(R"({}{{"name": {}, "ph": "X", "pid": 1, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}})",
                        before, quoted(event.name), event.thread, microseconds(event.start_ns - all.start_ns),
                        microseconds(event.end_ns - event.start_ns));
        before = ",\n";
    }
    for (const Count& count : all.counts) {
        text +=
            fmt::format(R"({}{{"name": {}, "ph": "C", "pid": 1, "ts": {:.3f}, "args": {{"value": {}}}}})",
                        before, quoted(count.name), microseconds(count.time_ns - all.start_ns), count.value);
        before = ",\n";
    }
    text += "\n]}\n";
    write_file_atomically(path, text);  // if this fails, the recording continues and nothing is lost
    all.running = false;
    all.events = {};
    all.counts = {};
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

void count(const char* name, double value) {
    Recording& all = recording();
    const std::lock_guard lock(all.mutex);
    if (all.running && std::isfinite(value)) all.counts.push_back({name, now_ns(), value});
}

std::int64_t now_ns() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace trace
}  // namespace potluck
