#pragma once

// The parameters of the kernels of the contract (core/backend.h) beside their tensors: functions and options.

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/random.h"
#include "core/random_part.h"
#include "core/tensor.h"

namespace potluck {

enum class UnaryOp : std::uint8_t {
    negate,
    absolute,
    sign,
    square,
    square_root,
    reciprocal_square_root,
    reciprocal,
    exponential,
    logarithm,
    sine,
    cosine,
    floor,
    ceil,
    round,
    error_function,
    relu,
    gelu,
    gelu_tanh,
    silu,
    tanh,
    sigmoid,
    is_nan,
    is_finite,
    logical_not  // these three write bool
};
enum class BinaryOp : std::uint8_t {
    add,
    subtract,
    multiply,
    divide,
    floor_divide,
    power,
    maximum,
    minimum,
    remainder
};
enum class CompareOp : std::uint8_t { equal, not_equal, less, less_equal, greater, greater_equal };

/// An operand of an element-wise kernel: a tensor, or one number that is broadcast to all elements. A number is never
/// rounded to a half type: it is f64 beside f64, f32 beside the other floating dtypes, and i64 beside integers and
/// bool.
class Operand {
public:
    Operand(const Tensor& tensor) : tensor_(tensor) {}
    Operand(const Scalar& number) : number_(number) {}

    bool is_number() const { return !tensor_.defined(); }
    const Tensor& tensor() const { return tensor_; }
    const Scalar& number() const { return number_; }

private:
    Tensor tensor_;
    Scalar number_ = 0;
};

/// How one step of a fused chain transforms the value so far.
struct ChainStep {
    enum class Kind : std::uint8_t {
        apply,         // function(value)
        combine,       // value op inputs[input]; value op number, where input is no_input
        combine_into,  // inputs[input] op value; number op value
        derivative     // value * function'(inputs[input]), for the functions of unary_backward
    };
    Kind kind;
    UnaryOp function = UnaryOp::negate;  // any but sine, cosine and the functions that return bool
    BinaryOp op = BinaryOp::add;
    int input = 0;
    double number = 0.0;

    static constexpr int no_input = -1;
};
inline constexpr std::size_t most_chain_inputs = 3;
inline constexpr std::size_t most_chain_steps = 8;

enum class ReduceOp : std::uint8_t { sum, mean, norm, max, min, argmax, argmin, logsumexp, any, all };

struct CrossEntropySpec {
    std::int64_t ignore_index = -100;
    double label_smoothing = 0.0;
};

struct AttentionSpec {
    bool causal = false;   // aligned bottom-right: the last query sees every key
    double scale = 1.0;    // multiplies q k^T
    double dropout = 0.0;  // probability of dropping a weight
    RandomKey dropout_key{};
    RandomPart
        dropout_part{};  // the attention weights (batch, heads, queries, keys) as a part of the whole tensor
};

/// Of convolutions and pooling, each for height and width.
struct WindowSpec {
    std::array<std::int64_t, 2> stride{1, 1};
    std::array<std::int64_t, 2> padding{0, 0};  // on both sides
    std::array<std::int64_t, 2> dilation{1, 1};
};
struct ConvolutionSpec : WindowSpec {
    std::int64_t groups = 1;
};
struct PoolSpec : WindowSpec {
    std::array<std::int64_t, 2> kernel{1, 1};
    bool count_padding =
        true;  // average: divide by the window size including padding (but never by positions beyond it)
};

/// The rules of optimizers, in plain numbers that a kernel may be given as they are.
struct AdamWSpec {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    std::int64_t step;      // 1 for the first update
    bool decoupled = true;  // AdamW; false adds weight_decay * parameter to the gradient (Adam with L2)
    double gradient_scale = 1.0;
    bool stochastic_rounding = false;  // for bf16 parameters, see core/stochastic_rounding.h
};
struct SgdSpec {
    double learning_rate, momentum, dampening, weight_decay;
    bool nesterov;
    std::int64_t step;  // 1 for the first update: the momentum buffer is not yet initialised
    double gradient_scale = 1.0;
    bool stochastic_rounding = false;
};

/// A parameter and the state that is updated with it, all of the same shape and contiguous. Parameters and gradients
/// have any floating dtype; moments are f32 (f64 for f64).
struct UpdateTensors {
    Tensor parameter, gradient;
    Tensor first_moment_or_none = {};  // of SGD: the momentum
    Tensor second_moment_or_none = {};
    Tensor rounded_or_none =
        {};  // f16 or bf16: gets the new values of the parameter (then its f32 master), rounded
    RandomKey rounding_key{};  // of stochastic rounding: element rounding_first + i of the stretch decides
    std::int64_t rounding_first = 0;  // element i
};

}  // namespace potluck
