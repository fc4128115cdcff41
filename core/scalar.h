#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/dtype.h"

namespace potluck {

/// One number with its kind (bool, integer, floating), as written in `x + 2` or `full(shape, 0.5)`. Integers keep all
/// 64 bits.
class Scalar {
public:
    Scalar(bool value) : kind_(Kind::boolean), integer_(value) {}
    /// An unsigned number beyond the range of i64 counts as floating.
    template <std::integral T>
    Scalar(T value) : kind_(Kind::integer), integer_(static_cast<std::int64_t>(value)) {
        if constexpr (std::unsigned_integral<T> && sizeof(T) == sizeof(std::int64_t)) {
            if (integer_ >= 0) return;
            kind_ = Kind::floating;
            floating_ = static_cast<double>(value);
        }
    }
    template <std::floating_point T>
    Scalar(T value) : kind_(Kind::floating), floating_(static_cast<double>(value)) {}

    bool is_floating() const { return kind_ == Kind::floating; }
    bool is_boolean() const { return kind_ == Kind::boolean; }
    double to_double() const { return is_floating() ? floating_ : static_cast<double>(integer_); }
    /// The integer itself; a floating value is truncated towards zero (NaN gives 0; out of range gives the nearest
    /// limit).
    std::int64_t to_int64() const {
        if (!is_floating()) return integer_;
        if (!(floating_ == floating_)) return 0;
        if (floating_ >= 0x1p63) return std::numeric_limits<std::int64_t>::max();
        if (floating_ < -0x1p63) return std::numeric_limits<std::int64_t>::min();
        return static_cast<std::int64_t>(floating_);
    }
    bool to_bool() const { return is_floating() ? floating_ != 0.0 : integer_ != 0; }

private:
    enum class Kind : std::uint8_t { boolean, integer, floating };
    Kind kind_;
    double floating_ = 0.0;
    std::int64_t integer_ = 0;
};

/// The dtype of `tensor op number`: see promote().
DType promote(DType tensor, const Scalar& number);

/// The range of i64, i32 and u8; 0 and 1 for bool.
struct IntegerRange {
    std::int64_t low, high;
};
IntegerRange range_of(DType dtype);

/// The one rule for converting a number to an element, used by every factory and op that takes a number: throws
/// Error(op, ...) when an integer dtype cannot represent the number (a fraction, NaN, infinity, or out of range). bool
/// converts every number to `number != 0`. Floating dtypes round every number; beyond their range it becomes infinity,
/// as in arithmetic.
void require_held(std::string_view op, const Scalar& number, DType dtype);

}  // namespace potluck
