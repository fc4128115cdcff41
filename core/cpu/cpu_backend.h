#pragma once

#include <atomic>
#include <utility>

#include "core/backend.h"
#include "core/cpu/copy.h"
#include "core/cpu/elementwise.h"
#include "core/cpu/parallel.h"

namespace potluck {

// Each is defined in the file of its family, core/cpu/<family>.cpp, which does not know the contract: a new kernel in it
// compiles no other one anew.
namespace cpu {
void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx);
void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y);
void compare(CompareOp op, const Tensor& a, const Operand& b, Tensor& y);
void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y);
void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y);
void add_scaled(const Tensor& x, double scale, Tensor& y);
void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y);
void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y);
void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate);
void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y);
void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before, Tensor& y);
void softmax(const Tensor& x, bool logarithm, Tensor& y);
void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx);
void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                   Tensor& losses, Tensor& logsumexp);
void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                            const Tensor& dlosses, const CrossEntropySpec& options, Tensor& dlogits);
void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& mean,
                Tensor& rstd);
void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                         Tensor& dweight_or_none, Tensor& dbias_or_none);
void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none, double epsilon,
              Tensor& sum_or_none, Tensor& y, Tensor& rrms);
void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms, const Tensor& dy,
                       bool accumulate, Tensor& dx_or_none, Tensor& dweight_or_none);
void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance, Tensor& rstd);
void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none, const Tensor& mean,
                const Tensor& rstd, Tensor& y);
void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dy, bool batch_statistics, Tensor& dx_or_none,
                         Tensor& dweight_or_none, Tensor& dbias_or_none);
void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                 const ConvolutionSpec& options, Tensor& y);
void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                          const ConvolutionSpec& options, Tensor& dx_or_none, Tensor& dweight_or_none,
                          Tensor& dbias_or_none);
void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices);
void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec& options, Tensor& dx);
void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y);
void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx);
void embedding(const Tensor& weight, const Tensor& ids, Tensor& y);
void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight);
void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y);
void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y);
void tril(const Tensor& x, std::int64_t diagonal, Tensor& y);
void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse, Tensor& y);
void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
               const AttentionSpec& options, Tensor& y, Tensor& logsumexp);
void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                        const Tensor& y, const Tensor& logsumexp, const Tensor& dy,
                        const AttentionSpec& options, Tensor& dq, Tensor& dk, Tensor& dv,
                        Tensor& dmask_or_none);
void uniform(RandomKey key, double low, double high, Tensor& y);
void normal(RandomKey key, double mean, double std, Tensor& y);
void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y);
void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y);
void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices);
void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y);
void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none);
void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none);
void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums);
void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude);
void decide_update(Tensor& control);
}  // namespace cpu

/// A CPU device. The contract is core/backend.h; its kernels are called by run().
class CpuBackend : public Backend {
public:
    /// `threads`: the number per kernel; 0 means one per core.
    explicit CpuBackend(int threads = 0) : threads_(threads) {}
    void set_threads(int count) { threads_.store(count, std::memory_order_relaxed); }
    int threads() const;

    void* allocate(std::int64_t bytes) override;
    void release(void* data, std::int64_t bytes) noexcept override;
    void copy_from_host(void* to, const void* from, std::int64_t bytes) override;
    void copy_to_host(void* to, const void* from, std::int64_t bytes) override;
    void* allocate_pinned(std::int64_t bytes) override;
    void release_pinned(void* data, std::int64_t bytes) noexcept override;
    std::string describe() const override;
    void copy(const Tensor& from, Tensor& to) override { run(cpu::copy, from, to); }
    void fill(Tensor& to, const Scalar& value) override { run(cpu::fill, to, value); }
    void unary(UnaryOp op, const Tensor& x, Tensor& y) override { run(cpu::unary, op, x, y); }
    void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) override {
        run(cpu::unary_backward, op, x, dy, dx);
    }
    void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y) override {
        run(cpu::binary, op, a, b, y);
    }
    void compare(CompareOp op, const Tensor& a, const Operand& b, Tensor& y) override {
        run(cpu::compare, op, a, b, y);
    }
    void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) override {
        run(cpu::where, condition, a, b, y);
    }
    void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) override {
        run(cpu::chain, inputs, steps, y);
    }
    void add_scaled(const Tensor& x, double scale, Tensor& y) override { run(cpu::add_scaled, x, scale, y); }
    void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) override {
        run(cpu::reduce, op, x, axes, y);
    }
    void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y) override {
        run(cpu::variance, x, axes, correction, root, y);
    }
    void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) override {
        run(cpu::matmul, a, b, y, accumulate);
    }
    void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) override {
        run(cpu::linear, x, weight, bias, y);
    }
    void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before,
                     Tensor& y) override {
        run(cpu::linear_gelu, x, weight, bias, before, y);
    }
    void softmax(const Tensor& x, bool logarithm, Tensor& y) override { run(cpu::softmax, x, logarithm, y); }
    void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) override {
        run(cpu::softmax_backward, y, dy, logarithm, dx);
    }
    void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                       Tensor& losses, Tensor& logsumexp) override {
        run(cpu::cross_entropy, logits, labels, options, losses, logsumexp);
    }
    void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                                const Tensor& dlosses, const CrossEntropySpec& options,
                                Tensor& dlogits) override {
        run(cpu::cross_entropy_backward, logits, labels, logsumexp, dlosses, options, dlogits);
    }
    void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                    const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& mean,
                    Tensor& rstd) override {
        run(cpu::layer_norm, x, residual_or_none, weight_or_none, bias_or_none, epsilon, sum_or_none, y, mean,
            rstd);
    }
    void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override {
        run(cpu::layer_norm_backward, x, weight_or_none, mean, rstd, dy, accumulate, dx_or_none,
            dweight_or_none, dbias_or_none);
    }
    void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                  double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms) override {
        run(cpu::rms_norm, x, residual_or_none, weight_or_none, epsilon, sum_or_none, y, rrms);
    }
    void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms,
                           const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                           Tensor& dweight_or_none) override {
        run(cpu::rms_norm_backward, x, weight_or_none, rrms, dy, accumulate, dx_or_none, dweight_or_none);
    }
    void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance,
                               Tensor& rstd) override {
        run(cpu::batch_norm_statistics, x, epsilon, mean, variance, rstd);
    }
    void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none,
                    const Tensor& mean, const Tensor& rstd, Tensor& y) override {
        run(cpu::batch_norm, x, weight_or_none, bias_or_none, mean, rstd, y);
    }
    void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool batch_statistics, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override {
        run(cpu::batch_norm_backward, x, weight_or_none, mean, rstd, dy, batch_statistics, dx_or_none,
            dweight_or_none, dbias_or_none);
    }
    void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                     const ConvolutionSpec& options, Tensor& y) override {
        run(cpu::convolution, x, weight, bias_or_none, options, y);
    }
    void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                              const ConvolutionSpec& options, Tensor& dx_or_none, Tensor& dweight_or_none,
                              Tensor& dbias_or_none) override {
        run(cpu::convolution_backward, x, weight, dy, options, dx_or_none, dweight_or_none, dbias_or_none);
    }
    void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) override {
        run(cpu::max_pool, x, options, y, indices);
    }
    void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                           Tensor& dx) override {
        run(cpu::max_pool_backward, indices, dy, options, dx);
    }
    void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y) override {
        run(cpu::average_pool, x, options, y);
    }
    void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx) override {
        run(cpu::average_pool_backward, dy, options, dx);
    }
    void embedding(const Tensor& weight, const Tensor& ids, Tensor& y) override {
        run(cpu::embedding, weight, ids, y);
    }
    void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight) override {
        run(cpu::embedding_backward, ids, dy, dweight);
    }
    void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) override {
        run(cpu::gather, x, axis, index, y);
    }
    void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) override {
        run(cpu::scatter_add, axis, index, source, y);
    }
    void tril(const Tensor& x, std::int64_t diagonal, Tensor& y) override { run(cpu::tril, x, diagonal, y); }
    void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse, Tensor& y) override {
        run(cpu::rotary, x, cosine, sine, inverse, y);
    }
    void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                   const AttentionSpec& options, Tensor& y, Tensor& logsumexp) override {
        run(cpu::attention, q, k, v, mask_or_none, options, y, logsumexp);
    }
    void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                            const Tensor& y, const Tensor& logsumexp, const Tensor& dy,
                            const AttentionSpec& options, Tensor& dq, Tensor& dk, Tensor& dv,
                            Tensor& dmask_or_none) override {
        run(cpu::attention_backward, q, k, v, mask_or_none, y, logsumexp, dy, options, dq, dk, dv,
            dmask_or_none);
    }
    void uniform(RandomKey key, double low, double high, Tensor& y) override {
        run(cpu::uniform, key, low, high, y);
    }
    void normal(RandomKey key, double mean, double std, Tensor& y) override {
        run(cpu::normal, key, mean, std, y);
    }
    void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) override {
        run(cpu::random_integers, key, low, high, y);
    }
    void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y) override {
        run(cpu::dropout, key, part, p, x, y);
    }
    void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices) override {
        run(cpu::topk, x, k, largest, values, indices);
    }
    void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y) override {
        run(cpu::multinomial, key, weights, replacement, y);
    }
    void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors,
               const Tensor& control_or_none) override {
        run(cpu::adamw, step, tensors, control_or_none);
    }
    void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) override {
        run(cpu::sgd, step, tensors, control_or_none);
    }
    void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) override {
        run(cpu::sum_of_squares, tensors, sums);
    }
    void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) override {
        run(cpu::largest_magnitude, tensors, magnitude);
    }
    void decide_update(Tensor& control) override { run(cpu::decide_update, control); }

private:
    /// Every kernel begins here: one team, with as many threads as this device has, stands from its first to its last
    /// moment, also while it calls others.
    template <class... Parameters, class... Arguments>
    void run(void (*kernel)(Parameters...), Arguments&&... arguments) const {
        const cpu::Team team(threads());
        kernel(std::forward<Arguments>(arguments)...);
    }

    std::atomic<int> threads_;
};

}  // namespace potluck
