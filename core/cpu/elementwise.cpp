#include "core/cpu/elementwise.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/vector_math.h"
#include "core/elementwise_errors.h"

namespace potluck::cpu {

namespace {

/// Integer arithmetic wraps around by using unsigned numbers; signed overflow would be undefined.
std::uint64_t bits(std::int64_t x) { return static_cast<std::uint64_t>(x); }
std::int64_t integer(std::uint64_t x) { return static_cast<std::int64_t>(x); }

std::int64_t integer_power(std::int64_t base, std::int64_t exponent) {
    std::uint64_t result = 1;
    std::uint64_t factor = bits(base);
    for (std::uint64_t e = bits(exponent); e != 0; e >>= 1) {
        if ((e & 1U) != 0) result *= factor;
        factor *= factor;
    }
    return integer(result);
}

/// The quotient rounded down, consistent with the sign rule of remainder: a == quotient * b + remainder.
std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
    if (b == -1) return integer(0 - bits(a));  // the lowest integer has no positive counterpart: wraps around
    const std::int64_t quotient = a / b;
    return quotient - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

std::int64_t floor_remainder(std::int64_t a, std::int64_t b) {
    if (b == -1) return 0;
    const std::int64_t rest = a % b;
    return rest + ((rest != 0 && (rest < 0) != (b < 0)) ? b : 0);
}

template <class T>
T floor_remainder(T a, T b) {
    const T rest = std::fmod(a, b);
    if (rest == T(0)) return std::copysign(T(0), b);
    return (rest < T(0)) != (b < T(0)) ? rest + b : rest;
}

/// For floating types: the integer q for which a = q b + floor_remainder(a, b); infinite or NaN as a / b for b = 0.
template <class T>
T floor_divide(T a, T b) {
    if (b == T(0)) return a / b;
    const T rest = std::fmod(a, b);
    const T quotient = (a - rest) / b - (rest != T(0) && (rest < T(0)) != (b < T(0)) ? T(1) : T(0));
    return quotient == T(0) ? std::copysign(T(0), a / b) : std::nearbyint(quotient);
}

/// Ops that also exist for integers.
template <class T>
UnaryLoop<T> common_unary_loop(UnaryOp op) {
    constexpr bool integral = std::is_integral_v<T>;
    switch (op) {
        case UnaryOp::negate:
            return unary_loop<T>([](T x) {
                if constexpr (integral)
                    return integer(0 - bits(x));
                else
                    return -x;
            });
        case UnaryOp::absolute:
            return unary_loop<T>([](T x) {
                if constexpr (integral)
                    return x < 0 ? integer(0 - bits(x)) : x;
                else
                    return std::fabs(x);
            });
        case UnaryOp::sign:
            return unary_loop<T>([](T x) { return x > T(0) ? T(1) : (x < T(0) ? T(-1) : x); });
        case UnaryOp::square:
            return unary_loop<T>([](T x) {
                if constexpr (integral)
                    return integer(bits(x) * bits(x));
                else
                    return x * x;
            });
        default:
            return nullptr;
    }
}

template <class T>
UnaryLoop<T> floating_unary_loop(UnaryOp op) {
    switch (op) {
        case UnaryOp::square_root:
            return unary_loop<T>([](T x) { return std::sqrt(x); });
        case UnaryOp::reciprocal_square_root:
            return unary_loop<T>([](T x) { return T(1) / std::sqrt(x); });
        case UnaryOp::reciprocal:
            return unary_loop<T>([](T x) { return T(1) / x; });
        case UnaryOp::exponential:
            return unary_loop<T>([](T x) { return exponential(x); });
        case UnaryOp::logarithm:
            return unary_loop<T>([](T x) { return logarithm(x); });
        case UnaryOp::sine:
            return unary_loop<T>([](T x) { return std::sin(x); });
        case UnaryOp::cosine:
            return unary_loop<T>([](T x) { return std::cos(x); });
        case UnaryOp::floor:
            return unary_loop<T>([](T x) { return std::floor(x); });
        case UnaryOp::ceil:
            return unary_loop<T>([](T x) { return std::ceil(x); });
        case UnaryOp::round:
            return unary_loop<T>([](T x) { return std::nearbyint(x); });
        case UnaryOp::error_function:
            return unary_loop<T>([](T x) { return error_function(x); });
        default:
            return activation_loop<T>(op);
    }
}

template <class T>
UnaryLoop<T> find_unary_loop(UnaryOp op, DType dtype) {
    UnaryLoop<T> loop = common_unary_loop<T>(op);
    if (loop != nullptr) return loop;
    if constexpr (std::is_integral_v<T>) {
        if (op == UnaryOp::floor || op == UnaryOp::ceil || op == UnaryOp::round)
            return unary_loop<T>([](T x) { return x; });
        if (op == UnaryOp::relu) return unary_loop<T>([](T x) { return x < 0 ? 0 : x; });
    } else {
        loop = floating_unary_loop<T>(op);
        if (loop != nullptr) return loop;
    }
    throw no_integer_version(op, dtype);
}

/// is_nan, is_finite and logical_not, which give bool.
template <class T>
void test_elements(UnaryOp op, const Tensor& x, Tensor& y) {
    BlockMap<bool, T>::run(y, x, [op](bool* to, const T* from, std::int64_t n) {
        if (op == UnaryOp::logical_not) {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] == T(0);
        } else if (op == UnaryOp::is_nan) {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] != from[i];
        } else {  // infinity - infinity and NaN - NaN are NaN, which differs from itself
            for (std::int64_t i = 0; i < n; ++i) to[i] = std::is_integral_v<T> || from[i] - from[i] == T(0);
        }
    });
}

template <class T>
BinaryLoop<T, T> find_binary_loop(BinaryOp op) {
    constexpr bool integral = std::is_integral_v<T>;
    switch (op) {
        case BinaryOp::add:
            return binary_loop<T, T>([](T a, T b) {
                if constexpr (integral)
                    return integer(bits(a) + bits(b));
                else
                    return a + b;
            });
        case BinaryOp::subtract:
            return binary_loop<T, T>([](T a, T b) {
                if constexpr (integral)
                    return integer(bits(a) - bits(b));
                else
                    return a - b;
            });
        case BinaryOp::multiply:
            return binary_loop<T, T>([](T a, T b) {
                if constexpr (integral)
                    return integer(bits(a) * bits(b));
                else
                    return a * b;
            });
        case BinaryOp::divide:
            return binary_loop<T, T>([](T a, T b) {
                if constexpr (integral)
                    return floor_divide(a, b);
                else
                    return a / b;
            });
        case BinaryOp::floor_divide:
            return binary_loop<T, T>([](T a, T b) { return floor_divide(a, b); });
        case BinaryOp::power:
            return binary_loop<T, T>([](T a, T b) {
                if constexpr (integral)
                    return integer_power(a, b);
                else
                    return std::pow(a, b);
            });
        case BinaryOp::maximum:  // a NaN in b fails the comparison, and so wins
            return binary_loop<T, T>([](T a, T b) { return (a > b || a != a) ? a : b; });
        case BinaryOp::minimum:
            return binary_loop<T, T>([](T a, T b) { return (a < b || a != a) ? a : b; });
        case BinaryOp::remainder:
            return binary_loop<T, T>([](T a, T b) { return floor_remainder(a, b); });
    }
    throw Error("binary", "unknown operation.");
}

/// Integers have no quotient by zero and no power with a negative exponent. Checks before anything is written.
void check_integer_operand(BinaryOp op, const Tensor& b) {
    const bool divides = op == BinaryOp::divide || op == BinaryOp::floor_divide || op == BinaryOp::remainder;
    if (!divides && op != BinaryOp::power) return;
    parallel_for(b.count(), piece_size, [&](std::int64_t begin, std::int64_t end) {
        BlockReader<std::int64_t> reader(b);
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            const std::int64_t* values = reader.read(first, n);
            for (std::int64_t i = 0; i < n; ++i) {
                if (divides ? values[i] == 0 : values[i] < 0)
                    throw bad_integer_operand(op, first + i, values[i]);
            }
        }
    });
}

template <class T>
BinaryLoop<bool, T> find_compare_loop(CompareOp op) {
    switch (op) {
        case CompareOp::equal:
            return binary_loop<bool, T>([](T a, T b) { return a == b; });
        case CompareOp::not_equal:
            return binary_loop<bool, T>([](T a, T b) { return a != b; });
        case CompareOp::less:
            return binary_loop<bool, T>([](T a, T b) { return a < b; });
        case CompareOp::less_equal:
            return binary_loop<bool, T>([](T a, T b) { return a <= b; });
        case CompareOp::greater:
            return binary_loop<bool, T>([](T a, T b) { return a > b; });
        case CompareOp::greater_equal:
            return binary_loop<bool, T>([](T a, T b) { return a >= b; });
    }
    throw Error("compare", "unknown operation.");
}

/// An operand in the compute type as a tensor: the given tensor, or the given number, stored here.
template <class T>
class OperandTensor {
public:
    explicit OperandTensor(const Operand& operand) : tensor_(operand.tensor()) {
        if (!operand.is_number()) return;
        if constexpr (std::is_integral_v<T>)
            number_ = operand.number().to_int64();
        else
            number_ = static_cast<T>(operand.number().to_double());
        tensor_ = Tensor::view_of(
            std::make_shared<Storage>(Device::cpu(), &number_, std::int64_t{sizeof(T)}, [] {}), dtype_of<T>(),
            {}, {}, 0);
    }
    OperandTensor(const OperandTensor&) = delete;
    OperandTensor& operator=(const OperandTensor&) = delete;

    /// The tensor, or the number as a 0-dimensional tensor.
    const Tensor& tensor() const { return tensor_; }
    Tensor stretched(const Shape& shape) const { return tensor_.broadcast_alias("number", shape); }

private:
    T number_{};
    Tensor tensor_;
};

/// A step with its loop already chosen.
template <class T>
struct ChainLoop {
    ChainStep::Kind kind;
    int input;
    std::vector<T> numbers;  // the number operand of a step without input, repeated
    UnaryLoop<T> unary = nullptr;
    BinaryLoop<T, T> binary = nullptr;

    ChainLoop(const ChainStep& step, DType dtype) : kind(step.kind), input(step.input) {
        if (input == ChainStep::no_input) numbers.assign(block_size, static_cast<T>(step.number));
        if (kind == ChainStep::Kind::apply)
            unary = find_unary_loop<T>(step.function, dtype);
        else if (kind == ChainStep::Kind::derivative)
            binary = activation_backward_loop<T>(step.function);
        else
            binary = find_binary_loop<T>(step.op);
    }
    void run(T* value, const std::array<const T*, most_chain_inputs>& inputs, std::int64_t n) const {
        if (kind == ChainStep::Kind::apply) return unary(value, value, n);
        const T* other =
            input == ChainStep::no_input ? numbers.data() : inputs[static_cast<std::size_t>(input)];
        if (kind == ChainStep::Kind::combine)
            binary(value, value, other, n);
        else
            binary(value, other, value, n);
    }
};

/// Runs all steps on one block in a buffer that stays in the L1 cache.
template <class T>
void run_chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) {
    std::vector<ChainLoop<T>> loops;
    for (const ChainStep& step : steps) loops.emplace_back(step, y.dtype());
    // Always three operands: the first input stands in for missing ones.
    const Tensor& second = inputs.size() > 1 ? inputs[1] : inputs[0];
    const Tensor& third = inputs.size() > 2 ? inputs[2] : inputs[0];
    BlockMap<T, T, T, T>::run(y, inputs[0], second, third,
                              [&](T* to, const T* a, const T* b, const T* c, std::int64_t n) {
                                  alignas(64) std::array<T, block_size>
                                      value;  // y may be one of the inputs, which steps still read
                                  std::copy_n(a, n, value.begin());
                                  for (const ChainLoop<T>& loop : loops) loop.run(value.data(), {a, b, c}, n);
                                  std::copy_n(value.begin(), n, to);
                              });
}

}  // namespace

void unary(UnaryOp op, const Tensor& x, Tensor& y) {
    visit_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if (op == UnaryOp::is_nan || op == UnaryOp::is_finite || op == UnaryOp::logical_not)
            test_elements<T>(op, x, y);
        else
            BlockMap<T, T>::run(y, x, find_unary_loop<T>(op, x.dtype()));
    });
}

void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y) {
    visit_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const OperandTensor<T> left(a), right(b);
        if constexpr (std::is_integral_v<T>)
            if (y.count() > 0) check_integer_operand(op, right.tensor());
        BlockMap<T, T, T>::run(y, left.stretched(y.shape()), right.stretched(y.shape()),
                               find_binary_loop<T>(op));
    });
}

void compare(CompareOp op, const Tensor& a, const Operand& b, Tensor& y) {
    visit_compute(a.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const OperandTensor<T> right(b);
        BlockMap<bool, T, T>::run(y, a, right.stretched(y.shape()), find_compare_loop<T>(op));
    });
}

void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) {
    visit_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        BlockMap<T, bool, T, T>::run(
            y, condition, a, b, [](T* to, const bool* choice, const T* yes, const T* no, std::int64_t n) {
                // As bytes, and with both sides always read: otherwise the compiler does not vectorise the loop.
                const auto* chosen = reinterpret_cast<const unsigned char*>(choice);
#pragma omp simd
                for (std::int64_t i = 0; i < n; ++i) {
                    const T one = yes[i];
                    const T other = no[i];
                    to[i] = chosen[i] != 0 ? one : other;
                }
            });
    });
}

void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) {
    visit_floating_compute(y.dtype(), [&](auto zero) { run_chain<decltype(zero)>(inputs, steps, y); });
}

void add_scaled(const Tensor& x, double scale, Tensor& y) {
    visit_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_integral_v<T>) {
            const std::int64_t factor = Scalar(scale).to_int64();
            if (static_cast<double>(factor) != scale) throw no_integer_scale(scale, y.dtype());
            BlockMap<T, T, T>::run(y, y, x, [factor](T* to, const T* sum, const T* add, std::int64_t n) {
#pragma omp simd
                for (std::int64_t i = 0; i < n; ++i)
                    to[i] = integer(bits(sum[i]) + bits(factor) * bits(add[i]));
            });
        } else {
            const T factor = static_cast<T>(scale);
            BlockMap<T, T, T>::run(y, y, x, [factor](T* to, const T* sum, const T* add, std::int64_t n) {
#pragma omp simd
                for (std::int64_t i = 0; i < n; ++i) to[i] = sum[i] + factor * add[i];
            });
        }
    });
}

}  // namespace potluck::cpu
