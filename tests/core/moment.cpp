#include "core/moment.h"

#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "core/error.h"

using namespace potluck;

TEST_CASE("moment: between two lies the time that passed, and none of another device") {
    const auto first = mark_moment(Device::cpu());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto second = mark_moment(Device::cpu());
    CHECK(second->seconds_since(*first) >= 0.02);
    CHECK(second->seconds_since(*first) < 10.0);
    CHECK(first->seconds_since(*first) == 0.0);
    struct Elsewhere : Moment {
        double seconds_since(const Moment&) const override { return 0.0; }
    };
    CHECK_THROWS_AS(second->seconds_since(Elsewhere()), Error);
}
