#pragma once

// Internal: one CUDA device. The contract is core/backend.h; each family of kernels is in its own file,
// cuda/kernels/<family>.cu, and families that call a library are in cuda/<family>.cpp.

#include <cublasLt.h>
#include <cudnn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "core/backend.h"
#include "core/memory_limit.h"
#include "core/moment.h"
#include "cuda/device_options.h"
#include "cuda/faults.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/reduce.h"
#include "cuda/runtime.h"

namespace potluck {

// Each is defined in cuda/kernels/<family>.cu, which does not include the contract: a new kernel there recompiles no
// other family.
namespace cuda {
void copy(KernelDevice& device, const Tensor& from, Tensor& to);
void fill(KernelDevice& device, Tensor& to, const Scalar& value);
void unary(KernelDevice& device, UnaryOp op, const Tensor& x, Tensor& y);
void unary_backward(KernelDevice& device, UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx);
void binary(KernelDevice& device, BinaryOp op, const Operand& a, const Operand& b, Tensor& y);
void compare(KernelDevice& device, CompareOp op, const Tensor& a, const Operand& b, Tensor& y);
void where(KernelDevice& device, const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y);
void chain(KernelDevice& device, std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y);
void add_scaled(KernelDevice& device, const Tensor& x, double scale, Tensor& y);
void softmax(KernelDevice& device, const Tensor& x, bool logarithm, Tensor& y);
void softmax_backward(KernelDevice& device, const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx);
void cross_entropy(KernelDevice& device, const Tensor& logits, const Tensor& labels,
                   const CrossEntropySpec& options, Tensor& losses, Tensor& logsumexp);
void cross_entropy_backward(KernelDevice& device, const Tensor& logits, const Tensor& labels,
                            const Tensor& logsumexp, const Tensor& dlosses, const CrossEntropySpec& options,
                            Tensor& dlogits);
void layer_norm(KernelDevice& device, const Tensor& x, const Tensor& residual_or_none,
                const Tensor& weight_or_none, const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none,
                Tensor& y, Tensor& mean, Tensor& rstd);
void layer_norm_backward(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                         const Tensor& mean, const Tensor& rstd, const Tensor& dy, bool accumulate,
                         Tensor& dx_or_none, Tensor& dweight_or_none, Tensor& dbias_or_none);
void rms_norm(KernelDevice& device, const Tensor& x, const Tensor& residual_or_none,
              const Tensor& weight_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms);
void rms_norm_backward(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                       const Tensor& rrms, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                       Tensor& dweight_or_none);
void batch_norm_statistics(KernelDevice& device, const Tensor& x, double epsilon, Tensor& mean,
                           Tensor& variance, Tensor& rstd);
void batch_norm(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                const Tensor& bias_or_none, const Tensor& mean, const Tensor& rstd, Tensor& y);
void batch_norm_backward(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                         const Tensor& mean, const Tensor& rstd, const Tensor& dy, bool batch_statistics,
                         Tensor& dx_or_none, Tensor& dweight_or_none, Tensor& dbias_or_none);
void max_pool(KernelDevice& device, const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices);
void max_pool_backward(KernelDevice& device, const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                       Tensor& dx);
void average_pool(KernelDevice& device, const Tensor& x, const PoolSpec& options, Tensor& y);
void average_pool_backward(KernelDevice& device, const Tensor& dy, const PoolSpec& options, Tensor& dx);
void embedding(KernelDevice& device, const Tensor& weight, const Tensor& ids, Tensor& y);
void embedding_backward(KernelDevice& device, const Tensor& ids, const Tensor& dy, Tensor& dweight);
void gather(KernelDevice& device, const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y);
void scatter_add(KernelDevice& device, std::int64_t axis, const Tensor& index, const Tensor& source,
                 Tensor& y);
void tril(KernelDevice& device, const Tensor& x, std::int64_t diagonal, Tensor& y);
void rotary(KernelDevice& device, const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse,
            Tensor& y);
void uniform(KernelDevice& device, RandomKey key, double low, double high, Tensor& y);
void normal(KernelDevice& device, RandomKey key, double mean, double std, Tensor& y);
void random_integers(KernelDevice& device, RandomKey key, std::int64_t low, std::int64_t high, Tensor& y);
void dropout(KernelDevice& device, RandomKey key, const RandomPart& part, double p, const Tensor& x,
             Tensor& y);
void topk(KernelDevice& device, const Tensor& x, std::int64_t k, bool largest, Tensor& values,
          Tensor& indices);
void multinomial(KernelDevice& device, RandomKey key, const Tensor& weights, bool replacement, Tensor& y);
void adamw(KernelDevice& device, const AdamWSpec& step, std::span<UpdateTensors> tensors,
           const Tensor& control_or_none);
void sgd(KernelDevice& device, const SgdSpec& step, std::span<UpdateTensors> tensors,
         const Tensor& control_or_none);
void sum_of_squares(KernelDevice& device, std::span<const Tensor> tensors, Tensor& sums);
void largest_magnitude(KernelDevice& device, std::span<const Tensor> tensors, Tensor& magnitude);
void decide_update(KernelDevice& device, Tensor& control);
}  // namespace cuda

class CudaBackend final : public Backend,
                          public HasClock,
                          public KnowsFreeMemory,
                          public cuda::KernelDevice,
                          public cuda::HasOptions {
public:
    /// Opens device `index`. Its stream, memory pool and library handles are created at their first use.
    explicit CudaBackend(int index);
    ~CudaBackend() override;

    void* allocate(std::int64_t bytes) override;
    void release(void* data, std::int64_t bytes) noexcept override;
    void release_after(void* data, std::int64_t bytes, const PendingWorks& uses) noexcept override;
    void* allocate_pinned(std::int64_t bytes) override;
    void release_pinned(void* data, std::int64_t bytes) noexcept override;
    std::shared_ptr<const PendingWork> start_copy(const Tensor& from, Tensor& to, StreamKind stream) override;
    void copy_from_host(void* to, const void* from, std::int64_t bytes) override;
    void copy_to_host(void* to, const void* from, std::int64_t bytes) override;
    bool pools_memory() const override { return true; }
    std::int64_t pooled_bytes() const override;
    void release_pool() override;
    std::int64_t free_memory() override;
    std::unique_ptr<CapturedWork> capture(std::function<void()> work) override;
    std::string describe() const override;
    void synchronize() override;
    std::unique_ptr<const Moment> mark_moment() override;
    void copy(const Tensor& from, Tensor& to) override { cuda::copy(*this, from, to); }
    void fill(Tensor& to, const Scalar& value) override { cuda::fill(*this, to, value); }
    void unary(UnaryOp op, const Tensor& x, Tensor& y) override { cuda::unary(*this, op, x, y); }
    void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) override {
        cuda::unary_backward(*this, op, x, dy, dx);
    }
    void binary(BinaryOp op, const Operand& a, const Operand& b, Tensor& y) override {
        cuda::binary(*this, op, a, b, y);
    }
    void compare(CompareOp op, const Tensor& a, const Operand& b, Tensor& y) override {
        cuda::compare(*this, op, a, b, y);
    }
    void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) override {
        cuda::where(*this, condition, a, b, y);
    }
    void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) override {
        cuda::chain(*this, inputs, steps, y);
    }
    void add_scaled(const Tensor& x, double scale, Tensor& y) override {
        cuda::add_scaled(*this, x, scale, y);
    }
    void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) override {
        cuda::reduce(*this, op, x, axes, y);
    }
    void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y) override {
        cuda::variance(*this, x, axes, correction, root, y);
    }
    void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) override;
    void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) override;
    void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before,
                     Tensor& y) override;
    void softmax(const Tensor& x, bool logarithm, Tensor& y) override {
        cuda::softmax(*this, x, logarithm, y);
    }
    void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) override {
        cuda::softmax_backward(*this, y, dy, logarithm, dx);
    }
    void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                       Tensor& losses, Tensor& logsumexp) override {
        cuda::cross_entropy(*this, logits, labels, options, losses, logsumexp);
    }
    void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                                const Tensor& dlosses, const CrossEntropySpec& options,
                                Tensor& dlogits) override {
        cuda::cross_entropy_backward(*this, logits, labels, logsumexp, dlosses, options, dlogits);
    }
    void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                    const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& mean,
                    Tensor& rstd) override {
        cuda::layer_norm(*this, x, residual_or_none, weight_or_none, bias_or_none, epsilon, sum_or_none, y,
                         mean, rstd);
    }
    void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override {
        cuda::layer_norm_backward(*this, x, weight_or_none, mean, rstd, dy, accumulate, dx_or_none,
                                  dweight_or_none, dbias_or_none);
    }
    void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                  double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms) override {
        cuda::rms_norm(*this, x, residual_or_none, weight_or_none, epsilon, sum_or_none, y, rrms);
    }
    void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms,
                           const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                           Tensor& dweight_or_none) override {
        cuda::rms_norm_backward(*this, x, weight_or_none, rrms, dy, accumulate, dx_or_none, dweight_or_none);
    }
    void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance,
                               Tensor& rstd) override {
        cuda::batch_norm_statistics(*this, x, epsilon, mean, variance, rstd);
    }
    void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none,
                    const Tensor& mean, const Tensor& rstd, Tensor& y) override {
        cuda::batch_norm(*this, x, weight_or_none, bias_or_none, mean, rstd, y);
    }
    void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                             const Tensor& rstd, const Tensor& dy, bool batch_statistics, Tensor& dx_or_none,
                             Tensor& dweight_or_none, Tensor& dbias_or_none) override {
        cuda::batch_norm_backward(*this, x, weight_or_none, mean, rstd, dy, batch_statistics, dx_or_none,
                                  dweight_or_none, dbias_or_none);
    }
    void convolution(const Tensor& x, const Tensor& weight, const Tensor& bias_or_none,
                     const ConvolutionSpec& options, Tensor& y) override;
    void convolution_backward(const Tensor& x, const Tensor& weight, const Tensor& dy,
                              const ConvolutionSpec& options, Tensor& dx_or_none, Tensor& dweight_or_none,
                              Tensor& dbias_or_none) override;
    void max_pool(const Tensor& x, const PoolSpec& options, Tensor& y, Tensor& indices) override {
        cuda::max_pool(*this, x, options, y, indices);
    }
    void max_pool_backward(const Tensor& indices, const Tensor& dy, const PoolSpec& options,
                           Tensor& dx) override {
        cuda::max_pool_backward(*this, indices, dy, options, dx);
    }
    void average_pool(const Tensor& x, const PoolSpec& options, Tensor& y) override {
        cuda::average_pool(*this, x, options, y);
    }
    void average_pool_backward(const Tensor& dy, const PoolSpec& options, Tensor& dx) override {
        cuda::average_pool_backward(*this, dy, options, dx);
    }
    void embedding(const Tensor& weight, const Tensor& ids, Tensor& y) override {
        cuda::embedding(*this, weight, ids, y);
    }
    void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dweight) override {
        cuda::embedding_backward(*this, ids, dy, dweight);
    }
    void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) override {
        cuda::gather(*this, x, axis, index, y);
    }
    void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) override {
        cuda::scatter_add(*this, axis, index, source, y);
    }
    void tril(const Tensor& x, std::int64_t diagonal, Tensor& y) override {
        cuda::tril(*this, x, diagonal, y);
    }
    void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse, Tensor& y) override {
        cuda::rotary(*this, x, cosine, sine, inverse, y);
    }
    void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                   const AttentionSpec& options, Tensor& y, Tensor& logsumexp) override;
    void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_or_none,
                            const Tensor& y, const Tensor& logsumexp, const Tensor& dy,
                            const AttentionSpec& options, Tensor& dq, Tensor& dk, Tensor& dv,
                            Tensor& dmask_or_none) override;
    void uniform(RandomKey key, double low, double high, Tensor& y) override {
        cuda::uniform(*this, key, low, high, y);
    }
    void normal(RandomKey key, double mean, double std, Tensor& y) override {
        cuda::normal(*this, key, mean, std, y);
    }
    void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) override {
        cuda::random_integers(*this, key, low, high, y);
    }
    void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y) override {
        cuda::dropout(*this, key, part, p, x, y);
    }
    void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices) override {
        cuda::topk(*this, x, k, largest, values, indices);
    }
    void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y) override {
        cuda::multinomial(*this, key, weights, replacement, y);
    }
    void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors,
               const Tensor& control_or_none) override {
        cuda::adamw(*this, step, tensors, control_or_none);
    }
    void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) override {
        cuda::sgd(*this, step, tensors, control_or_none);
    }
    void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) override {
        cuda::sum_of_squares(*this, tensors, sums);
    }
    void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) override {
        cuda::largest_magnitude(*this, tensors, magnitude);
    }
    void decide_update(Tensor& control) override { cuda::decide_update(*this, control); }

    // ---- for the kernel families, see cuda/kernel_device.h ----

    cudaStream_t stream() override;
    /// The stream of a kind, never one that records. Also makes the device the current one.
    cudaStream_t stream(StreamKind kind);
    /// Whether copies in this device's streams can access the memory of `other`; enables peer access if possible.
    bool reaches(CudaBackend& other);
    bool is_recording() const override { return is_capturing(); }
    bool is_capturing() const override { return recording_thread_.load() == std::this_thread::get_id(); }
    const std::uint64_t* random_advance(const RandomKey& key) override;
    int index() const override { return index_; }
    int multiprocessors() const override { return multiprocessors_; }
    unsigned long long* fault_slot(cuda::FaultReporter report) override;
    cuda::FaultRanges fault_ranges() override;

    // ---- for the families that call a library ----

    /// This thread's library handle, not bound to a stream (cuBLASLt takes the stream with each call).
    cublasLtHandle_t cublas();
    /// This thread's library handle, bound to stream().
    cudnnHandle_t cudnn();

    struct Resources;
    class Recording;
    struct RecordedFaults;

private:
    class Graph;
    class ThreadFaults;

    /// Makes `queue` wait for the work that is in the compute stream now.
    void follow_compute(cudaStream_t queue);
    std::shared_ptr<const PendingWork> mark(cudaStream_t queue);
    /// Copies from this device to `target` through pinned memory, in pieces, without blocking the host.
    std::shared_ptr<const PendingWork> copy_by_host(CudaBackend& target, const Tensor& from, Tensor& to,
                                                    StreamKind kind);

    Resources& resources();
    ThreadFaults& thread_faults();
    /// Starts to copy what this thread's ops reported, for a check after the host has waited; false: nothing to copy.
    bool start_fault_check();
    void finish_fault_check();  // throws the Error of the first bad element
    /// Announces a replay that may report into these slots.
    void expect_faults(const std::shared_ptr<RecordedFaults>& faults);
    /// Copies to the host through page-locked buffers; waits.
    void copy_through_staging(void* to, const void* from, std::int64_t bytes, cudaStream_t queue);
    /// Allocates memory for the work that is being recorded.
    void* allocate_recorded(std::int64_t bytes);
    /// Takes the block over if it belongs to recorded work, or if the work being recorded may use it. Returns whether
    /// it did.
    bool release_recorded(void* data) noexcept;
    /// This thread begins or ends to record work on this device; meanwhile it may use no other device.
    void note_recording(bool begins);

    int index_;
    int multiprocessors_ = 0;
    std::once_flag opened_;
    std::unique_ptr<Resources> resources_;
    std::mutex capture_mutex_;              // one thread captures at a time
    std::shared_ptr<Recording> recording_;  // while work is being captured, by this thread:
    std::atomic<std::thread::id> recording_thread_;
    std::mutex recorded_mutex_;
    // Blocks that tensors hold and recorded work owns: a recording lives as long as any of its blocks is in use.
    std::unordered_map<void*, std::shared_ptr<Recording>> recorded_blocks_;
    std::shared_ptr<RecordedFaults> recorded_faults_;  // while work is being captured
};

}  // namespace potluck
