#include "core/moment.h"

#include <chrono>

#include "core/backend.h"
#include "core/error.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

class HostMoment final : public Moment {
public:
    double seconds_since(const Moment& earlier) const override {
        const auto* start = dynamic_cast<const HostMoment*>(&earlier);
        if (start == nullptr)
            throw Error(OpScope::current(), "the two moments are of different devices. Take both on one.");
        return std::chrono::duration<double>(time_ - start->time_).count();
    }

private:
    std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
};

}  // namespace

std::unique_ptr<const Moment> mark_moment(Device device) {
    if (auto* const clock = dynamic_cast<HasClock*>(&backend(device))) return clock->mark_moment();
    return std::make_unique<HostMoment>();
}

}  // namespace potluck
