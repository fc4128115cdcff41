#pragma once

// Internal: one CUDA device. The contract is core/backend.h; each family of kernels stands in its own file,
// cuda/kernels/<family>.cu, and the families that call a library in cuda/<family>.cpp.

#include <cublasLt.h>
#include <cudnn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "core/backend.h"
#include "cuda/device_options.h"
#include "cuda/faults.h"
#include "cuda/runtime.h"

namespace potluck {

class CudaBackend final : public Backend, public cuda::HasOptions {
public:
    /// Opens device `index`. Its stream, memory pool and library handles are made at their first use.
    explicit CudaBackend(int index);
    ~CudaBackend() override;

    void* allocate(std::int64_t bytes) override;
    void release(void* data, std::int64_t bytes) noexcept override;
    void copy_from_host(void* to, const void* from, std::int64_t bytes) override;
    void copy_to_host(void* to, const void* from, std::int64_t bytes) override;
    bool pools_memory() const override { return true; }
    std::int64_t pooled_bytes() const override;
    void release_pool() override;
    std::unique_ptr<CapturedWork> capture(std::function<void()> work) override;
    std::string describe() const override;
    void synchronize() override;
    void copy(const Tensor& from, Tensor& to) override;
    void fill(Tensor& to, const Scalar& value) override;
    void unary(UnaryOp op, const Tensor& x, Tensor& y) override;
    void unary_backward(UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) override;
    void binary(BinaryOp op, const Tensor& a, const Tensor& b, Tensor& y) override;
    void compare(CompareOp op, const Tensor& a, const Tensor& b, Tensor& y) override;
    void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) override;
    void chain(std::span<const Tensor> inputs, std::span<const ChainStep> steps, Tensor& y) override;
    void add_scaled(const Tensor& x, double scale, Tensor& y) override;
    void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) override;
    void variance(const Tensor& x, std::int64_t axes, double correction, Tensor& mean,
                  Tensor& variance) override;
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
    void adamw(const AdamWSpec& step, std::span<AdamWTensors> tensors) override;
    void sgd(const SgdSpec& step, std::span<SgdTensors> tensors) override;
    void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) override;
    void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) override;
    void decide_update(Tensor& control) override;

    // ---- for the kernel families ----

    /// Where work goes. Also makes the device the current one of this thread, so every method begins with it.
    cudaStream_t stream();
    /// Whether this thread's work is being recorded for a replay instead of done: no value can be read on the host then.
    bool is_recording() const override { return is_capturing(); }
    bool is_capturing() const { return recording_thread_.load() == std::this_thread::get_id(); }
    /// Two numbers: what a kernel adds to the offset of a key of a generator, and to the update of a key that has one. 0 but
    /// in a replay, which takes fresh numbers. Device memory; nullptr outside a capture. Throws Error for a key of an
    /// update that began inside of the capture.
    const std::uint64_t* random_advance(const RandomKey& key);
    int index() const { return index_; }
    int multiprocessors() const { return multiprocessors_; }
    /// The library handle, bound to nothing (cuBLASLt takes the stream with each call).
    cublasLtHandle_t cublas();
    /// The library handle, bound to stream().
    cudnnHandle_t cudnn();

    /// Where the kernels of an op report a bad element (an id outside the vocabulary, a divisor of 0): they put the
    /// smallest position there by atomicMin, and go on with any value in its place. Device memory. When this thread next
    /// waits for the device, or after a replay of what is being recorded, `tell` throws the Error of the position; it may
    /// read values then, and returns when what it finds is not bad any more.
    unsigned long long* fault_slot(cuda::FaultTeller tell);
    /// All slots that this thread's ops were given and that the host has not looked at (while recording: those of what
    /// is being recorded).
    cuda::FaultRanges fault_ranges();

    struct Resources;
    class Recording;
    struct RecordedFaults;

private:
    class Graph;
    class ThreadFaults;

    Resources& resources();
    ThreadFaults& thread_faults();
    /// Starts to read what this thread's ops reported, to be looked at when the host has waited; false: nothing to read.
    bool start_fault_check();
    void finish_fault_check();  // throws the Error of the first bad element
    /// A replay was started that may report into these slots.
    void expect_faults(const std::shared_ptr<RecordedFaults>& faults);
    /// To the host, through page-locked buffers; waits.
    void copy_through_staging(void* to, const void* from, std::int64_t bytes, cudaStream_t queue);
    /// Memory of the work that is being recorded.
    void* allocate_recorded(std::int64_t bytes);
    /// Takes the block when it belongs to recorded work, or when what is being recorded may use it.
    bool release_recorded(void* data) noexcept;

    int index_;
    int multiprocessors_ = 0;
    std::once_flag opened_;
    std::unique_ptr<Resources> resources_;
    std::mutex capture_mutex_;              // one thread captures at a time
    std::shared_ptr<Recording> recording_;  // while work is being captured, by this thread:
    std::atomic<std::thread::id> recording_thread_;
    std::mutex recorded_mutex_;
    // Blocks that tensors hold and that recorded work owns: it lives as long as one of them.
    std::unordered_map<void*, std::shared_ptr<Recording>> recorded_blocks_;
    std::shared_ptr<RecordedFaults> recorded_faults_;  // while work is being captured
};

}  // namespace potluck
