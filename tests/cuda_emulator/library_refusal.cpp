#include "tests/cuda_emulator/library_refusal.h"

#include <atomic>
#include <mutex>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

namespace potluck::emulator {
namespace {

std::string& reason() {
    thread_local std::string text;
    return text;
}

struct Objects {
    std::mutex mutex;
    struct Object {
        std::string_view kind;
        std::thread::id creator;
    };
    std::unordered_map<const void*, Object> alive;
};

// Never destroyed: handles in static variables may outlive it.
Objects& objects() {
    static Objects& all = *new Objects;
    return all;
}

std::atomic<bool> refuses_convolutions{false};

}  // namespace

std::string last_library_refusal() { return reason(); }
void record_library_refusal(std::string text) { reason() = std::move(text); }

void library_object_created(const void* object, const char* kind) {
    const std::lock_guard lock(objects().mutex);
    objects().alive[object] = {kind, std::this_thread::get_id()};
}

bool library_object_destroyed(const void* object, const char* kind) {
    const std::lock_guard lock(objects().mutex);
    const auto found = objects().alive.find(object);
    if (found == objects().alive.end() || found->second.kind != kind) return false;
    objects().alive.erase(found);
    return true;
}

bool is_library_object(const void* object, const char* kind) {
    const std::lock_guard lock(objects().mutex);
    const auto found = objects().alive.find(object);
    return found != objects().alive.end() && found->second.kind == kind;
}

bool is_handle_of_this_thread(const void* handle) {
    const std::lock_guard lock(objects().mutex);
    const auto found = objects().alive.find(handle);
    return found != objects().alive.end() && found->second.creator == std::this_thread::get_id();
}

std::int64_t live_library_objects() {
    const std::lock_guard lock(objects().mutex);
    return static_cast<std::int64_t>(objects().alive.size());
}

void refuse_convolutions(bool refuse) { refuses_convolutions = refuse; }
bool convolutions_are_refused() { return refuses_convolutions; }

}  // namespace potluck::emulator
