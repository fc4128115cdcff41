#pragma once

// Attention by tensor cores, shared by forward and backward: tiles of half-type elements in shared memory, and the two
// products of a warp. A block has 4 warps; each owns 16 or 32 rows of the block's tile (queries, or keys in the kernel
// for dk and dv) and keeps scores and sums of these rows in registers as C fragments (tensor_core.h).

#include <algorithm>
#include <cstdint>

#include "cuda/kernels/attention_tiles.h"
#include "cuda/kernels/block_reduce.h"
#include "cuda/kernels/tensor_core.h"

namespace potluck::cuda {

inline constexpr int fragment_warps = 4;
inline constexpr int fragment_threads = fragment_warps * warp_size;

/// Row stride of a tile of `size` columns in shared memory, in elements. With 16 bytes of padding per row, 8 rows at
/// the same column lie in 8 different groups of banks, so ldmatrix reads them without bank conflicts.
constexpr int tile_stride(int size) { return size + 8; }

/// One C fragment for each of Rows x Columns tiles of 16 x 8.
template <int Rows, int Columns>
using Fragments = float[Rows][Columns][4];

template <int Rows, int Columns>
__device__ inline void clear(Fragments<Rows, Columns>& sums) {
#pragma unroll
    for (auto& row : sums)
#pragma unroll
        for (auto& tile : row)
#pragma unroll
            for (float& value : tile) value = 0.0F;
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % warp_size; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / warp_size; }

/// The position of float e of a C fragment in its tile.
__device__ inline int fragment_row(int e) { return lane_index() / 4 + e / 2 * 8; }
__device__ inline int fragment_column(int e) { return lane_index() % 4 * 2 + e % 2; }

/// The thread index, recomputed at each call: values that a rare branch derives from it are then not precomputed and
/// kept in registers throughout the surrounding loop.
__device__ inline int thread_found_anew() {
    int thread = static_cast<int>(threadIdx.x);
#if !POTLUCK_CUDA_EMULATED
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#endif
    return thread;
}

/// Starts to load rows [first, first + Rows) of x into a tile of Size columns; 0 outside x. All threads of the block
/// take part; rows that begin at multiples of 16 bytes are copied asynchronously, others element by element.
template <int Rows, int Size, class T>
__device__ inline void load_tile(const AttentionOperand<T>& x, const T* head, std::int64_t first, T* tile) {
    constexpr int pack = Pack<T>::size;
    constexpr int packs = Size / pack;
    const T* from_row = head + first * x.row_stride;
#pragma unroll 4
    for (int i = thread_found_anew(); i < Rows * packs; i += fragment_threads) {
        const int row = i / packs;
        const int column = i % packs * pack;
        T* to = tile + row * tile_stride(Size) + column;
        const T* from = from_row + row * x.row_stride + column * x.column_stride;
        const std::int64_t rest = first + row < x.rows ? x.columns - column : 0;
        const int count = rest <= 0 ? 0 : (rest < pack ? static_cast<int>(rest) : pack);
        if (x.has_wide_rows && count > 0) {
            copy_async_16(to, from, count * static_cast<int>(sizeof(T)));
            continue;
        }
        Pack<T> values;
#pragma unroll
        for (int e = 0; e < pack; ++e) values.values[e] = e < count ? from[e * x.column_stride] : T(0.0F);
        *reinterpret_cast<Pack<T>*>(to) = values;
    }
}

/// Writes a warp's sums times `factor`, rounded, as rows [first, first + 16 Rows) of x and columns from `first_column`
/// on. They pass through the warp's own rows of a tile in shared memory, so that whole rows are written.
template <int Size, class T, int Rows, int Columns>
__device__ inline void store_rows(const Fragments<Rows, Columns>& sums, float factor,
                                  const AttentionOperand<T>& x, T* head, std::int64_t first,
                                  std::int64_t first_column, T* own_rows) {
    constexpr int stride = tile_stride(Size);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
        for (int c = 0; c < Columns; ++c)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                *reinterpret_cast<std::uint32_t*>(own_rows + (16 * r + fragment_row(e)) * stride + 8 * c +
                                                  fragment_column(e)) =
                    pack_halves<T>(sums[r][c][e] * factor, sums[r][c][e + 1] * factor);
    __syncwarp();
    constexpr int pack = Pack<T>::size;
    for (int i = lane_index(); i < 16 * Rows * Columns; i += warp_size) {
        const int row = i / Columns;
        const int column = i % Columns * pack;
        const std::int64_t rest = x.columns - first_column - column;
        if (first + row >= x.rows || rest <= 0) continue;
        const T* from = own_rows + row * stride + column;
        T* to = head + (first + row) * x.row_stride + (first_column + column) * x.column_stride;
        if (x.has_wide_rows && rest >= pack) {
            *reinterpret_cast<Pack<T>*>(to) = *reinterpret_cast<const Pack<T>*>(from);
            continue;
        }
        for (int e = 0; e < pack && e < rest; ++e) to[e * x.column_stride] = from[e];
    }
}

/// sums = a (16 Rows, Depth) times the transpose of b (8 Columns, Depth), both tiles in shared memory.
template <int Depth, class T, int Rows, int Columns>
__device__ inline void multiply_rows(const T* a, const T* b, Fragments<Rows, Columns>& sums) {
    static_assert(Depth % 16 == 0 && Columns % 2 == 0);
    constexpr int stride = tile_stride(Depth);
    const int lane = lane_index();
    // The four 8 x 8 matrices of ldmatrix. For a: upper left, lower left, upper right, lower right; for b: two tiles of
    // 8 rows, left and right half of each.
    const T* a_row = a + lane % 16 * stride + lane / 16 * 8;
    const T* b_row = b + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
    clear(sums);
    __syncwarp();  // the instructions below need all lanes converged
#pragma unroll
    for (int k = 0; k < Depth; k += 16) {
        std::uint32_t left[Rows][4];
#pragma unroll
        for (int r = 0; r < Rows; ++r) ldmatrix_x4<false>(left[r], a_row + 16 * r * stride + k);
#pragma unroll
        for (int c = 0; c < Columns; c += 2) {
            std::uint32_t right[4];
            ldmatrix_x4<false>(right, b_row + 8 * c * stride + k);
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                mma_m16n8k16<T>(sums[r][c], left[r], right[0], right[1]);
                mma_m16n8k16<T>(sums[r][c + 1], left[r], right[2], right[3]);
            }
        }
    }
}

/// sums += weights (16 Rows, 8 Depth), which are in registers and are rounded to the half type, times b (8 Depth, 8
/// Columns) in a tile of Size columns in shared memory.
template <int Size, class T, int Rows, int Depth, int Columns>
__device__ inline void accumulate_rows(const Fragments<Rows, Depth>& weights, const T* b,
                                       Fragments<Rows, Columns>& sums) {
    static_assert(Depth % 2 == 0 && Columns % 2 == 0);
    constexpr int stride = tile_stride(Size);
    const int lane = lane_index();
    const T* b_row = b + lane % 16 * stride + lane / 16 * 8;
    __syncwarp();  // lanes may have diverged in masks, dropout and comparisons
#pragma unroll
    for (int k = 0; k < Depth; k += 2) {
        std::uint32_t left[Rows][4];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            const auto& first = weights[r][k];
            const auto& second = weights[r][k + 1];
            left[r][0] = pack_halves<T>(first[0], first[1]);
            left[r][1] = pack_halves<T>(first[2], first[3]);
            left[r][2] = pack_halves<T>(second[0], second[1]);
            left[r][3] = pack_halves<T>(second[2], second[3]);
        }
#pragma unroll
        for (int c = 0; c < Columns; c += 2) {
            std::uint32_t right[4];
            ldmatrix_x4<true>(right, b_row + 8 * k * stride + 8 * c);
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                mma_m16n8k16<T>(sums[r][c], left[r], right[0], right[1]);
                mma_m16n8k16<T>(sums[r][c + 1], left[r], right[2], right[3]);
            }
        }
    }
}

// A hidden weight of 0 (AttentionRules::hides_any) must add nothing, even where it meets infinity or NaN, for which the
// tensor cores would give NaN. So the products of such values with nonzero weights are added separately, and the values
// are then replaced by 0 in the tile. This is rare but occurs where all registers are in use: the code works on the
// tile in shared memory, at constant offsets from one address and row by row, so that it needs hardly any registers.

/// Whether this thread's part of a tile contains a value that is not finite.
template <int Rows, int Size, class T>
__device__ inline bool holds_non_finite(const T* tile) {
    constexpr int pack = Pack<T>::size;
    bool found = false;
#pragma unroll 1
    for (int i = thread_found_anew(); i < Rows * Size / pack; i += fragment_threads) {
        const auto values = *reinterpret_cast<const Pack<T>*>(tile + i / (Size / pack) * tile_stride(Size) +
                                                              i % (Size / pack) * pack);
#pragma unroll
        for (int e = 0; e < pack; ++e) found = found || !std::isfinite(to_compute(values.values[e]));
    }
    return found;
}

/// Replaces the values that are not finite in this thread's part of a tile by 0.
template <int Rows, int Size, class T>
__device__ inline void clear_non_finite(T* tile) {
#pragma unroll 1
    for (int i = thread_found_anew(); i < Rows * Size; i += fragment_threads) {
        T& value = tile[i / Size * tile_stride(Size) + i % Size];
        if (!std::isfinite(to_compute(value))) value = T(0.0F);
    }
}

/// sums += weights (16 Rows, 8 Depth) times the non-finite values of b (8 Depth, 8 Columns), in a tile of Size columns
/// in shared memory, where the weight is not 0. The loop over Depth is unrolled, because registers cannot be indexed at
/// run time: the weights would go to local memory.
template <int Size, class T, int Rows, int Depth, int Columns>
__device__ inline void accumulate_non_finite(const Fragments<Rows, Depth>& weights, const T* b,
                                             Fragments<Rows, Columns>& sums) {
    const T* row = b + fragment_column(0);
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
#pragma unroll 1
        for (int p = 0; p < 8; ++p, row += tile_stride(Size)) {
            // Column p of the weights is in one of the four lanes that share a row.
            float weight[Rows][2];
#pragma unroll
            for (int r = 0; r < Rows; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float own = p % 2 == 0 ? weights[r][d][2 * h] : weights[r][d][2 * h + 1];
                    weight[r][h] = __shfl_sync(all_lanes, own, lane_index() / 4 * 4 + p / 2);
                }
#pragma unroll
            for (int c = 0; c < Columns; ++c)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float value = to_compute(row[8 * c + i]);
                    if (std::isfinite(value)) continue;
#pragma unroll
                    for (int r = 0; r < Rows; ++r)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            if (weight[r][h] != 0.0F) sums[r][c][2 * h + i] += weight[r][h] * value;
                }
        }
    }
}

/// Calls `function` with the smallest kernel size that is at least `size` columns.
template <class Function>
void visit_fragment_size(std::int64_t size, Function&& function) {
    if (size <= 32) return function(std::integral_constant<int, 32>{});
    if (size <= 64) return function(std::integral_constant<int, 64>{});
    if (size <= 96) return function(std::integral_constant<int, 96>{});
    if (size <= 128) return function(std::integral_constant<int, 128>{});
    return function(std::integral_constant<int, static_cast<int>(largest_tensor_core_size)>{});
}

/// Calls `function` with the smallest kernel size that holds the columns of q and v, and with whether the kernel must know
/// of a mask or of dropout, both as constants.
template <class Arguments, class Function>
void visit_fragment_kernel(const Arguments& arguments, Function&& function) {
    const bool is_general = arguments.rules.has_mask || arguments.rules.has_dropout;
    visit_fragment_size(std::max(arguments.q.columns, arguments.v.columns), [&](auto size) {
        if (is_general)
            function(size, std::true_type{});
        else
            function(size, std::false_type{});
    });
}

}  // namespace potluck::cuda
