#include <algorithm>
#include <concepts>
#include <vector>

#include "core/cpu/convert.h"
#include "core/cpu/copy.h"
#include "core/cpu/elementwise.h"
#include "core/cpu/gemm.h"
#include "core/cpu/gemm_half.h"
#include "core/cpu/parallel.h"
#include "core/tensor.h"

// Matrix products. The output is divided into tiles whose borders depend only on the shapes; each tile is one product
// in one thread (core/cpu/gemm.h), so the bits do not depend on the number of threads. On the shapes of GPT-2, tiles of
// 128 x 384 are as fast as letting oneDNN split the whole product over two threads (measured).

namespace potluck::cpu {
namespace {

// Batches of products y = a b: a (batch..., m, k), b (batch..., k, n), y (batch..., m, n).
template <class T, class Y = T>
struct Products {
    const T* a;
    const T* b;
    Y* y;
    Shape batch;
    Strides a_batch, b_batch;  // in elements, along the axes of batch
    std::int64_t m, n, k;
    std::int64_t a_row, a_column, b_row, b_column;

    std::int64_t count() const {
        std::int64_t product = 1;
        for (const std::int64_t size : batch) product *= size;
        return product;
    }
    Matrix<const T> a_matrix(std::int64_t index) const {
        return {a + offset(index, a_batch), m, k, a_row, a_column};
    }
    Matrix<const T> b_matrix(std::int64_t index) const {
        return {b + offset(index, b_batch), k, n, b_row, b_column};
    }
    Matrix<Y> y_matrix(std::int64_t index) const { return {y + index * m * n, m, n, n, 1}; }

private:
    std::int64_t offset(std::int64_t index, const Strides& strides) const {
        std::int64_t elements = 0;
        for (std::size_t axis = batch.size(); axis-- > 0;) {
            elements += index % batch[axis] * strides[axis];
            index /= batch[axis];
        }
        return elements;
    }
};

template <class T, class Y = T>
Products<T, Y> products_of(const Tensor& a, const Tensor& b, Tensor& y) {
    const auto axes = static_cast<std::size_t>(y.ndim() - 2);
    Products<T, Y> p{a.data<T>(),
                     b.data<T>(),
                     y.data<Y>(),
                     {},
                     {},
                     {},
                     y.size(-2),
                     y.size(-1),
                     a.size(-1),
                     a.strides()[axes],
                     a.strides()[axes + 1],
                     b.strides()[axes],
                     b.strides()[axes + 1]};
    for (std::size_t axis = 0; axis < axes; ++axis) {
        if (y.shape()[axis] == 1) continue;
        p.batch.push_back(y.shape()[axis]);
        p.a_batch.push_back(a.strides()[axis]);
        p.b_batch.push_back(b.strides()[axis]);
    }
    // A batch axis that b lacks adds rows to a, as in a linear layer: one large product instead of many.
    while (!p.batch.empty() && p.b_batch.back() == 0 && (p.m == 1 || p.a_batch.back() == p.m * p.a_row)) {
        if (p.m == 1) p.a_row = p.a_batch.back();
        p.m *= p.batch.back();
        p.batch.pop_back();
        p.a_batch.pop_back();
        p.b_batch.pop_back();
    }
    return p;
}

struct TileSize {
    std::int64_t rows, columns;
};
constexpr TileSize largest_tile{128, 384};
// What is prepared of an operand of a half type, widened or packed, serves longer.
constexpr TileSize largest_half_tile{512, 512};
constexpr std::int64_t wanted_tiles = 8;            // below this, tiles are halved to occupy more threads,
constexpr std::int64_t least_tile_work = 1 << 21;   // as long as one is worth its overhead (multiplications)
constexpr std::int64_t least_piece_work = 1 << 19;  // of several small products in one thread

struct Tiling {
    std::int64_t rows, columns;  // of one tile
    std::int64_t row_tiles, column_tiles;

    static std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

    // Divides the size into equal tiles, so that the last one is not tiny, with borders at multiples of the vector
    // length.
    static std::int64_t even(std::int64_t size, std::int64_t largest) {
        const std::int64_t share = pieces(size, pieces(size, largest));
        return std::min(size, pieces(share, 16) * 16);
    }

    Tiling(std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t k, TileSize most) {
        for (;;) {
            rows = even(m, most.rows);
            columns = even(n, most.columns);
            row_tiles = pieces(m, rows);
            column_tiles = pieces(n, columns);
            if (count * row_tiles * column_tiles >= wanted_tiles || rows * columns * k / 2 < least_tile_work)
                return;
            if (columns > 2 * rows && columns > 32)
                most.columns = columns / 2;
            else if (rows > 32)
                most.rows = rows / 2;
            else if (columns > 32)
                most.columns = columns / 2;
            else
                return;
        }
    }
};

// Calls body(product, row, column, rows, columns) for every tile of every product, spread over the threads.
template <class Body>
void for_each_tile(std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t k, TileSize most,
                   const Body& body) {
    if (count == 0 || m == 0 || n == 0) return;
    const Tiling tiling(count, m, n, k, most);
    const std::int64_t tiles = tiling.row_tiles * tiling.column_tiles;
    const std::int64_t tile_work = tiling.rows * tiling.columns * std::max<std::int64_t>(k, 1);
    cpu::parallel_for(count * tiles, std::max<std::int64_t>(1, least_piece_work / tile_work),
                      [&](std::int64_t first, std::int64_t last) {
                          for (std::int64_t i = first; i < last; ++i) {
                              // Neighbours share their columns of b, the larger operand in most products.
                              const std::int64_t row = i % tiles % tiling.row_tiles * tiling.rows;
                              const std::int64_t column = i % tiles / tiling.row_tiles * tiling.columns;
                              body(i / tiles, row, column, std::min(tiling.rows, m - row),
                                   std::min(tiling.columns, n - column));
                          }
                      });
}

/// Floating types: half types are summed in f32 and may be stored in it.
template <class T, class Y>
requires std::same_as<T, float> || std::same_as<T, double> || cpu::Half<T>
void multiply(const Products<T, Y>& p, bool accumulate) {
    for_each_tile(p.count(), p.m, p.n, p.k, cpu::Half<T> ? largest_half_tile : largest_tile,
                  [&](std::int64_t index, std::int64_t row, std::int64_t column, std::int64_t rows,
                      std::int64_t columns) {
                      cpu::gemm(p.a_matrix(index).block(row, 0, rows, p.k),
                                p.b_matrix(index).block(0, column, p.k, columns),
                                p.y_matrix(index).block(row, column, rows, columns), accumulate);
                  });
}

// ---- integers: exact modulo 2^bits: unsigned arithmetic wraps around where signed would be undefined ----

template <class T>
requires std::is_integral_v<T> &&
    (!std::same_as<T, bool>)void multiply(const Products<T>& p, bool accumulate) {
    for_each_tile(p.count(), p.m, p.n, p.k, largest_tile,
                  [&](std::int64_t index, std::int64_t row, std::int64_t column, std::int64_t rows,
                      std::int64_t columns) {
                      const Matrix<const T> a = p.a_matrix(index).block(row, 0, rows, p.k);
                      const Matrix<const T> b = p.b_matrix(index).block(0, column, p.k, columns);
                      const Matrix<T> y = p.y_matrix(index).block(row, column, rows, columns);
                      std::vector<std::uint64_t> sum(static_cast<std::size_t>(columns));
                      for (std::int64_t i = 0; i < rows; ++i) {
                          T* y_row = y.data + i * y.row_stride;
                          for (std::int64_t j = 0; j < columns; ++j) {
                              sum[static_cast<std::size_t>(j)] =
                                  accumulate ? static_cast<std::uint64_t>(y_row[j]) : 0;
                          }
                          for (std::int64_t k = 0; k < p.k; ++k) {
                              const auto factor =
                                  static_cast<std::uint64_t>(a.data[i * a.row_stride + k * a.column_stride]);
                              const T* b_row = b.data + k * b.row_stride;
                              for (std::int64_t j = 0; j < columns; ++j) {
                                  sum[static_cast<std::size_t>(j)] +=
                                      factor * static_cast<std::uint64_t>(b_row[j * b.column_stride]);
                              }
                          }
                          for (std::int64_t j = 0; j < columns; ++j) {
                              y_row[j] = static_cast<T>(sum[static_cast<std::size_t>(j)]);
                          }
                      }
                  });
}

}  // namespace

void matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) {
    if (y.dtype() == DType::boolean) {
        throw Error("matmul", "there is no product of bool matrices. Convert them with to(DType::f32).");
    }
    visit(a.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>) {
            if (y.dtype() == DType::f32) return multiply(products_of<T, float>(a, b, y), accumulate);
        }
        if constexpr (!std::same_as<T, bool>) multiply(products_of<T>(a, b, y), accumulate);
    });
}

void linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
    // y is initialised with the bias, and the product is added to it: one rounding, also in half types.
    copy(bias.broadcast_alias("linear", y.shape()), y);
    matmul(x,
           weight.alias({weight.size(1), weight.size(0)}, {weight.strides()[1], weight.strides()[0]},
                        weight.offset()),
           y, /*accumulate=*/true);
}

void linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before, Tensor& y) {
    linear(x, weight, bias, before);
    unary(UnaryOp::gelu_tanh, before, y);
}

}  // namespace potluck::cpu
