#pragma once

// Why a double of a library refused a call. The real libraries return little more than a status; the doubles record the
// reason, so that the Error can say what was wrong.

#include <cstdint>
#include <string>

namespace potluck::emulator {

/// The reason of this thread's last refused library call, "" before the first.
std::string last_library_refusal();
/// Records a reason. Returns `status`, so that a double can write `return refused(STATUS, "...")`.
void record_library_refusal(std::string reason);
template <class Status>
Status refused(Status status, std::string reason) {
    record_library_refusal(std::move(reason));
    return status;
}

/// Registers a created handle or descriptor: a double checks that its arguments still exist.
void library_object_created(const void* object, const char* kind);
/// False when there is no such object.
bool library_object_destroyed(const void* object, const char* kind);
bool is_library_object(const void* object, const char* kind);
/// Whether this thread created the handle. A handle may be used by one thread at a time, and a call depends on its
/// state (a stream, for instance): the doubles allow only the thread that created it to use it.
bool is_handle_of_this_thread(const void* handle);
inline constexpr const char* handle_of_another_thread =
    "the handle was created by another thread: two threads could use it at once";
/// The number of existing objects, of all kinds.
std::int64_t live_library_objects();

/// Makes the double of cuDNN refuse every convolution algorithm, as the real one does for configurations outside its
/// tables.
void refuse_convolutions(bool refuse);
bool convolutions_are_refused();

}  // namespace potluck::emulator
