#pragma once

// Loops over one block (see blocks.h) of an element-wise kernel. A kernel chooses one by the op and passes it to
// BlockMap, so that the traversal of strides, dtypes and threads is compiled once for all ops.

#include <cstdint>

#include "core/kernel_specs.h"
#include "core/tensor.h"

namespace potluck::cpu {

/// The kernel of the contract, for families that call it, too.
void unary(UnaryOp op, const Tensor& x, Tensor& y);

/// y[i] = f(x[i]); y may be x.
template <class T>
using UnaryLoop = void (*)(T* y, const T* x, std::int64_t n);
/// y[i] = f(a[i], b[i]); y may be a or b.
template <class Out, class T>
using BinaryLoop = void (*)(Out* y, const T* a, const T* b, std::int64_t n);

/// The loop over a stateless function object. The pragma states what the contract of BlockMap guarantees: element i of
/// y depends on element i of the inputs only, even where y is one of them.
template <class T, class Function>
UnaryLoop<T> unary_loop(Function) {
    return [](T* y, const T* x, std::int64_t n) {
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i) y[i] = Function{}(x[i]);
    };
}

template <class Out, class T, class Function>
BinaryLoop<Out, T> binary_loop(Function) {
    return [](Out* y, const T* a, const T* b, std::int64_t n) {
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i) y[i] = Function{}(a[i], b[i]);
    };
}

/// dx[i] = dy[i] * f'(x[i]) for relu, gelu, gelu_tanh, silu (activation.cpp). Arguments: dx, x, dy, n; dx may be dy.
/// Throws Error for any other op.
template <class T>
BinaryLoop<T, T> activation_backward_loop(UnaryOp op);

/// relu, gelu, gelu_tanh, silu, tanh, sigmoid (activation.cpp), for float and double; nullptr for any other
/// op.
template <class T>
UnaryLoop<T> activation_loop(UnaryOp op);

}  // namespace potluck::cpu
