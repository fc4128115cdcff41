#pragma once

// Several element-wise ops in a single pass over memory, for ops whose parts would each read and write whole tensors.
// For .cpp files of autograd/ only.

#include <initializer_list>

#include "core/kernel_specs.h"

namespace potluck::detail {

/// value = function(value)
inline ChainStep apply(UnaryOp function) { return {.kind = ChainStep::Kind::apply, .function = function}; }
/// value = value op inputs[input]
inline ChainStep combine(BinaryOp op, int input) {
    return {.kind = ChainStep::Kind::combine, .op = op, .input = input};
}
/// value = inputs[input] op value
inline ChainStep combine_into(BinaryOp op, int input) {
    return {.kind = ChainStep::Kind::combine_into, .op = op, .input = input};
}
/// value = value op number
inline ChainStep combine_number(BinaryOp op, double number) {
    return {.kind = ChainStep::Kind::combine, .op = op, .input = ChainStep::no_input, .number = number};
}
/// value = value * function'(inputs[input]), for the functions that have a fused backward
inline ChainStep derivative(UnaryOp function, int input) {
    return {.kind = ChainStep::Kind::derivative, .function = function, .input = input};
}

/// Starts with inputs[0], applies the steps, and rounds once at the end. The inputs (at most most_chain_inputs, all on
/// one device) are broadcast and converted to their common dtype, which must be floating. Outside the tape.
Tensor chain(std::initializer_list<Tensor> inputs, std::initializer_list<ChainStep> steps);

}  // namespace potluck::detail
