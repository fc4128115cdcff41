#include "tests/cuda_emulator/library_refusal.h"

#include <atomic>
#include <mutex>
#include <string_view>
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
    std::unordered_map<const void*, std::string_view> kinds;
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
    objects().kinds[object] = kind;
}

bool library_object_destroyed(const void* object, const char* kind) {
    const std::lock_guard lock(objects().mutex);
    const auto found = objects().kinds.find(object);
    if (found == objects().kinds.end() || found->second != kind) return false;
    objects().kinds.erase(found);
    return true;
}

bool is_library_object(const void* object, const char* kind) {
    const std::lock_guard lock(objects().mutex);
    const auto found = objects().kinds.find(object);
    return found != objects().kinds.end() && found->second == kind;
}

std::int64_t live_library_objects() {
    const std::lock_guard lock(objects().mutex);
    return static_cast<std::int64_t>(objects().kinds.size());
}

void refuse_convolutions(bool refuse) { refuses_convolutions = refuse; }
bool convolutions_are_refused() { return refuses_convolutions; }

}  // namespace potluck::emulator
