#pragma once

#include <atomic>

#include "core/backend.h"
#include "core/cpu/parallel.h"

namespace potluck {

/// A CPU device. Each family of kernels stands in its own file beside this one; the contract is core/backend.h.
class CpuBackend : public Backend {
public:
    /// Threads of its kernels; 0: one per core.
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
    void copy(const Tensor& from, Tensor& to) override;
    void fill(Tensor& to, const Scalar& value) override;
    void unary(UnaryOp op, const Tensor& x, Tensor& y) override;
    void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) override;
    void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y) override;
    void compare(CompareOp op, const Tensor& a, const Operand& b, Tensor& y) override;
    void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) override;
    void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) override;
    void add_scaled(const Tensor& x, double scale, Tensor& y) override;
    void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) override;
    void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y) override;
    void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) override;
    void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) override;
    void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before,
                     Tensor& y) override;
    void softmax(const Tensor& x, bool logarithm, Tensor& y) override;
    void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) override;
    void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                       Tensor& losses, Tensor& logsumexp) override;
    void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                                const Tensor& dlosses, const CrossEntropySpec& options,
                                Tensor& dlogits) override;
    void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                    const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& mean,
                    Tensor& rstd) override;
    void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override;
    void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                  double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms) override;
    void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms,
                           const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                           Tensor& dweight_or_none) override;
    void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance,
                               Tensor& rstd) override;
    void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none,
                    const Tensor& mean, const Tensor& rstd, Tensor& y) override;
    void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool batch_statistics, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override;
    void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                     const ConvolutionSpec& options, Tensor& y) override;
    void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                              const ConvolutionSpec& options, Tensor& dx_or_none, Tensor& dweight_or_none,
                              Tensor& dbias_or_none) override;
    void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) override;
    void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                           Tensor& dx) override;
    void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y) override;
    void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx) override;
    void embedding(const Tensor& weight, const Tensor& ids, Tensor& y) override;
    void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight) override;
    void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) override;
    void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) override;
    void tril(const Tensor& x, std::int64_t diagonal, Tensor& y) override;
    void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse, Tensor& y) override;
    void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                   const AttentionSpec& options, Tensor& y, Tensor& logsumexp) override;
    void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                            const Tensor& y, const Tensor& logsumexp, const Tensor& dy,
                            const AttentionSpec& options, Tensor& dq, Tensor& dk, Tensor& dv,
                            Tensor& dmask_or_none) override;
    void uniform(RandomKey key, double low, double high, Tensor& y) override;
    void normal(RandomKey key, double mean, double std, Tensor& y) override;
    void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) override;
    void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y) override;
    void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices) override;
    void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y) override;
    void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors,
               const Tensor& control_or_none) override;
    void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) override;
    void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) override;
    void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) override;
    void decide_update(Tensor& control) override;

private:
    std::atomic<int> threads_;
};

}  // namespace potluck
