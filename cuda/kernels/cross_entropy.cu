// Cross-entropy from logits, without storing probabilities. A row of up to 1024 classes is processed by a warp, a
// longer one by a block. Forward reads the row once: each thread accumulates its packs in (largest, sum of
// exponentials), these are combined across threads, and the first thread writes loss and logsumexp. Backward needs no
// sum: logsumexp gives each probability from its logit alone, so the gradient may overwrite the logit.

#include <cmath>
#include <limits>

#include "core/kernel_errors.h"
#include "cuda/kernels/rows.h"

namespace potluck::cuda {
namespace {

/// A vector with any stride: one number per row.
template <class T>
struct RowVector {
    T* data;
    std::int64_t stride;

    __device__ T& operator[](std::int64_t row) const { return data[row * stride]; }
};
template <class T>
RowVector<T> row_vector(const Tensor& x) {
    return {elements_of<T>(x), x.strides()[0]};
}

/// The targets of the rows.
struct Targets {
    RowVector<const std::int64_t> labels;
    std::int64_t rows, classes;
    std::int64_t ignore_index;
    double smoothing;
};
Targets targets_of(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options) {
    return {row_vector<const std::int64_t>(labels), logits.size(0), logits.size(1), options.ignore_index,
            options.label_smoothing};
}

// Floor: reads each logit once (sizeof(T) bytes), one exponential a logit.
template <class T>
__global__ void __launch_bounds__(most_row_threads)
    cross_entropy_kernel(const T* logits, std::int64_t stride, Targets targets, compute_type<T>* losses,
                         compute_type<T>* logsumexp, unsigned long long* fault_slot) {
    using Computed = compute_type<T>;
    constexpr Computed infinity = std::numeric_limits<Computed>::infinity();
    for (std::int64_t row = first_row(); row < targets.rows; row += row_step()) {
        const std::int64_t label = targets.labels[row];
        const bool is_class = label >= 0 && label < targets.classes;
        if (label == targets.ignore_index || !is_class) {
            if (threadIdx.x == 0) {
                if (label != targets.ignore_index)
                    atomicMin(fault_slot, static_cast<unsigned long long>(row));
                losses[row] = 0;
                logsumexp[row] = 0;
            }
            continue;
        }
        const T* from = logits + row * stride;
        auto total = ExponentialSum<Computed>::start();
        double sum_of_logits = 0;
        visit_row(from, targets.classes, [&](std::int64_t, const auto& pack) {
            total.add(pack);
            if (targets.smoothing != 0)
                for (int i = 0; i < pack.size; ++i)
                    sum_of_logits += static_cast<double>(to_compute(pack.values[i]));
        });
        total = join_row(total, [](auto& state, const auto& other) { state.join(other); });
        if (targets.smoothing != 0) sum_of_logits = row_sum(sum_of_logits);
        if (threadIdx.x != 0) continue;
        if (total.sum == 0) {  // -inf only: every class is impossible
            losses[row] = infinity;
            logsumexp[row] = -infinity;
            continue;
        }
        const auto shift = static_cast<double>(total.shift());
        const double logarithm_of_sum = std::log(total.sum);
        double distance = (1 - targets.smoothing) * (shift - static_cast<double>(to_compute(from[label])));
        if (targets.smoothing != 0)
            distance += targets.smoothing * (shift - sum_of_logits / static_cast<double>(targets.classes));
        losses[row] = static_cast<Computed>(logarithm_of_sum + distance);
        logsumexp[row] = static_cast<Computed>(shift + logarithm_of_sum);
    }
}

// dlogits = dloss (softmax(logits) - target), where target is the one-hot label after smoothing. Forward has reported
// labels that are not a class; here they match no column.
// Floor: reads each logit and writes its gradient once (2 sizeof(T) bytes), one exponential a logit.
template <class T>
__global__ void __launch_bounds__(most_row_threads)
    cross_entropy_backward_kernel(const T* logits, std::int64_t stride, Targets targets,
                                  RowVector<const compute_type<T>> logsumexp,
                                  RowVector<const compute_type<T>> dlosses, T* dlogits) {
    using Computed = compute_type<T>;
    const auto uniform = static_cast<Computed>(targets.smoothing / static_cast<double>(targets.classes));
    const auto certain = static_cast<Computed>(1 - targets.smoothing);
    for (std::int64_t row = first_row(); row < targets.rows; row += row_step()) {
        const std::int64_t label = targets.labels[row];
        const bool is_ignored = label == targets.ignore_index;
        const Computed dloss = dlosses[row];
        const Computed shift =
            logsumexp[row] == -std::numeric_limits<Computed>::infinity() ? 0 : logsumexp[row];
        T* to = dlogits + row * targets.classes;
        visit_row(logits + row * stride, targets.classes, [&](std::int64_t column, const auto& pack) {
            auto result = pack;
            for (int i = 0; i < pack.size; ++i) {
                Computed gradient = dloss * (std::exp(to_compute(pack.values[i]) - shift) - uniform);
                if (column + i == label) gradient -= certain * dloss;
                result.values[i] = from_compute<T>(is_ignored ? Computed{0} : gradient);
            }
            store_pack(to + column, result);
        });
    }
}

}  // namespace

void cross_entropy(KernelDevice& device, const Tensor& logits, const Tensor& labels,
                   const CrossEntropySpec& options, Tensor& losses, Tensor& logsumexp) {
    if (losses.count() == 0) return;
    const cudaStream_t on = device.stream();
    const DenseRows rows = dense_rows(device, logits);
    const dim3 block = row_block(rows.width);
    FaultReporter report = [labels, classes = rows.width, ignored = options.ignore_index](std::int64_t row) {
        const Tensor label = labels.alias({}, {}, labels.offset() + row * labels.strides()[0]);
        const auto value = label.item<std::int64_t>();
        if (value != ignored && (value < 0 || value >= classes))
            throw bad_label(value, row, classes, ignored);
    };
    visit_device_floating(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        launch(cross_entropy_kernel<T>, blocks_for(rows.count, block.y), block, 0, on,
               elements_of<T>(rows.tensor), rows.stride, targets_of(logits, labels, options),
               elements_of<Computed>(losses), elements_of<Computed>(logsumexp),
               device.fault_slot(std::move(report)));
    });
}

void cross_entropy_backward(KernelDevice& device, const Tensor& logits, const Tensor& labels,
                            const Tensor& logsumexp, const Tensor& dlosses, const CrossEntropySpec& options,
                            Tensor& dlogits) {
    if (dlogits.count() == 0) return;
    const cudaStream_t on = device.stream();
    const DenseRows rows = dense_rows(device, logits);
    const dim3 block = row_block(rows.width);
    visit_device_floating(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        launch(cross_entropy_backward_kernel<T>, blocks_for(rows.count, block.y), block, 0, on,
               elements_of<T>(rows.tensor), rows.stride, targets_of(logits, labels, options),
               row_vector<const Computed>(logsumexp), row_vector<const Computed>(dlosses),
               elements_of<T>(dlogits));
    });
}

}  // namespace potluck::cuda
