#include "core/scalar.h"

#include <cmath>

#include "core/error.h"
#include "core/format.h"

namespace potluck {

IntegerRange range_of(DType dtype) {
    switch (dtype) {
        case DType::i64:
            return {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
        case DType::i32:
            return {std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()};
        case DType::u8:
            return {0, 255};
        default:
            return {0, 1};
    }
}

void require_held(std::string_view op, const Scalar& number, DType dtype) {
    if (is_floating(dtype) || dtype == DType::boolean) return;
    const double value = number.to_double();
    if (number.is_floating() && std::isnan(value))
        throw Error(op, fmt::format("NaN does not fit dtype {}. Ask for a floating dtype.", dtype));
    if (number.is_floating() && std::isinf(value))
        throw Error(op, fmt::format("{} does not fit dtype {}. Ask for a floating dtype.", value, dtype));
    if (number.is_floating() && value != std::trunc(value))
        throw Error(op,
                    fmt::format("{} does not fit dtype {}, which has no fractions. Round it, or ask for a "
                                "floating dtype.",
                                value, dtype));
    const IntegerRange range = range_of(dtype);
    // 2^63 is the first double beyond the range of i64.
    const bool beyond = number.is_floating() && (value >= 0x1p63 || value < -0x1p63);
    const std::int64_t integer = number.to_int64();
    if (!beyond && integer >= range.low && integer <= range.high) return;
    const std::string shown = number.is_floating() ? fmt::format("{}", value) : fmt::format("{}", integer);
    throw Error(op, fmt::format("{} does not fit dtype {}, which holds {} to {}. Ask for a wider dtype.",
                                shown, dtype, range.low, range.high));
}

}  // namespace potluck
