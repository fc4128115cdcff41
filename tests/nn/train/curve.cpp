#include "nn/train/curve.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

namespace potluck::test {

TEST_CASE("curve: few values are kept as they are") {
    Curve curve;
    CHECK(curve.empty());
    for (std::int64_t step = 1; step <= 500; ++step) curve.add(step, 0.5 * static_cast<double>(step));
    REQUIRE(curve.buckets().size() == 500);
    CHECK(curve.width() == 1);
    CHECK(curve.buckets()[9].middle() == 10.0);
    CHECK(curve.buckets()[9].mean() == 5.0);
    CHECK(curve.last() == 250.0);
}

TEST_CASE("curve: a long one stays small, and loses neither a spike nor the mean") {
    Curve curve;
    constexpr std::int64_t steps = 100'000;
    for (std::int64_t step = 1; step <= steps; ++step)
        curve.add(step, step == 77'777 ? 1000.0 : step == 33'333 ? -1000.0 : 1.0);
    CHECK(curve.buckets().size() <= Curve::most_buckets);
    CHECK(curve.buckets().size() > Curve::most_buckets / 4);
    double sum = 0.0, smallest = 0.0, largest = 0.0;
    std::int64_t count = 0, before = 0;
    for (const Curve::Bucket& bucket : curve.buckets()) {
        CHECK(bucket.first_step == before + 1);
        CHECK(bucket.last_step >= bucket.first_step);
        CHECK(bucket.last_step - bucket.first_step < curve.width());
        before = bucket.last_step;
        sum += bucket.sum;
        count += bucket.count;
        smallest = std::min(smallest, bucket.smallest);
        largest = std::max(largest, bucket.largest);
        if (bucket.largest > 1.0)
            CHECK(std::abs(bucket.middle() - 77'777.0) <= static_cast<double>(curve.width()));
    }
    CHECK(before == steps);
    CHECK(count == steps);
    CHECK(sum == static_cast<double>(steps - 2));
    CHECK(smallest == -1000.0);
    CHECK(largest == 1000.0);
}

TEST_CASE("curve: what is not finite is counted and not kept; steps may lie far apart") {
    Curve curve;
    curve.add(1, std::nan(""));
    curve.add(2, std::numeric_limits<double>::infinity());
    CHECK(curve.empty());
    CHECK(curve.left_out() == 2);
    for (std::int64_t i = 1; i <= 1000; ++i) curve.add(i * 1'000'000'000, 1.0);
    CHECK(curve.buckets().size() <= Curve::most_buckets);
    CHECK(curve.buckets().back().last_step == 1'000'000'000'000);
}

}  // namespace potluck::test
