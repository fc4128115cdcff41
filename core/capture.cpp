#include "core/capture.h"

#include <utility>

#include "core/backend.h"
#include "core/error.h"

namespace potluck {
namespace {

/// How many replays run captured work in this thread, counting nested ones.
thread_local int replays = 0;

class RunAgain final : public CapturedWork {
public:
    explicit RunAgain(std::function<void()> work) : work_(std::move(work)) {}
    void replay() override {
        struct Count {
            Count() { ++replays; }
            ~Count() { --replays; }
        } const count;
        work_();
    }

private:
    std::function<void()> work_;
};

}  // namespace

std::unique_ptr<CapturedWork> Backend::capture(std::function<void()> work) {
    return std::make_unique<RunAgain>(std::move(work));
}

std::unique_ptr<CapturedWork> capture(Device device, std::function<void()> work) {
    if (!work) throw Error("capture", "the work is an empty function. Give what is to be recorded.");
    return backend(device).capture(std::move(work));
}

bool detail::is_replaying(Device device) { return replays > 0 && device.is_cpu(); }
bool detail::is_recording(Device device) { return backend(device).is_recording(); }

void detail::require_readable(const char* op, Device device) {
    if (is_replaying(device))
        throw Error(
            op,
            "captured work cannot read values on the host. Read them after the replay, from tensors that "
            "the work leaves.");
}

}  // namespace potluck
