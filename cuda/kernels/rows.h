#pragma once

// Work along rows: how the threads of a warp or a block share a row of elements, and how they combine their results.
//
// A block is blockDim.x threads wide and blockDim.y rows high. Short rows are processed by a warp each (32 threads,
// several rows per block), long rows by a whole block (blockDim.y is 1). A kernel is written once for both: its threads
// iterate over the row in steps of blockDim.x, and combine their results by join_row() or row_sum(), which distinguish
// the two cases.

#include <cmath>
#include <cstring>
#include <vector>

#include "core/copies.h"
#include "core/merged_axes.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/block_reduce.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

/// The most threads that share a row: a kernel over rows is compiled for blocks of this size.
inline constexpr int most_row_threads = 512;
/// Rows up to this width are processed by one warp.
inline constexpr std::int64_t warp_row_width = 1024;

/// The block size for rows of `width` elements; `warps`: how many rows a block processes when each has one warp.
inline dim3 row_block(std::int64_t width, unsigned warps = 4) {
    if (width <= warp_row_width) return {warp_size, warps};
    return {width <= 8 * warp_row_width ? 256U : static_cast<unsigned>(most_row_threads), 1};
}

/// The rows of this thread: `for (row = first_row(); row < rows; row += row_step())`.
__device__ inline std::int64_t first_row() {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}
__device__ inline std::int64_t row_step() { return static_cast<std::int64_t>(gridDim.x) * blockDim.y; }

// ---- rows in memory ----

/// A tensor as rows along its last axis, whose elements are adjacent in memory.
struct DenseRows {
    Tensor tensor;  // keeps a copy alive until the work that reads it has been enqueued
    std::int64_t count = 0, width = 0;
    std::int64_t stride = 0;  // from row to row, in elements
};

/// x itself if its strides allow it, else a copy. x is not empty.
inline DenseRows dense_rows(KernelDevice&, const Tensor& x) {
    DenseRows rows{x, x.count() / x.size(-1), x.size(-1), x.size(-1)};
    if (x.is_contiguous()) return rows;
    if (x.strides().back() == 1 || rows.width == 1) {
        const Tensor leading = x.alias(Shape(x.shape().begin(), x.shape().end() - 1),
                                       Strides(x.strides().begin(), x.strides().end() - 1), x.offset());
        const Tensor* operand = &leading;
        const MergedAxes merged = merge_axes(std::span(&operand, 1));
        if (merged.sizes.size() <= 1) {
            if (!merged.sizes.empty()) rows.stride = merged.strides[0][0];
            return rows;
        }
    }
    rows.tensor = potluck::detail::copy_of(x);
    return rows;
}

/// A vector (such as a weight) whose elements are adjacent; an undefined tensor stays undefined.
inline Tensor dense_vector(KernelDevice&, const Tensor& x) {
    return x.defined() ? potluck::detail::as_contiguous(x) : x;
}

/// nullptr for an undefined tensor.
template <class T>
T* elements_or_null(const Tensor& x) {
    return x.defined() ? elements_of<T>(x) : nullptr;
}

/// Loads or stores `Size` adjacent elements, by one access where the address allows it.
template <int Size, class T>
__device__ Pack<T, Size> load_pack(const T* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % sizeof(Pack<T, Size>) == 0)
        return *reinterpret_cast<const Pack<T, Size>*>(from);
    Pack<T, Size> pack;
    for (int i = 0; i < Size; ++i) pack.values[i] = from[i];
    return pack;
}
template <class T, int Size>
__device__ void store_pack(T* to, const Pack<T, Size>& pack) {
    if (reinterpret_cast<std::uintptr_t>(to) % sizeof(Pack<T, Size>) == 0) {
        *reinterpret_cast<Pack<T, Size>*>(to) = pack;
        return;
    }
    for (int i = 0; i < Size; ++i) to[i] = pack.values[i];
}

/// Calls visit(column, pack) for all elements of a row, from the threads that share it: 16 bytes at a time, and single
/// elements (packs of size 1) before the first and after the last multiple of 16.
template <class T, class Visit>
__device__ void visit_row(const T* row, std::int64_t width, Visit visit) {
    using Wide = Pack<T>;
    using Single = Pack<T, 1>;
    const auto past =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % sizeof(Wide) / sizeof(T));
    const std::int64_t misaligned = past == 0 ? 0 : Wide::size - past;
    const std::int64_t head = misaligned < width ? misaligned : width;
    const std::int64_t tail = head + (width - head) / Wide::size * Wide::size;
    for (std::int64_t i = threadIdx.x; i < head; i += blockDim.x) visit(i, Single{{row[i]}});
    for (std::int64_t i = head + static_cast<std::int64_t>(threadIdx.x) * Wide::size; i < tail;
         i += static_cast<std::int64_t>(blockDim.x) * Wide::size)
        visit(i, *reinterpret_cast<const Wide*>(row + i));
    for (std::int64_t i = tail + threadIdx.x; i < width; i += blockDim.x) visit(i, Single{{row[i]}});
}

// ---- combining the results of the threads of a row ----

/// A barrier for all threads of the row; what they wrote before is visible to the others after it.
__device__ inline void row_barrier() {
    if (blockDim.x == warp_size)
        __syncwarp();
    else
        __syncthreads();
}

/// The sum over the threads of a row; every thread gets it.
__device__ inline double row_sum(double value) {
    __shared__ double scratch[warp_size];
    return block_sum(value, scratch);
}

/// The largest of the threads' values, none of them negative; every thread gets it.
__device__ inline double row_largest(double value) {
    __shared__ double scratch[warp_size];
    return block_reduce(
        value, 0.0, [](double a, double b) { return fmax(a, b); }, scratch);
}

/// The value of another lane, for a struct whose size is a multiple of 4.
template <class State>
__device__ State from_lane(const State& state, int lane) {
    constexpr int words = sizeof(State) / sizeof(unsigned);
    static_assert(sizeof(State) % sizeof(unsigned) == 0);
    unsigned word[words];
    std::memcpy(word, &state, sizeof(State));
    for (int i = 0; i < words; ++i) word[i] = __shfl_sync(all_lanes, word[i], lane);
    State result;
    std::memcpy(&result, word, sizeof(State));
    return result;
}

/// Combines the states of the 32 lanes by join(state, other), in a fixed order; every lane gets the same bits.
template <class State, class Join>
__device__ State join_warp(State state, Join join) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        join(state, from_lane(state, lane ^ distance));
    return from_lane(state, 0);
}

/// Combines the states of the threads of a row; every thread gets the result. State needs no constructor.
template <class State, class Join>
__device__ State join_row(State state, Join join) {
    __shared__ State scratch[warp_size];
    state = join_warp(state, join);
    if (blockDim.x == warp_size) return state;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    __syncthreads();
    if (threadIdx.x % warp_size == 0) scratch[warp] = state;
    __syncthreads();
    state = scratch[0];
    for (int other = 1; other < warps; ++other) join(state, scratch[other]);
    __syncthreads();
    return state;
}

/// The sum of exp(x) over the elements seen so far, relative to the largest of them (Milakov and Gimelshein, 2018): a
/// single pass over the row suffices. NaN never becomes the largest element, but makes the sum NaN, and so does
/// +infinity.
template <class T>
struct ExponentialSum {
    T largest;
    double sum;

    __device__ static ExponentialSum start() { return {-std::numeric_limits<T>::infinity(), 0.0}; }

    /// The reference of the exponents: finite even if all elements were -infinity.
    __device__ T shift() const { return largest == -std::numeric_limits<T>::infinity() ? T{0} : largest; }

    template <class Element, int Size>
    __device__ void add(const Pack<Element, Size>& pack) {
        T values[Size];
        T highest = largest;
        for (int i = 0; i < Size; ++i) {
            values[i] = to_compute(pack.values[i]);
            highest = values[i] > highest ? values[i] : highest;
        }
        rescale(highest);
        T terms = 0;
        for (int i = 0; i < Size; ++i) terms += std::exp(values[i] - shift());
        sum += static_cast<double>(terms);
    }

    __device__ void join(ExponentialSum other) {
        const T highest = largest > other.largest ? largest : other.largest;
        rescale(highest);
        other.rescale(highest);
        sum += other.sum;
    }

private:
    __device__ void rescale(T highest) {
        if (highest == largest) return;
        sum *= static_cast<double>(std::exp(largest - highest));
        largest = highest;
    }
};

}  // namespace potluck::cuda
