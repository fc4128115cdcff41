// Learning rates are pure functions of the update's number.

#include <doctest/doctest.h>

#include <set>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;

TEST_CASE("schedule: warm-up moves from the first update on and reaches the peak at its last") {
    const optim::Schedule rate = optim::cosine_schedule({.peak = 6e-4, .steps = 10000, .warmup = 2000});
    CHECK(rate(0) == doctest::Approx(3e-7));
    CHECK(rate(1) == doctest::Approx(6e-7));
    CHECK(rate(1999) == 6e-4);
    CHECK(rate(2000) < 6e-4);
    CHECK(rate(2000) > 0.999 * 6e-4);
    for (int step = 1; step < 2000; ++step) CHECK(rate(step) > rate(step - 1));
    for (int step = 2000; step < 10000; ++step) CHECK(rate(step) < rate(step - 1));
    CHECK(rate(10000) == 0.0);
    CHECK(rate(20000) == 0.0);
}

TEST_CASE("schedule: no warm-up, one update of it, and one longer than the run") {
    const auto none = optim::linear_schedule({.peak = 1.0, .steps = 10});
    const auto one = optim::linear_schedule({.peak = 1.0, .steps = 10, .warmup = 1});
    const auto longer = optim::linear_schedule({.peak = 1.0, .steps = 10, .warmup = 20});
    for (int step = 0; step < 12; ++step) {
        CHECK(none(step) == doctest::Approx(step < 10 ? 1.0 - 0.1 * step : 0.0));
        CHECK(one(step) == none(step));
        CHECK(longer(step) == doctest::Approx(0.05 * (step + 1)));
    }
    CHECK(longer(25) == 0.0);
    const auto exact = optim::cosine_schedule({.peak = 1.0, .steps = 10, .warmup = 10, .floor = 0.1});
    CHECK(exact(9) == 1.0);
    CHECK(exact(10) == doctest::Approx(0.1));
    const auto constant = optim::constant_schedule({.peak = 2.0, .warmup = 4});
    CHECK(constant(0) == 0.5);
    CHECK(constant(3) == 2.0);
    CHECK(constant(1000000) == 2.0);
}

TEST_CASE("schedule: the cosine around a break, the warm-up after one") {
    const auto cosine = optim::cosine_schedule({.peak = 1e-3, .steps = 100});
    CHECK(cosine(44) == doctest::Approx(5.936907e-4).epsilon(1e-6));
    CHECK(cosine(45) == doctest::Approx(5.782172e-4).epsilon(1e-6));
    CHECK(cosine(46) == doctest::Approx(5.626666e-4).epsilon(1e-6));
    const auto warmup = optim::linear_schedule({.peak = 1.0, .steps = 1000, .warmup = 200});
    CHECK(warmup(99) == doctest::Approx(100.0 / 200));
    CHECK(warmup(100) == doctest::Approx(101.0 / 200));
}

TEST_CASE("schedule: bad options are refused") {
    check_error([] { optim::cosine_schedule({.peak = -1.0}); }, {"[schedule]", "-1"});
    check_error([] { optim::cosine_schedule({.peak = 1.0, .floor = 2.0}); }, {"floor", "2"});
    check_error([] { optim::linear_schedule({.steps = 0}); }, {"steps is 0"});
    check_error([] { optim::linear_schedule({.steps = 5, .warmup = -1}); }, {"warmup is -1"});
    check_error([] { optim::linear_schedule({.steps = 5})(-1); }, {"step is -1"});
}
