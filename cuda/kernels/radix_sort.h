#pragma once

// A stable sort of the rows of a matrix of unsigned keys: by their lowest four bits, then by the next four, and so on;
// as each pass keeps the order of equal digits, the rows are sorted after the last one.
//
// A pass divides each row into tiles of 2048 keys, one per block. First every block counts its 16 digits; then one
// block per row turns the counts into positions (after all smaller digits and the equal digits of earlier tiles); then
// every block moves its keys. There, each thread owns 8 consecutive keys and 16 counters, one per digit. A prefix sum
// over all counters, digit by digit and thread by thread, gives the number of equal digits before the thread's first.

#include <array>
#include <cstdint>

#include "cuda/kernel_device.h"
#include "cuda/kernels/block_scan.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

namespace radix {

inline constexpr int threads = 256;
inline constexpr int keys_of_thread = 8;
inline constexpr int tile = threads * keys_of_thread;
inline constexpr int digit_bits = 4;
inline constexpr int digits = 1 << digit_bits;

template <class Key>
__device__ int digit_of(Key key, int shift) {
    return static_cast<int>(key >> shift) & (digits - 1);
}

/// The tile of a block in a grid of rows * tiles blocks.
struct Tile {
    std::int64_t row, number, begin, end;
};
__device__ inline Tile tile_of_block(std::int64_t n, std::int64_t tiles) {
    const auto block = static_cast<std::int64_t>(blockIdx.x);
    const std::int64_t number = block % tiles;
    const std::int64_t begin = number * tile;
    return {block / tiles, number, begin, begin + tile < n ? begin + tile : n};
}

/// keys (rows, n) -> counts (rows, digits, tiles). Floor: reads every key once.
template <class Key>
__global__ void __launch_bounds__(threads)
    count_kernel(const Key* keys, std::int64_t n, std::int64_t tiles, int shift, std::int64_t* counts) {
    __shared__ unsigned count[digits];
    if (threadIdx.x < digits) count[threadIdx.x] = 0;
    __syncthreads();
    const Tile mine = tile_of_block(n, tiles);
    for (std::int64_t i = mine.begin + threadIdx.x; i < mine.end; i += threads)
        atomicAdd(&count[digit_of(keys[mine.row * n + i], shift)], 1U);
    __syncthreads();
    if (threadIdx.x < digits)
        counts[(mine.row * digits + threadIdx.x) * tiles + mine.number] = count[threadIdx.x];
}

/// Each row of counts becomes its running sums: the place of each tile's first key with each digit. Floor: reads and
/// writes every count once.
static __global__ void __launch_bounds__(threads) place_kernel(std::int64_t* counts, std::int64_t per_row) {
    __shared__ std::int64_t scratch[warp_size];
    std::int64_t* row = counts + static_cast<std::int64_t>(blockIdx.x) * per_row;
    std::int64_t before = 0;
    for (std::int64_t first = 0; first < per_row; first += threads) {
        const std::int64_t i = first + threadIdx.x;
        std::int64_t total = 0;
        const std::int64_t sum = block_sum_before(i < per_row ? row[i] : 0, scratch, total);
        if (i < per_row) row[i] = before + sum;
        before += total;
    }
}

/// Moves keys and positions (null: they stand in order). Floor: reads and writes both once.
template <class Key>
__global__ void __launch_bounds__(threads)
    move_kernel(const Key* keys, const std::int64_t* positions, std::int64_t n, std::int64_t tiles, int shift,
                const std::int64_t* places, Key* moved_keys, std::int64_t* moved_positions) {
    __shared__ unsigned counters[digits * threads];  // [digit][thread]
    __shared__ unsigned first_of_digit[digits];
    __shared__ unsigned scratch[warp_size];
    const auto thread = static_cast<int>(threadIdx.x);
    const Tile mine = tile_of_block(n, tiles);
    const std::int64_t begin = mine.begin + thread * keys_of_thread;
    const std::int64_t end = begin + keys_of_thread < mine.end ? begin + keys_of_thread : mine.end;
    const Key* row = keys + mine.row * n;

    for (int digit = 0; digit < digits; ++digit) counters[digit * threads + thread] = 0;
    for (std::int64_t i = begin; i < end; ++i) ++counters[digit_of(row[i], shift) * threads + thread];
    __syncthreads();
    unsigned* stretch = counters + thread * digits;  // `digits` counters in linear order
    unsigned sum = 0;
    for (int i = 0; i < digits; ++i) sum += stretch[i];
    unsigned total = 0;
    unsigned before = block_sum_before(sum, scratch, total);
    for (int i = 0; i < digits; ++i) {
        const unsigned count = stretch[i];
        stretch[i] = before;
        before += count;
    }
    __syncthreads();
    if (thread < digits) first_of_digit[thread] = counters[thread * threads];
    __syncthreads();
    for (std::int64_t i = begin; i < end; ++i) {
        const Key key = row[i];
        const int digit = digit_of(key, shift);
        const unsigned rank = counters[digit * threads + thread]++ - first_of_digit[digit];
        const std::int64_t place =
            mine.row * n + places[(mine.row * digits + digit) * tiles + mine.number] + rank;
        moved_keys[place] = key;
        moved_positions[place] = positions == nullptr ? i : positions[mine.row * n + i];
    }
}

}  // namespace radix

/// Memory for keys: i32 for 32-bit keys, i64 for 64-bit keys.
template <class Key>
Tensor empty_keys(const Shape& shape, Device device) {
    return Tensor::empty(shape, {sizeof(Key) == 4 ? DType::i32 : DType::i64, device});
}

struct SortedRows {
    Tensor keys, positions;  // (rows, n)
};

/// Sorts each row of keys (rows, n), which are contiguous and have at most `bits` bits. positions gives the original
/// position of each key in its row; equal keys keep their order.
template <class Key>
SortedRows sort_rows(const Tensor& keys, int bits, cudaStream_t stream) {
    const std::int64_t rows = keys.size(0);
    const std::int64_t n = keys.size(1);
    const std::int64_t tiles = (n + radix::tile - 1) / radix::tile;
    const Device device = keys.device();
    const Tensor counts = Tensor::empty({rows, radix::digits, tiles}, {DType::i64, device});
    std::array<SortedRows, 2> buffers;  // the passes write into them alternately
    const unsigned blocks = blocks_for(rows * tiles, 1);
    SortedRows source{keys, {}};
    for (int pass = 0; pass == 0 || pass * radix::digit_bits < bits; ++pass) {
        const int shift = pass * radix::digit_bits;
        SortedRows& target = buffers[static_cast<std::size_t>(pass % 2)];
        if (!target.keys.defined())
            target = {empty_keys<Key>({rows, n}, device), Tensor::empty({rows, n}, {DType::i64, device})};
        launch(&radix::count_kernel<Key>, blocks, radix::threads, 0, stream, elements_of<Key>(source.keys), n,
               tiles, shift, elements_of<std::int64_t>(counts));
        launch(&radix::place_kernel, blocks_for(rows, 1), radix::threads, 0, stream,
               elements_of<std::int64_t>(counts), radix::digits * tiles);
        launch(&radix::move_kernel<Key>, blocks, radix::threads, 0, stream, elements_of<Key>(source.keys),
               pass == 0 ? nullptr : elements_of<std::int64_t>(source.positions), n, tiles, shift,
               elements_of<std::int64_t>(counts), elements_of<Key>(target.keys),
               elements_of<std::int64_t>(target.positions));
        source = target;
    }
    return source;
}

}  // namespace potluck::cuda
