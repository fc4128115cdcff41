#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// `Autocast guard(DType::bf16);` lets the ops of this thread compute in a half type where that is safe, until the end of
/// the block. Parameters stay in f32, and so do their gradients:
///
///     class of op                                            under Autocast
///     products: matmul, linear, convolutions, attention      f32 operands are rounded to the half type, so is the result;
///                                                            sums are taken in f32
///     embedding                                              the rows that are looked up are rounded
///     norms: layer_norm, rms_norm, batch_norm                the dtype of x (f32 parameters do not widen it); statistics
///                                                            in f32
///     softmax, log_softmax, sum, mean, var, stddev, norm,    half operands are taken as f32, the result is f32
///     exp, log, power, square, rsqrt, reciprocal, losses
///     all others                                             as without: the dtype that the operands promote to
///
/// (The classes follow Micikevicius et al., "Mixed Precision Training", 2018.) Operands of f64 are left alone. Gradients of
/// f32 tensors are added up in f32, never rounded to the half type, as the kernels make them. backward() runs in the dtypes
/// of the forward pass, inside or outside of the block.
///
/// f16 has a small range: small gradients become 0 in it, and an Autocast(DType::f16) that records gradients without a
/// LossScaler (nn/train/loss_scaler.h) in the program warns once in each thread.
///
/// What is rounded of a parameter is kept until the end of the outermost block of that dtype (2 bytes an element), and is
/// rounded anew when the parameter has changed. (A replay of recorded work changes parameters unseen: begin a new block
/// after it.) Blocks nest: `Autocast off(DType::f32);` computes in the tensors' own dtypes.
class Autocast {
public:
    /// f16 or bf16, or f32 for none. Throws Error for another dtype.
    [[nodiscard]] explicit Autocast(DType dtype);
    ~Autocast();
    Autocast(const Autocast&) = delete;
    Autocast& operator=(const Autocast&) = delete;

    /// The half type of the innermost block of this thread; f32 outside of any.
    static DType dtype() noexcept;

private:
    friend Tensor autocast(const Tensor& x);

    /// What a view of a parameter was rounded to.
    struct Rounded {
        std::weak_ptr<Storage> source;
        std::uint64_t version;
        Tensor values;
        std::uint64_t values_version;  // of their storage: somebody may have changed them in place
    };
    using View = std::tuple<const Storage*, std::int64_t, Shape, Strides>;

    Tensor rounded(const Tensor& x);

    DType dtype_;
    Autocast* outer_;
    std::map<View, Rounded> parameters_;
    std::size_t sweep_at_ = 64;  // entries, when those of tensors that are gone are dropped
};

/// `x` rounded to the half type of the running Autocast: what products do with their operands, for a model that adds
/// tensors of f32 to what flows through it. Without one, and when x is no f32, x itself. The gradient of x is not rounded.
Tensor autocast(const Tensor& x);

namespace detail {

/// The operands of a product as it takes them under Autocast: rounded, unless one of them is f64. Undefined ones stay so.
template <class... Tensors>
auto autocast_operands(const Tensors&... operands) {
    const bool wide = ((operands.defined() && operands.dtype() == DType::f64) || ...);
    return std::tuple{wide ? operands : autocast(operands)...};
}

/// `x` for an op that is not computed in half types under Autocast: in f32 where x is of a half type, else x itself.
/// Differentiable.
Tensor autocast_wide(const Tensor& x);

/// Notes the parameters that autocast() rounds in this thread while it lives, and whether they have changed since.
class RoundedParameters {
public:
    RoundedParameters() noexcept;
    ~RoundedParameters();
    RoundedParameters(const RoundedParameters&) = delete;
    RoundedParameters& operator=(const RoundedParameters&) = delete;

    static void note(const Tensor& parameter);
    using Uses = std::vector<std::pair<std::weak_ptr<Storage>, std::uint64_t>>;  // with their versions
    Uses take() { return std::move(uses_); }

private:
    RoundedParameters* outer_;
    Uses uses_;
};

/// Gradients are being scaled while one lives, so f16 needs no warning.
class LossIsScaled {
public:
    LossIsScaled() noexcept;
    ~LossIsScaled();
    LossIsScaled(const LossIsScaled&) = delete;
    LossIsScaled& operator=(const LossIsScaled&) = delete;
};

}  // namespace detail

}  // namespace potluck
