#include "core/elementwise_errors.h"

#include "core/format.h"

namespace potluck {

const char* name_of(UnaryOp op) {
    switch (op) {
        case UnaryOp::negate:
            return "negate";
        case UnaryOp::absolute:
            return "abs";
        case UnaryOp::sign:
            return "sign";
        case UnaryOp::square:
            return "square";
        case UnaryOp::square_root:
            return "sqrt";
        case UnaryOp::reciprocal_square_root:
            return "rsqrt";
        case UnaryOp::reciprocal:
            return "reciprocal";
        case UnaryOp::exponential:
            return "exp";
        case UnaryOp::logarithm:
            return "log";
        case UnaryOp::sine:
            return "sin";
        case UnaryOp::cosine:
            return "cos";
        case UnaryOp::floor:
            return "floor";
        case UnaryOp::ceil:
            return "ceil";
        case UnaryOp::round:
            return "round";
        case UnaryOp::error_function:
            return "erf";
        case UnaryOp::relu:
            return "relu";
        case UnaryOp::gelu:
            return "gelu";
        case UnaryOp::gelu_tanh:
            return "gelu";
        case UnaryOp::silu:
            return "silu";
        case UnaryOp::tanh:
            return "tanh";
        case UnaryOp::sigmoid:
            return "sigmoid";
        case UnaryOp::is_nan:
            return "is_nan";
        case UnaryOp::is_finite:
            return "is_finite";
        case UnaryOp::logical_not:
            return "logical_not";
    }
    return "unary";
}

const char* name_of(BinaryOp op) {
    switch (op) {
        case BinaryOp::add:
            return "add";
        case BinaryOp::subtract:
            return "subtract";
        case BinaryOp::multiply:
            return "multiply";
        case BinaryOp::divide:
            return "divide";
        case BinaryOp::floor_divide:
            return "floor_divide";
        case BinaryOp::power:
            return "power";
        case BinaryOp::maximum:
            return "maximum";
        case BinaryOp::minimum:
            return "minimum";
        case BinaryOp::remainder:
            return "remainder";
    }
    return "binary";
}

Error no_integer_version(UnaryOp op, DType dtype) {
    return Error(name_of(op), fmt::format("there is no {} for {}. Convert to a floating dtype first.",
                                          name_of(op), name_of(dtype)));
}

Error no_fused_backward(UnaryOp op) {
    return Error(name_of(op), "has no fused backward: its gradient is composed of other ops.");
}

Error bad_integer_operand(BinaryOp op, std::int64_t position, std::int64_t value) {
    if (op == BinaryOp::power)
        return Error(name_of(op), fmt::format("the integer exponent at position {} (row-major) is {}, but "
                                              "integers stay integers. Convert to a floating dtype first.",
                                              position, value));
    return Error(name_of(op), fmt::format("the integer divisor at position {} (row-major) is 0. "
                                          "Convert to a floating dtype to get infinities.",
                                          position));
}

Error no_integer_scale(double scale, DType dtype) {
    return Error(
        "add_scaled",
        fmt::format("the scale {} is no integer, but the sum is {}. Use a floating dtype.", scale, dtype));
}

}  // namespace potluck
