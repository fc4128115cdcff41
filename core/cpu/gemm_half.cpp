#include "core/cpu/gemm_half.h"

#include <algorithm>

#include "core/cpu/convert.h"
#include "core/cpu/rows.h"
#include "core/cpu/workspace.h"

// Half types are widened to f32 a block at a time, and the blocks are multiplied in f32. The blocks stay in the
// second-level cache, where a product of f32 runs nearer to the peak of the processor than on the strided rows of a
// large matrix, so half types cost no more than f32. Only bf16 on a processor that is faster at it goes another way.

namespace potluck::cpu {
namespace {

constexpr std::int64_t block_rows = 256;
constexpr std::int64_t block_depth = 384;
constexpr std::int64_t few_rows = 4;

struct BlockMemory;  // the owner of its workspace

/// The copy keeps the axis that lies without gaps in memory.
template <Half T>
Matrix<const float> widened(const Matrix<const T>& x, float* memory) {
    if (x.column_stride != 1 && x.row_stride == 1) return widened(x.transposed(), memory).transposed();
    if (x.column_stride == 1 && x.row_stride == x.columns) {
        convert_to(memory, x.data, dtype_of<T>(), 1, x.rows * x.columns);
    } else {
        for (std::int64_t i = 0; i < x.rows; ++i)
            convert_to(memory + i * x.columns, x.data + i * x.row_stride, dtype_of<T>(), x.column_stride,
                       x.columns);
    }
    return {memory, x.rows, x.columns, x.columns, 1};
}

/// Equal blocks, so that the last is no sliver.
std::int64_t even_block(std::int64_t size, std::int64_t largest) {
    const std::int64_t blocks = (size + largest - 1) / largest;
    return blocks <= 1 ? size : ((size + blocks - 1) / blocks + 15) / 16 * 16;
}

/// How a product is cut, and how many elements its widened blocks of a and b have.
struct Blocks {
    Blocks(std::int64_t all_rows, std::int64_t all_columns, std::int64_t all_depth)
        : rows(even_block(all_rows, block_rows)),
          depth(even_block(all_depth, block_depth)),
          a_elements(rows * depth),
          b_elements(depth * all_columns) {}
    std::int64_t rows, depth;
    std::int64_t a_elements, b_elements;
};

template <Half T>
void multiply_blocks(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<float>& sums,
                     bool accumulate, const Blocks& blocks, float* memory) {
    float* const b_memory = memory + blocks.a_elements;
    std::int64_t first = 0;
    do {
        const std::int64_t depth = std::min(blocks.depth, a.columns - first);
        const Matrix<const float> right = widened(b.block(first, 0, depth, b.columns), b_memory);
        for (std::int64_t row = 0; row < a.rows; row += blocks.rows) {
            const std::int64_t rows = std::min(blocks.rows, a.rows - row);
            gemm(widened(a.block(row, first, rows, depth), memory), right,
                 sums.block(row, 0, rows, sums.columns), accumulate || first > 0);
        }
        first += depth;
    } while (first < a.columns);
}

/// The same for a few rows of a, where reading b is all the work: its lines are widened one after another, each used
/// while it is in the first-level cache.
template <Half T>
void multiply_few_rows(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<float>& sums,
                       bool accumulate, const Blocks& blocks, float* memory) {
    float* const line = memory + blocks.a_elements;
    const bool has_dense_columns = b.row_stride == 1 && b.column_stride != 1;
    if (!accumulate)
        for (std::int64_t i = 0; i < sums.rows; ++i)
            std::fill_n(sums.data + i * sums.row_stride, sums.columns, 0.0F);
    for (std::int64_t first = 0; first < a.columns; first += blocks.depth) {
        const std::int64_t depth = std::min(blocks.depth, a.columns - first);
        for (std::int64_t i = 0; i < a.rows; ++i)
            convert_to(memory + i * depth, a.data + i * a.row_stride + first * a.column_stride, dtype_of<T>(),
                       a.column_stride, depth);
        for (std::int64_t j = 0; has_dense_columns && j < b.columns; ++j) {
            const T* column = b.data + first + j * b.column_stride;
            // bf16 is widened by a shift, in the registers of the sum.
            if constexpr (std::same_as<T, float16>) convert_to(line, column, dtype_of<T>(), 1, depth);
            for (std::int64_t i = 0; i < a.rows; ++i) {
                const float* row = memory + i * depth;
                const double sum = sum_of<float>(depth, [=](std::int64_t p) {
                    if constexpr (std::same_as<T, float16>) return row[p] * line[p];
                    return row[p] * static_cast<float>(column[p]);
                });
                sums.data[i * sums.row_stride + j] += static_cast<float>(sum);
            }
        }
        for (std::int64_t p = 0; !has_dense_columns && p < depth; ++p) {
            convert_to(line, b.data + (first + p) * b.row_stride, dtype_of<T>(), b.column_stride, b.columns);
            for (std::int64_t i = 0; i < a.rows; ++i) {
                const float factor = memory[i * depth + p];
                float* row = sums.data + i * sums.row_stride;
                for (std::int64_t j = 0; j < b.columns; ++j) row[j] += factor * line[j];
            }
        }
    }
}

}  // namespace

template <Half T, class C>
requires std::same_as<C, T> || std::same_as<C, float>
void gemm(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<C>& c, bool accumulate) {
    if (c.rows == 0 || c.columns == 0) return;
    if constexpr (std::same_as<T, bfloat16>)
        if (has_fast_bfloat16_gemm() && bfloat16_gemm(a, b, c, accumulate)) return;
    constexpr bool is_direct = std::same_as<C, float>;
    const Blocks blocks(c.rows, c.columns, a.columns);
    const std::int64_t sum_elements = is_direct ? 0 : c.rows * c.columns;
    float* const memory = workspace<BlockMemory, float>(sum_elements + blocks.a_elements + blocks.b_elements);
    Matrix<float> sums{memory, c.rows, c.columns, c.columns, 1};
    if constexpr (is_direct) sums = c;
    if (!is_direct && accumulate)
        for (std::int64_t i = 0; i < c.rows; ++i)
            convert_to(sums.data + i * sums.row_stride, c.data + i * c.row_stride, dtype_of<C>(), 1,
                       c.columns);
    if (c.rows <= few_rows)
        multiply_few_rows(a, b, sums, accumulate, blocks, memory + sum_elements);
    else
        multiply_blocks(a, b, sums, accumulate, blocks, memory + sum_elements);
    if (!is_direct)
        for (std::int64_t i = 0; i < c.rows; ++i)
            convert_from(sums.data + i * sums.row_stride, c.data + i * c.row_stride, dtype_of<C>(), 1,
                         c.columns);
}

template void gemm(const Matrix<const float16>&, const Matrix<const float16>&, const Matrix<float16>&, bool);
template void gemm(const Matrix<const float16>&, const Matrix<const float16>&, const Matrix<float>&, bool);
template void gemm(const Matrix<const bfloat16>&, const Matrix<const bfloat16>&, const Matrix<bfloat16>&,
                   bool);
template void gemm(const Matrix<const bfloat16>&, const Matrix<const bfloat16>&, const Matrix<float>&, bool);

}  // namespace potluck::cpu
