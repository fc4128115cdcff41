#pragma once

#include <cstdint>

#include "core/half.h"

namespace potluck::cpu {

/// A matrix in memory: element (i, j) is data[i * row_stride + j * column_stride].
template <class T>
struct Matrix {
    T* data;
    std::int64_t rows, columns;
    std::int64_t row_stride, column_stride;

    /// The block of the given size whose first element is (row, column).
    Matrix block(std::int64_t row, std::int64_t column, std::int64_t block_rows,
                 std::int64_t block_columns) const {
        return {data + row * row_stride + column * column_stride, block_rows, block_columns, row_stride,
                column_stride};
    }
    Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

/// c = a b, or c += a b, computed by the calling thread alone: the building block of every kernel that contains a
/// matrix product. a (m, k) and b (k, n) have any strides; c (m, n) has column_stride 1. k = 0 gives zeros (or leaves c
/// unchanged). The same arguments give the same bits, whatever the number of threads.
void gemm(const Matrix<const float>& a, const Matrix<const float>& b, const Matrix<float>& c,
          bool accumulate);
void gemm(const Matrix<const double>& a, const Matrix<const double>& b, const Matrix<double>& c,
          bool accumulate);

/// Whether the processor multiplies bf16 faster than f32, and oneDNN knows how: by AMX, or by the AVX512-BF16 of AMD.
/// Intel's cores take two cycles for vdpbf16ps, which is half the rate of their f32 products. What ONEDNN_MAX_CPU_ISA
/// forbids is not there.
bool has_fast_bfloat16_gemm();

/// The same products of bf16, by oneDNN: c is rounded once, after what it held has been added. These instructions take
/// denormal numbers for zeros. False, with c untouched, where oneDNN has no such product for this processor or for these
/// strides: it wants one axis of a and of b without gaps.
bool bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b, const Matrix<float>& c,
                   bool accumulate);
bool bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b,
                   const Matrix<bfloat16>& c, bool accumulate);

}  // namespace potluck::cpu
