#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/tensor.h"

namespace potluck::test {

/// The largest difference over the largest magnitude.
inline double relative_difference(const Tensor& got, const Tensor& expected) {
    const std::vector<double> x = got.to_vector(), y = expected.to_vector();
    REQUIRE(x.size() == y.size());
    double difference = 0, magnitude = 1e-30;
    for (std::size_t i = 0; i < x.size(); ++i) {
        difference = std::max(difference, std::abs(x[i] - y[i]));
        magnitude = std::max(magnitude, std::abs(y[i]));
    }
    return difference / magnitude;
}

}  // namespace potluck::test
