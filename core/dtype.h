#pragma once

#include <concepts>
#include <cstdint>
#include <iosfwd>
#include <string_view>
#include <type_traits>

#include "core/half.h"

namespace potluck {

/// The types of a tensor's elements.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8, boolean };

/// Bytes of one element.
std::int64_t size_of(DType dtype);
/// "f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool".
std::string_view name_of(DType dtype);
/// Prints its name.
std::ostream& operator<<(std::ostream& stream, DType dtype);
bool is_floating(DType dtype);
/// f16 and bf16.
bool is_half(DType dtype);
/// True for i64, i32 and u8 (bool is not an integer).
bool is_integer(DType dtype);

/// The dtype of `a op b`, by three rules:
/// 1. the higher kind wins: bool < integer < floating;
/// 2. within a kind the wider type wins: u8 < i32 < i64, {f16, bf16} < f32 < f64;
/// 3. f16 with bf16 gives f32, the narrowest type that holds both.
/// A C++ number (`x + 2.5`) contributes only its kind: it raises the kind if necessary
/// (integer tensor + 2.5 gives f32, bool tensor + 2 gives i64) and never widens the dtype within a kind.
DType promote(DType a, DType b);

template <class T>
concept Element = std::same_as<T, double> || std::same_as<T, float> || std::same_as<T, float16> ||
    std::same_as<T, bfloat16> || std::same_as<T, std::int64_t> || std::same_as<T, std::int32_t> ||
    std::same_as<T, std::uint8_t> || std::same_as<T, bool>;

/// The DType of a C++ element type.
template <Element T>
constexpr DType dtype_of() {
    if constexpr (std::same_as<T, double>) return DType::f64;
    if constexpr (std::same_as<T, float>) return DType::f32;
    if constexpr (std::same_as<T, float16>) return DType::f16;
    if constexpr (std::same_as<T, bfloat16>) return DType::bf16;
    if constexpr (std::same_as<T, std::int64_t>) return DType::i64;
    if constexpr (std::same_as<T, std::int32_t>) return DType::i32;
    if constexpr (std::same_as<T, std::uint8_t>) return DType::u8;
    if constexpr (std::same_as<T, bool>) return DType::boolean;
}

/// Calls `function(T{})` with the C++ type of `dtype`: `visit(x.dtype(), [&](auto zero) { using T = decltype(zero); ... })`.
template <class Function>
decltype(auto) visit(DType dtype, Function&& function) {
    switch (dtype) {
        case DType::f64:
            return function(double{});
        case DType::f32:
            return function(float{});
        case DType::f16:
            return function(float16{});
        case DType::bf16:
            return function(bfloat16{});
        case DType::i64:
            return function(std::int64_t{});
        case DType::i32:
            return function(std::int32_t{});
        case DType::u8:
            return function(std::uint8_t{});
        case DType::boolean:
            break;
    }
    return function(bool{});
}

}  // namespace potluck
