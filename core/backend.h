#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/capture.h"
#include "core/kernel_specs.h"
#include "core/random.h"
#include "core/random_part.h"
#include "core/stream.h"
#include "core/tensor.h"

namespace potluck {

// The kernel contract: everything that a device must implement, on one page; the options of its kernels are in
// core/kernel_specs.h. The ops in autograd/ops/ check shapes, dtypes and devices, promote and broadcast, allocate the
// outputs, and record the gradient; a kernel only computes.
//
// Unless said otherwise
//   - inputs may have any strides (0 where they were broadcast), outputs are contiguous and fully overwritten;
//   - floating kernels take f64 f32 f16 bf16, and the half types compute and accumulate in f32;
//   - parameter gradients (y of matmul, dweight, dbias, and sums) may be f32 although the inputs have a half type; they
//     are then not rounded to the half type;
//   - any size may be 0; indices are i64;
//   - results do not depend on the number of threads;
//   - a Tensor named `..._or_none` may be undefined.

class Backend {
public:
    virtual ~Backend() = default;

    // ---- memory (called by core/memory.cpp only, which keeps the statistics) ----
    virtual void* allocate(std::int64_t bytes) = 0;  // nullptr when there is none left
    virtual void release(void* data, std::int64_t bytes) noexcept = 0;
    /// Like release(), for memory that copies may still read or write: it is reused only after they have ended. By
    /// default the host waits for them.
    virtual void release_after(void* data, std::int64_t bytes, const PendingWorks& uses) noexcept;
    /// Host memory that start_copy() can transfer without the host's help (ordinary memory by default).
    virtual void* allocate_pinned(std::int64_t bytes);
    virtual void release_pinned(void* data, std::int64_t bytes) noexcept;
    virtual void copy_from_host(void* to, const void* from, std::int64_t bytes) = 0;
    virtual void copy_to_host(void* to, const void* from, std::int64_t bytes) = 0;
    /// Starts a copy in stream `stream`, after the work already in the compute streams of both devices. Both tensors are
    /// contiguous and of equally many bytes; one is on this device. nullptr when the copy is already done (the default).
    virtual std::shared_ptr<const PendingWork> start_copy(const Tensor& from, Tensor& to, StreamKind stream);
    /// Whether the device pools released memory itself, so that core/memory_book.h need not cache it.
    virtual bool pools_memory() const { return false; }
    virtual std::int64_t pooled_bytes() const { return 0; }  // held by that pool but not in use
    virtual void release_pool() {}                           // returns it to the system
    /// Records what `work` starts (see core/capture.h). By default each replay runs `work` again.
    virtual std::unique_ptr<CapturedWork> capture(std::function<void()> work);
    /// Whether the work that this thread starts is recorded instead of executed.
    virtual bool is_recording() const { return false; }
    /// A one-line description of the device: name, memory, versions.
    virtual std::string describe() const = 0;
    /// Waits until all started work has ended; throws the Error of what failed.
    virtual void synchronize() {}

    // ---- copy ----
    /// Same shape, any strides on both sides, any two dtypes (floating to integer cuts towards zero, to bool is != 0).
    virtual void copy(const Tensor& from, Tensor& to) = 0;
    virtual void fill(Tensor& to, const Scalar& value) = 0;  // any strides

    // ---- elementwise: all operands have the shape of y; y may have any strides and may be one of the operands ----
    virtual void unary(UnaryOp op, const Tensor& x, Tensor& y) = 0;  // same dtype, or bool
    virtual void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy,
                                Tensor& dx) = 0;  // relu gelu gelu_tanh silu
    /// One dtype; a or b may be a number. Floating results are rounded once. Integers wrap around; divide and
    /// floor_divide of integers round down; a divisor of 0 or a negative exponent is an Error.
    virtual void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y) = 0;
    virtual void compare(CompareOp op, const Tensor& a, const Operand& b,
                         Tensor& y) = 0;  // one dtype -> bool
    virtual void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) = 0;
    /// y = inputs[0] after all steps, in one pass; half types are rounded once, at the end. All of one floating dtype.
    virtual void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) = 0;
    /// y += scale * x, x of any floating dtype.
    virtual void add_scaled(const Tensor& x, double scale, Tensor& y) = 0;

    // ---- reduce: the last `axes` axes of x are reduced; y has the shape of the others ----
    /// sum and mean of integers and bool give i64 and f32; the sum of a half type gives that type or f32; argmax and
    /// argmin give i64 and choose the first of equal elements; NaN wins.
    /// norm (floating): the square root of the sum of squares, correct even where the squares overflow or underflow the
    /// dtype.
    virtual void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) = 0;
    /// Two-pass. `correction` 1 gives the unbiased estimate; `root` gives the standard deviation, as accurate as norm.
    virtual void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y) = 0;

    // ---- matmul ----
    /// a (batch..., m, k), b (batch..., k, n), y (batch..., m, n) contiguous; accumulate means y +=. Any dtype but
    /// bool; y has the dtype of a and b, or f32 where that is a half type.
    virtual void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) = 0;
    /// y (rows, out) contiguous = x (rows, in) weight (out, in)^T + bias (out); the sum is rounded once.
    virtual void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) = 0;
    /// `before` is y of linear() (floating dtype only), and y (rows, out) = gelu_tanh(before).
    virtual void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before,
                             Tensor& y) = 0;

    // ---- softmax along the last axis; logarithm: log_softmax ----
    virtual void softmax(const Tensor& x, bool logarithm, Tensor& y) = 0;
    virtual void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) = 0;

    // ---- cross_entropy: logits (rows, classes), labels (rows) i64; losses, logsumexp (rows) f32 (f64 for f64) ----
    /// Throws Error that names row and value of a label that is neither a class nor ignore_index.
    virtual void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                               Tensor& losses, Tensor& logsumexp) = 0;
    /// dlosses (rows) has the shape of losses and any strides; dlogits (rows, classes) may share the memory of logits.
    virtual void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                                        const Tensor& dlosses, const CrossEntropySpec& options,
                                        Tensor& dlogits) = 0;

    // ---- norm: x (rows, width); weight, bias (width); mean, rstd (1 / standard deviation), rrms (1 / root mean square)
    //      (rows) f32 (f64 for f64) ----
    /// With a residual (shape of x), sum = x + residual is rounded and written, and then normalised instead of x.
    virtual void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                            const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y,
                            Tensor& mean, Tensor& rstd) = 0;
    /// Any of dx, dweight, dbias may be undefined and is then not computed. accumulate means dx +=.
    virtual void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                                     const Tensor& rstd, const Tensor& dy, bool accumulate,
                                     Tensor& dx_or_none, Tensor& dweight_or_none, Tensor& dbias_or_none) = 0;
    virtual void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                          double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms) = 0;
    virtual void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms,
                                   const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                                   Tensor& dweight_or_none) = 0;

    // ---- batch_norm: x (batch, channels, positions); weight, bias, mean, rstd (channels), the last two f32 (f64
    //      for f64) ----
    /// Statistics of each channel over batch and positions, two-pass or Welford; the variance is the biased one.
    virtual void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance,
                                       Tensor& rstd) = 0;
    /// y = (x - mean) * rstd * weight + bias, with the statistics of this batch or with running statistics.
    virtual void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none,
                            const Tensor& mean, const Tensor& rstd, Tensor& y) = 0;
    /// With `batch_statistics` the gradient also flows through the mean and the standard deviation.
    virtual void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                                     const Tensor& rstd, const Tensor& dy, bool batch_statistics,
                                     Tensor& dx_or_none, Tensor& dweight_or_none, Tensor& dbias_or_none) = 0;

    // ---- convolution: x (batch, channels, height, width), y (batch, filters, height', width'),
    //      weight (filters, channels / groups, kernel height, kernel width), bias (filters) ----
    virtual void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                             const ConvolutionSpec& options, Tensor& y) = 0;
    /// x is read only for dweight, and weight only for dx: an input that is not needed may be a tensor with the right
    /// shape and arbitrary values.
    virtual void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                                      const ConvolutionSpec& options, Tensor& dx_or_none,
                                      Tensor& dweight_or_none, Tensor& dbias_or_none) = 0;

    // ---- pooling: x (batch, channels, height, width); the size of y determines the number of windows; each window
    // contains
    //      at least one element of x ----
    /// indices (shape of y) i64: the position of the largest value in its plane (row * width + column); the first of
    /// equal values, and a NaN before any number.
    virtual void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) = 0;
    virtual void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                                   Tensor& dx) = 0;
    virtual void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y) = 0;
    virtual void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx) = 0;

    // ---- embedding: weight (rows, width), ids (count) i64; y (count, width) ----
    /// Throws Error that names position and value of an id outside 0..rows-1.
    virtual void embedding(const Tensor& weight, const Tensor& ids, Tensor& y) = 0;
    /// dweight += ..., in the order of the ids; of the dtype of dy, or f32 where that is a half type.
    virtual void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight) = 0;

    // ---- index ----
    /// y[.., i, ..] = x[.., index[.., i, ..], ..] along axis; y has the shape of index.
    virtual void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) = 0;
    /// y[.., index[.., i, ..], ..] += source[.., i, ..] along axis, in order.
    virtual void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) = 0;
    /// The lower triangle of the last two axes (column <= row + diagonal); zeros above.
    virtual void tril(const Tensor& x, std::int64_t diagonal, Tensor& y) = 0;

    // ---- rotary: x (batch, heads, time, head_size), cosine and sine (time, head_size / 2) f32 ----
    /// Rotates each pair (x[i], x[i + head_size / 2]) by the angle; in the opposite direction when inverse.
    virtual void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse,
                        Tensor& y) = 0;

    // ---- attention: q (batch, heads, queries, head_size), k (batch, kv_heads, keys, head_size),
    //      v (batch, kv_heads, keys, value_size); y (batch, heads, queries, value_size) with any strides;
    //      mask broadcast to (batch, heads, queries, keys): bool (true: visible) or floating (added to the scores);
    //      logsumexp (batch, heads, queries) f32 (f64 for f64), -inf for a row that sees no key (its y is 0). An
    //      attention
    //      weight that is masked (causal, a mask of false or -inf) or dropped contributes to no result, whatever values
    //      (even NaN) q, k, v or dy hold there ----
    virtual void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                           const AttentionSpec& options, Tensor& y, Tensor& logsumexp) = 0;
    /// dq, dk, dv have any strides and are overwritten. dmask (when defined) has the full shape.
    virtual void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& mask_or_none, const Tensor& y, const Tensor& logsumexp,
                                    const Tensor& dy, const AttentionSpec& options, Tensor& dq, Tensor& dk,
                                    Tensor& dv, Tensor& dmask_or_none) = 0;

    // ---- random: element i of y in row-major order is a function of number i of the sequence that starts at `key`
    // ----
    virtual void uniform(RandomKey key, double low, double high, Tensor& y) = 0;  // [low, high)
    virtual void normal(RandomKey key, double mean, double std, Tensor& y) = 0;   // Box-Muller
    virtual void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) = 0;
    /// Keeps an element with probability 1 - p and scales it by 1 / (1 - p); p = 1 gives zeros. `part` gives the index
    /// of each element's random number.
    virtual void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y) = 0;

    // ---- sort: x (rows, n) ----
    /// The k largest (or smallest) in order; among equals the lower index comes first; NaN counts as largest.
    virtual void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices) = 0;
    /// weights (rows, n) are not negative and need not sum to 1; y (rows, samples) i64. Random number row * samples +
    /// sample of the sequence at `key` decides a sample.
    virtual void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y) = 0;

    // ---- optimizer: many tensors in one call (on a GPU: in few launches), in place ----
    // With a control (UpdateControl::values()) the learning rate and the gradient scale are multiplied by those that
    // stand there, its steps are added to `step`, and nothing is written at all when it says skip.
    /// Both moments are there.
    virtual void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors,
                       const Tensor& control_or_none) = 0;
    /// Without a momentum there is no first moment; a second one is never looked at.
    virtual void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors,
                     const Tensor& control_or_none) = 0;
    /// Over all elements of all tensors (any strides, floating), in f64; sums (3) f64 holds a SquareSums
    /// (core/square_sums.h), whose square root is finite wherever an f64 can represent it.
    virtual void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) = 0;
    /// magnitude () f64: NaN if any element is NaN; 0 if there are no elements.
    virtual void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) = 0;
    /// control is UpdateControl::values(); the kernel applies decide() of core/update_rule.h to it.
    virtual void decide_update(Tensor& control) = 0;
};

}  // namespace potluck
