#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"

namespace potluck::test {

/// The text of the Error that `function` throws; empty (and a failed check) when it throws none.
template <class Function>
std::string error_of(Function&& function) {
    try {
        function();
    } catch (const Error& error) {
        return error.what();
    }
    FAIL_CHECK("no Error was thrown");
    return {};
}

inline bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

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
