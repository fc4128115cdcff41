#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "tests/expect_error.h"

namespace potluck::test {

using Values = std::vector<double>;

inline bool near(const Tensor& x, const Values& expected, double tolerance = 1e-6) {
    const Values values = x.to_vector();
    bool same = values.size() == expected.size();
    for (std::size_t i = 0; same && i < values.size(); ++i)
        same = std::abs(values[i] - expected[i]) <= tolerance * (1.0 + std::abs(expected[i]));
    if (!same) MESSAGE("got ", to_string(x));
    return same;
}

/// A leaf of f32 with these values.
inline Tensor leaf(const Values& values, const Shape& shape, DType dtype = DType::f32) {
    return tensor(values, shape, {dtype}).set_requires_grad();
}

}  // namespace potluck::test
