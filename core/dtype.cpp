#include "core/dtype.h"

#include <ostream>

#include "core/scalar.h"

namespace potluck {
namespace {

enum Kind { boolean_kind, integer_kind, floating_kind };

Kind kind_of(DType dtype) {
    if (dtype == DType::boolean) return boolean_kind;
    return is_floating(dtype) ? floating_kind : integer_kind;
}

}  // namespace

std::int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::f16:
        case DType::bf16:
            return 2;
        case DType::u8:
        case DType::boolean:
            break;
    }
    return 1;
}

std::ostream& operator<<(std::ostream& stream, DType dtype) { return stream << name_of(dtype); }

std::string_view name_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return "f64";
        case DType::f32:
            return "f32";
        case DType::f16:
            return "f16";
        case DType::bf16:
            return "bf16";
        case DType::i64:
            return "i64";
        case DType::i32:
            return "i32";
        case DType::u8:
            return "u8";
        case DType::boolean:
            break;
    }
    return "bool";
}

bool is_floating(DType dtype) { return dtype == DType::f64 || dtype == DType::f32 || is_half(dtype); }

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

bool is_integer(DType dtype) { return dtype == DType::i64 || dtype == DType::i32 || dtype == DType::u8; }

DType promote(DType a, DType b) {
    if (a == b) return a;
    const Kind kind_a = kind_of(a);
    const Kind kind_b = kind_of(b);
    if (kind_a != kind_b) return kind_a > kind_b ? a : b;
    if (size_of(a) == size_of(b)) return DType::f32;  // f16 with bf16, the only pair of one kind and size
    return size_of(a) > size_of(b) ? a : b;
}

DType promote(DType tensor, const Scalar& number) {
    if (number.is_floating()) return is_floating(tensor) ? tensor : DType::f32;
    if (number.is_boolean() || tensor != DType::boolean) return tensor;
    return DType::i64;
}

}  // namespace potluck
