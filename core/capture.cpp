#include "core/capture.h"

#include <utility>

#include "core/backend.h"
#include "core/error.h"

namespace potluck {
namespace {

class RunAgain final : public CapturedWork {
public:
    explicit RunAgain(std::function<void()> work) : work_(std::move(work)) {}
    void replay() override { work_(); }

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

}  // namespace potluck
