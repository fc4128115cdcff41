#include "nn/train/progress.h"

#include <doctest/doctest.h>

namespace potluck::test {
namespace {

StepMetrics metrics() {
    StepMetrics metrics{.step = 20, .loss = 2.5, .tokens_per_second = 48'200, .mfu = 0.234};
    metrics.memory_bytes = 212'000'000;
    metrics.validation_loss = 2.25;
    metrics.time[Phase::data] = 1.0;
    metrics.time[Phase::forward] = 7.0;
    return metrics;
}

}  // namespace

TEST_CASE("progress: the line of a step holds speed, mfu, the wait for data and memory") {
    CHECK(progress_line(metrics(), "tokens", 60, 245.0, 0) ==
          "step 20/60  loss 2.5000  validation 2.2500  48.2k tokens/s  mfu 23.4 %  data 12 %  212 MB  4:05 "
          "left");
    CHECK(progress_line({.step = 3, .loss = 1.0, .tokens_per_second = 50}, "samples", 0, std::nullopt, 0) ==
          "step 3  loss 1.0000  50 samples/s  0 MB");
}

TEST_CASE("progress: on a narrow terminal it stays one line and keeps what matters most") {
    const std::string whole = progress_line(metrics(), "tokens", 60, 245.0, 0);
    CHECK(progress_line(metrics(), "tokens", 60, 245.0, whole.size()) == whole);
    CHECK(progress_line(metrics(), "tokens", 60, 245.0, 92) ==
          "step 20/60  loss 2.5000  validation 2.2500  48.2k tokens/s  mfu 23.4 %  data 12 %  4:05 left");
    CHECK(progress_line(metrics(), "tokens", 60, 245.0, 79) ==
          "step 20/60  loss 2.5000  validation 2.2500  48.2k tokens/s  4:05 left");
    CHECK(progress_line(metrics(), "tokens", 60, 245.0, 10) == "step 20/60  loss 2.5000  48.2k tokens/s");
}

}  // namespace potluck::test
