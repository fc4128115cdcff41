#include "core/dtype.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/convert.h"
#include "core/scalar.h"

using namespace potluck;

namespace {

const std::vector<DType> all_dtypes{DType::f64, DType::f32, DType::f16, DType::bf16,
                                    DType::i64, DType::i32, DType::u8,  DType::boolean};

/// The value of a binary16 bit pattern from its definition, in double arithmetic.
double value_of_f16(unsigned bits) {
    const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
    const int exponent = static_cast<int>(bits >> 10 & 0x1fU);
    const double fraction = bits & 0x3ffU;
    if (exponent == 31) return fraction == 0 ? sign * HUGE_VAL : NAN;
    if (exponent == 0) return sign * std::ldexp(fraction, -24);
    return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double value_of_bf16(unsigned bits) {
    const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
    const int exponent = static_cast<int>(bits >> 7 & 0xffU);
    const double fraction = bits & 0x7fU;
    if (exponent == 255) return fraction == 0 ? sign * HUGE_VAL : NAN;
    if (exponent == 0) return sign * std::ldexp(fraction, -133);
    return sign * std::ldexp(128 + fraction, exponent - 134);
}

template <class T>
T convert_one(auto value) {
    T result;
    cpu::convert(&value, dtype_of<decltype(value)>(), 1, &result, dtype_of<T>(), 1, 1);
    return result;
}

/// Every number half-way between two neighbours, and the doubles just below and above it, must round correctly.
template <class Half>
void check_rounding(double (*value_of)(unsigned), unsigned infinity) {
    int wrong = 0;
    for (unsigned bits = 0; bits < infinity; ++bits) {
        const double low = value_of(bits);
        // The neighbour of the largest number would be the next power of two.
        const double high = bits + 1 == infinity ? low + (low - value_of(bits - 1)) : value_of(bits + 1);
        const double middle = low + (high - low) / 2;
        const unsigned even = (bits & 1U) != 0 ? bits + 1 : bits;
        for (const unsigned sign : {0U, 0x8000U}) {
            const double factor = sign == 0 ? 1.0 : -1.0;
            const auto goes_to = [&](double value, unsigned wanted) {
                if (convert_one<Half>(value * factor).bits != (wanted | sign)) ++wrong;
                const auto narrow = static_cast<float>(value * factor);
                if (static_cast<double>(narrow) == value * factor && Half(narrow).bits != (wanted | sign))
                    ++wrong;
            };
            goes_to(low, bits);
            goes_to(middle, even);
            goes_to(std::nextafter(middle, 0.0), bits);
            goes_to(std::nextafter(middle, HUGE_VAL), bits + 1);
        }
    }
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("dtype: names, sizes and kinds") {
    CHECK(name_of(DType::f64) == "f64");
    CHECK(name_of(DType::bf16) == "bf16");
    CHECK(name_of(DType::boolean) == "bool");
    CHECK(size_of(DType::f64) == 8);
    CHECK(size_of(DType::f16) == 2);
    CHECK(size_of(DType::boolean) == 1);
    CHECK(is_floating(DType::bf16));
    CHECK_FALSE(is_floating(DType::i32));
    for (const DType dtype : all_dtypes)
        CHECK(is_half(dtype) == (dtype == DType::f16 || dtype == DType::bf16));
    CHECK(is_integer(DType::u8));
    CHECK_FALSE(is_integer(DType::boolean));
    for (const DType dtype : all_dtypes) {
        visit(dtype, [&](auto zero) {
            CHECK(dtype_of<decltype(zero)>() == dtype);
            CHECK(static_cast<std::int64_t>(sizeof(zero)) == size_of(dtype));
        });
    }
}

TEST_CASE("promote: the documented rule") {
    CHECK(promote(DType::boolean, DType::u8) == DType::u8);
    CHECK(promote(DType::i64, DType::f16) == DType::f16);
    CHECK(promote(DType::u8, DType::i32) == DType::i32);
    CHECK(promote(DType::f16, DType::bf16) == DType::f32);
    CHECK(promote(DType::f16, DType::f64) == DType::f64);
    CHECK(promote(DType::bf16, DType::f32) == DType::f32);
    for (const DType a : all_dtypes) {
        CHECK(promote(a, a) == a);
        for (const DType b : all_dtypes) {
            CHECK(promote(a, b) == promote(b, a));
            for (const DType c : all_dtypes) {
                // The only case where the order matters is documented: f16 with bf16 gives f32 before the third is
                // considered.
                CHECK(size_of(promote(promote(a, b), c)) == size_of(promote(a, promote(b, c))));
            }
        }
    }
}

TEST_CASE("promote: a number counts by its kind alone") {
    CHECK(promote(DType::f16, Scalar(2.5)) == DType::f16);
    CHECK(promote(DType::i32, Scalar(2.5)) == DType::f32);
    CHECK(promote(DType::boolean, Scalar(2.5)) == DType::f32);
    CHECK(promote(DType::u8, Scalar(2)) == DType::u8);
    CHECK(promote(DType::boolean, Scalar(2)) == DType::i64);
    CHECK(promote(DType::boolean, Scalar(true)) == DType::boolean);
    CHECK(promote(DType::bf16, Scalar(true)) == DType::bf16);
}

TEST_CASE("half types: all 65536 patterns have the value of their definition and come back") {
    int wrong = 0;
    for (unsigned bits = 0; bits <= 0xffffU; ++bits) {
        const auto pattern = static_cast<std::uint16_t>(bits);
        const double f16_value = value_of_f16(bits);
        const double bf16_value = value_of_bf16(bits);
        const auto f16_widened = static_cast<float>(float16::from_bits(pattern));
        const auto bf16_widened = static_cast<float>(bfloat16::from_bits(pattern));
        if (std::isnan(f16_value)) {
            if (!std::isnan(f16_widened) || !std::isnan(static_cast<float>(float16(f16_widened)))) ++wrong;
        } else if (static_cast<double>(f16_widened) != f16_value ||
                   std::signbit(f16_widened) != (bits >> 15 != 0) || float16(f16_widened).bits != bits) {
            ++wrong;
        }
        if (std::isnan(bf16_value)) {
            if (!std::isnan(bf16_widened) || !std::isnan(static_cast<float>(bfloat16(bf16_widened)))) ++wrong;
        } else if (static_cast<double>(bf16_widened) != bf16_value || bfloat16(bf16_widened).bits != bits) {
            ++wrong;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("half types: runs of any length convert as single elements do") {
    std::vector<float16> halves(0x10000);
    for (unsigned bits = 0; bits <= 0xffffU; ++bits) halves[bits].bits = static_cast<std::uint16_t>(bits);
    for (const std::int64_t offset : {0, 1, 5}) {
        const std::int64_t n = 0x10000 - offset;
        std::vector<float> wide(static_cast<std::size_t>(n));
        std::vector<float16> back(static_cast<std::size_t>(n));
        cpu::convert(halves.data() + offset, DType::f16, 1, wide.data(), DType::f32, 1, n);
        cpu::convert(wide.data(), DType::f32, 1, back.data(), DType::f16, 1, n);
        int wrong = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
            const float16 half = halves[i + static_cast<std::size_t>(offset)];
            const auto alone = static_cast<float>(half);
            if (std::isnan(alone) ? !(std::isnan(wide[i]) && std::isnan(static_cast<float>(back[i])))
                                  : (wide[i] != alone || back[i].bits != half.bits))
                ++wrong;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("f16: rounds to nearest, ties to even, from f64 in one step") {
    check_rounding<float16>(value_of_f16, 0x7c00);
}

TEST_CASE("bf16: rounds to nearest, ties to even, from f64 in one step") {
    check_rounding<bfloat16>(value_of_bf16, 0x7f80);
}

TEST_CASE("convert: integers round once to the half types") {
    // 2^62 + 2^54 is half-way between two bf16 numbers; one more must round up.
    const std::int64_t middle = (std::int64_t{1} << 62) + (std::int64_t{1} << 54);
    const auto even = convert_one<bfloat16>(middle).bits;
    CHECK(convert_one<bfloat16>(middle + 1).bits == even + 1);
    CHECK(convert_one<bfloat16>(-middle - 1).bits == ((even + 1) | 0x8000));
    CHECK(convert_one<float16>(std::int64_t{2049}).bits == float16(2048.0F).bits);
    CHECK(convert_one<float16>(std::int64_t{2051}).bits == float16(2052.0F).bits);
    CHECK(convert_one<float16>(std::int64_t{65519}).bits == 0x7bff);
    CHECK(convert_one<float16>(std::int64_t{65520}).bits == 0x7c00);
}

TEST_CASE("convert: floating to integer cuts towards zero and keeps to the limits") {
    CHECK(convert_one<std::int64_t>(-2.9) == -2);
    CHECK(convert_one<std::int64_t>(NAN) == 0);
    CHECK(convert_one<std::int64_t>(1e300) == std::numeric_limits<std::int64_t>::max());
    CHECK(convert_one<std::int64_t>(-HUGE_VAL) == std::numeric_limits<std::int64_t>::min());
    CHECK(convert_one<std::int64_t>(0x1p63F) == std::numeric_limits<std::int64_t>::max());
    CHECK(convert_one<std::int32_t>(3e9F) == std::numeric_limits<std::int32_t>::max());
    CHECK(convert_one<std::int32_t>(-2147483648.0) == std::numeric_limits<std::int32_t>::min());
    CHECK(convert_one<std::int32_t>(2147483647.0) == std::numeric_limits<std::int32_t>::max());
    CHECK(convert_one<std::uint8_t>(-1.5F) == 0);
    CHECK(convert_one<std::uint8_t>(255.9F) == 255);
    CHECK(convert_one<std::uint8_t>(float16(300.0F)) == 255);
    CHECK(convert_one<bool>(NAN));
    CHECK(convert_one<bool>(1e-300));
    CHECK_FALSE(convert_one<bool>(-0.0));
    CHECK(convert_one<std::uint8_t>(std::int64_t{257}) == 1);
}

TEST_CASE("Scalar: keeps the kind and all 64 bits") {
    const std::int64_t large = std::numeric_limits<std::int64_t>::max();
    CHECK(Scalar(large).to_int64() == large);
    CHECK(Scalar(2.9).to_int64() == 2);
    CHECK(Scalar(NAN).to_int64() == 0);
    CHECK(Scalar(1e30).to_int64() == large);
    CHECK(Scalar(true).is_boolean());
    CHECK(Scalar(0.5F).is_floating());
    CHECK(Scalar(0.5).to_bool());
}
