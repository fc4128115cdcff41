#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "core/error.h"

namespace potluck {

/// What a training computes in. Parameters, their gradients and the optimizer's state are f32 in all of them.
enum class Precision : std::uint8_t {
    f32,
    bf16,  // under Autocast(DType::bf16)
    f16    // under Autocast(DType::f16), with a LossScaler
};

/// What Autocast is given.
constexpr DType dtype_of(Precision precision) {
    return precision == Precision::f32 ? DType::f32 : precision == Precision::bf16 ? DType::bf16 : DType::f16;
}

/// Of "f32", "bf16" or "f16". Throws Error for another text.
inline Precision parse_precision(std::string_view text) {
    for (const Precision precision : {Precision::f32, Precision::bf16, Precision::f16})
        if (text == name_of(dtype_of(precision))) return precision;
    throw Error("precision", "\"" + std::string(text) + "\" is none. Use f32, bf16 or f16.");
}

}  // namespace potluck
