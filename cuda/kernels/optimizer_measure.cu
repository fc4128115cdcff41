// What is asked of the gradients of an update: norms over many tensors in one launch (see tensor_list.h), and the decision
// that follows from them.

#include <cmath>
#include <vector>

#include "core/update_rule.h"
#include "cuda/kernels/block_reduce.h"
#include "cuda/kernels/tensor_list.h"

namespace potluck::cuda {
namespace {

using namespace tensor_list;

/// Squares of floats are summed in f64 as they are; those of doubles in the three parts of SquareSums.
struct SumOfSquares {
    using Result = SquareSums;
    __device__ static SquareSums with(const SquareSums& sums, float value) {
        const auto wide = static_cast<double>(value);
        return {sums.middle + wide * wide, sums.large, sums.small};
    }
    __device__ static SquareSums with(const SquareSums& sums, double value) {
        return with_square_of(sums, value);
    }
    __device__ static SquareSums join(const SquareSums& a, const SquareSums& b) { return a + b; }
    __device__ static SquareSums of_block(const SquareSums& own, double* scratch) {
        return {block_sum(own.middle, scratch), block_sum(own.large, scratch), block_sum(own.small, scratch)};
    }
};
/// NaN wins.
struct LargestMagnitude {
    using Result = double;
    __device__ static double join(double a, double b) { return b <= a || a != a ? a : b; }
    template <class T>
    __device__ static double with(double largest, T value) {
        return join(largest, std::fabs(static_cast<double>(value)));
    }
    __device__ static double of_block(double own, double* scratch) {
        return block_reduce(
            own, 0.0, [](double a, double b) { return join(a, b); }, scratch);
    }
};

/// The measure of each block's chunk of the gradients. Floor: reads every element once, two operations in f64.
template <class Measure>
__global__ void __launch_bounds__(threads)
    measure_kernel(const __grid_constant__ Table table, typename Measure::Result* results) {
    __shared__ double scratch[warp_size];
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    typename Measure::Result result{};
    const auto measure = [&](auto zero) {
        using T = decltype(zero);
        for_each_pack(mine, [&](auto size, std::int64_t first) {
            T values[decltype(size)::value];
            load_any(values, entry.gradient, entry.gradient_dtype, first);
            for (const T value : values) result = Measure::with(result, value);
        });
    };
    if (entry.gradient_dtype == DType::f64)
        measure(double{});
    else
        measure(float{});
    result = Measure::of_block(result, scratch);
    if (threadIdx.x == 0) results[blockIdx.x] = result;
}

/// One block folds the results of all blocks. Floor: reads each once.
template <class Measure>
__global__ void __launch_bounds__(threads) fold_kernel(const typename Measure::Result* results,
                                                       std::int64_t count, typename Measure::Result* total) {
    __shared__ double scratch[warp_size];
    typename Measure::Result result{};
    for (auto i = static_cast<std::int64_t>(threadIdx.x); i < count; i += threads)
        result = Measure::join(result, results[i]);
    result = Measure::of_block(result, scratch);
    if (threadIdx.x == 0) *total = result;
}

// ---- the decision about an update ----

/// Decides an update (see core/update_rule.h). Floor: reads the slots where kernels reported bad elements.
__global__ void __launch_bounds__(threads)
    decide_update_kernel(UpdateNumbers* update, const FaultRanges faults) {
    __shared__ int scratch[warp_size];
    int reported = 0;
    for (int range = 0; range < faults.count; ++range)
        for (int i = static_cast<int>(threadIdx.x); i < faults.ranges[range].count; i += threads)
            reported |= faults.ranges[range].slots[i] != no_fault ? 1 : 0;
    reported = block_reduce(
        reported, 0, [](int a, int b) { return a | b; }, scratch);
    if (threadIdx.x != 0) return;
    UpdateNumbers numbers = *update;
    decide_update(numbers, reported != 0, [](double x) { return std::sqrt(x); });
    *update = numbers;
}

template <class Measure>
void measure(KernelDevice& backend, std::span<const Tensor> tensors, Tensor& total) {
    using Result = typename Measure::Result;
    const cudaStream_t stream = backend.stream();
    std::vector<Tensor> copies;  // of those that are not contiguous
    std::vector<Entry> entries;
    for (const Tensor& x : tensors) {
        if (!x.is_contiguous() && x.count() > 0) {
            copies.push_back(Tensor::empty(x.shape(), {x.dtype(), x.device()}));
            backend.copy(x, copies.back());
            entries.push_back(entry_of({.parameter = {}, .gradient = copies.back()}));
        } else {
            entries.push_back(entry_of({.parameter = {}, .gradient = x}));
        }
    }
    const std::vector<Table> tables = tables_of(entries);
    std::int64_t blocks = 0;
    for (const Table& table : tables) blocks += table.blocks;
    const Tensor results = Tensor::empty(
        {blocks * static_cast<std::int64_t>(sizeof(Result) / sizeof(double))}, {DType::f64, total.device()});
    auto* place = static_cast<Result*>(results.raw_data());
    for (const Table& table : tables) {
        launch(&measure_kernel<Measure>, static_cast<unsigned>(table.blocks), threads, 0, stream, table,
               place);
        place += table.blocks;
    }
    launch(&fold_kernel<Measure>, 1, threads, 0, stream, static_cast<const Result*>(results.raw_data()),
           blocks, reinterpret_cast<Result*>(elements_of<double>(total)));
}

}  // namespace

void sum_of_squares(KernelDevice& device, std::span<const Tensor> tensors, Tensor& sums) {
    measure<SumOfSquares>(device, tensors, sums);
}

void largest_magnitude(KernelDevice& device, std::span<const Tensor> tensors, Tensor& magnitude) {
    measure<LargestMagnitude>(device, tensors, magnitude);
}

void decide_update(KernelDevice& device, Tensor& control) {
    launch(&decide_update_kernel, 1, threads, 0, device.stream(), numbers_of(control), device.fault_ranges());
}

}  // namespace potluck::cuda
