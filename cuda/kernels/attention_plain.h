#pragma once

// Tile products by plain multiply-adds, for attention in f32 and f64 and for half types whose sizes the tensor core
// kernels do not support. A block of 256 threads processes 64 x 64 tiles of scores: thread (y, x) of 16 x 16 holds rows
// 4y .. 4y + 3 and columns x, x + 16, x + 32, x + 48, so that the 16 lanes of half a warp together hold a row of
// scores. Operands pass through shared memory in chunks, so any head size is possible; each block computes a slice of
// the output columns.

#include "cuda/kernels/attention_tiles.h"
#include "cuda/kernels/block_reduce.h"

namespace potluck::cuda {

inline constexpr int plain_threads = 256;
inline constexpr int plain_tile = 64;  // queries, and keys

/// The shape of chunks and slices for numbers of type C.
template <class C>
struct PlainShape {
    static constexpr int pack = Pack<C>::size;
    static constexpr int chunk = 32;                   // columns of an operand of the scores
    static constexpr int chunk_stride = chunk + pack;  // avoids bank conflicts when 8 lanes read 8 rows
    static constexpr int weight_stride = plain_tile + pack;
    static constexpr int slice = sizeof(C) == 8 ? 32 : 128;  // columns of an output
    static constexpr int packs = slice / (16 * pack);        // per thread in a row of the slice
    static constexpr int value_rows = 16;                    // rows of an operand of the output

    static constexpr std::size_t chunk_elements = std::size_t{plain_tile} * chunk_stride;
    static constexpr std::size_t weight_elements = std::size_t{plain_tile} * weight_stride;
    static_assert(value_rows * slice <= 2 * chunk_elements);
    static constexpr std::size_t shared_bytes = (2 * chunk_elements + weight_elements) * sizeof(C);
};

/// The shared memory of a block: the two chunks of operands (or one of value rows instead), and a tile of weights.
template <class C>
struct PlainMemory {
    C *left, *right, *weights;
};
template <class C>
__device__ PlainMemory<C> plain_memory() {
    C* memory = dynamic_shared_memory<C>();
    return {memory, memory + PlainShape<C>::chunk_elements, memory + 2 * PlainShape<C>::chunk_elements};
}

__device__ inline int plain_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int plain_y() { return static_cast<int>(threadIdx.x) / 16; }

/// Loads rows [row, row + Rows) and columns [column, column + Columns) of x into shared memory; 0 outside x. Returns
/// whether all values that this thread has loaded are finite.
template <int Rows, int Columns, int Stride, class T, class C>
__device__ bool load_plain(const AttentionOperand<T>& x, const T* head, std::int64_t row, std::int64_t column,
                           C* to) {
    bool all_finite = true;
    for (int i = static_cast<int>(threadIdx.x); i < Rows * Columns; i += plain_threads) {
        const std::int64_t r = row + i / Columns;
        const std::int64_t c = column + i % Columns;
        const bool is_inside = r < x.rows && c < x.columns;
        const C value =
            is_inside ? static_cast<C>(to_compute(head[r * x.row_stride + c * x.column_stride])) : C{0};
        all_finite = all_finite && std::isfinite(value);
        to[i / Columns * Stride + i % Columns] = value;
    }
    return all_finite;
}

/// sums = 64 rows of a times 64 rows of b, both from their first row on. Floor: 64 x 64 x columns multiply-adds for
/// 2 x 64 x columns loaded elements.
template <class T, class C>
__device__ void plain_scores(const AttentionOperand<T>& a, const T* a_head, std::int64_t a_row,
                             const AttentionOperand<T>& b, const T* b_head, std::int64_t b_row,
                             const PlainMemory<C>& memory, C (&sums)[4][4]) {
    using Shape = PlainShape<C>;
    constexpr int pack = Shape::pack;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = C{0};
    for (std::int64_t column = 0; column < a.columns; column += Shape::chunk) {
        __syncthreads();
        load_plain<plain_tile, Shape::chunk, Shape::chunk_stride>(a, a_head, a_row, column, memory.left);
        load_plain<plain_tile, Shape::chunk, Shape::chunk_stride>(b, b_head, b_row, column, memory.right);
        __syncthreads();
        const std::int64_t rest = a.columns - column;
        const int count = rest < Shape::chunk ? static_cast<int>(rest) : Shape::chunk;
        for (int k = 0; k < count; k += pack) {
            Pack<C> left[4], right[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                left[i] = *reinterpret_cast<const Pack<C>*>(memory.left +
                                                            (4 * plain_y() + i) * Shape::chunk_stride + k);
                right[i] = *reinterpret_cast<const Pack<C>*>(memory.right +
                                                             (plain_x() + 16 * i) * Shape::chunk_stride + k);
            }
#pragma unroll
            for (int e = 0; e < pack; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i][j] += left[i].values[e] * right[j].values[e];
        }
    }
}

/// A thread's part of 64 rows x one slice of columns: rows 4y .. 4y + 3, packs x and x + 16.
template <class C>
struct PlainSums {
    C values[4][PlainShape<C>::packs][PlainShape<C>::pack];

    __device__ void clear() {
#pragma unroll
        for (auto& row : values)
#pragma unroll
            for (auto& part : row)
#pragma unroll
                for (C& value : part) value = C{0};
    }
    __device__ void scale_row(int i, C factor) {
#pragma unroll
        for (auto& part : values[i])
#pragma unroll
            for (C& value : part) value *= factor;
    }
};

/// Stores a thread's part of a tile where plain_accumulate() reads it.
template <class C>
__device__ void store_weights(const C (&part)[4][4], const PlainMemory<C>& memory) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            memory.weights[(4 * plain_y() + i) * PlainShape<C>::weight_stride + plain_x() + 16 * j] =
                part[i][j];
}

/// sums += weights [first, first + value_rows) of each row times the loaded rows of `columns` columns. WithCare: a
/// weight of 0 adds nothing, even where the product would be NaN.
template <bool Transposed, bool WithCare, class C>
__device__ void multiply_values(int first, std::int64_t columns, const PlainMemory<C>& memory,
                                PlainSums<C>& sums) {
    using Shape = PlainShape<C>;
    constexpr int pack = Shape::pack;
    const C* values = memory.left;
    for (int k = 0; k < Shape::value_rows; ++k) {
        C weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            weights[i] = Transposed ? memory.weights[(first + k) * Shape::weight_stride + 4 * plain_y() + i]
                                    : memory.weights[(4 * plain_y() + i) * Shape::weight_stride + first + k];
#pragma unroll
        for (int part = 0; part < Shape::packs; ++part) {
            if (16 * pack * part >= columns) break;
            const auto value =
                *reinterpret_cast<const Pack<C>*>(values + k * Shape::slice + (plain_x() + 16 * part) * pack);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < pack; ++e)
                    if (!WithCare || weights[i] != C{0})
                        sums.values[i][part][e] += weights[i] * value.values[e];
        }
    }
}

/// sums += weights (transposed when Transposed) times 64 rows of x from `row` on, columns [column, column + slice).
/// `has_zeros`: there may be weights that take no part. Begins and ends with a barrier. Floor: 64 x 64 x slice
/// multiply-adds for 64 x slice loaded elements.
template <bool Transposed, class T, class C>
__device__ void plain_accumulate(const AttentionOperand<T>& x, const T* head, std::int64_t row,
                                 std::int64_t column, bool has_zeros, const PlainMemory<C>& memory,
                                 PlainSums<C>& sums) {
    using Shape = PlainShape<C>;
    const std::int64_t rest = x.rows - row;
    const int count = rest < plain_tile ? static_cast<int>(rest) : plain_tile;
    for (int first = 0; first < count; first += Shape::value_rows) {
        __syncthreads();
        const bool all_finite = load_plain<Shape::value_rows, Shape::slice, Shape::slice>(
            x, head, row + first, column, memory.left);
        if (__syncthreads_or(has_zeros && !all_finite) != 0)
            multiply_values<Transposed, true>(first, x.columns - column, memory, sums);
        else
            multiply_values<Transposed, false>(first, x.columns - column, memory, sums);
    }
    __syncthreads();
}

/// Writes a thread's part of rows [row, row + 64) and columns [column, column + slice) of x, times `factor`.
template <class T, class C>
__device__ void store_plain(const PlainSums<C>& sums, C factor, const AttentionOperand<T>& x, T* head,
                            std::int64_t row, std::int64_t column) {
    constexpr int pack = PlainShape<C>::pack;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int part = 0; part < PlainShape<C>::packs; ++part)
#pragma unroll
            for (int e = 0; e < pack; ++e) {
                const std::int64_t r = row + 4 * plain_y() + i;
                const std::int64_t c = column + (plain_x() + 16 * part) * pack + e;
                if (r < x.rows && c < x.columns)
                    head[r * x.row_stride + c * x.column_stride] =
                        from_compute<T>(sums.values[i][part][e] * factor);
            }
}

}  // namespace potluck::cuda
