#pragma once

// Small matrix products on tiles in the cache: the inner loop of attention. A tile is row-major, and its width is
// padded to whole vectors, so that there are no remaining columns.

#include <cstdint>

namespace potluck::cpu {

#if defined(__AVX512F__)
inline constexpr std::int64_t vector_bytes = 64;
inline constexpr int product_rows = 8;  // rows at a time: rows x 2 sums must fit into the registers
#elif defined(__AVX__)
inline constexpr std::int64_t vector_bytes = 32;
inline constexpr int product_rows = 6;
#else
inline constexpr std::int64_t vector_bytes = 16;
inline constexpr int product_rows = 6;
#endif

/// Number of elements in one vector register.
template <class T>
inline constexpr std::int64_t vector_width = vector_bytes / static_cast<std::int64_t>(sizeof(T));

/// The padded width of a tile with `columns` columns.
template <class T>
constexpr std::int64_t padded(std::int64_t columns) {
    return (columns + vector_width<T> - 1) / vector_width<T> * vector_width<T>;
}

/// The left factor of a product, with any strides (so it may be a tile or a transposed tile).
template <class T>
struct LeftTile {
    const T* data;
    std::int64_t row_stride, column_stride;
};

namespace detail {

/// Computes `rows` x `vectors` vectors of c, with the sums in registers.
template <class T, int rows, int vectors>
void product_block(std::int64_t depth, LeftTile<T> a, const T* b, std::int64_t b_width, T* c,
                   std::int64_t c_width, bool accumulate) {
    typedef T Vector __attribute__((vector_size(vector_bytes)));
    typedef T InMemory __attribute__((vector_size(vector_bytes), aligned(alignof(T)), may_alias));
    Vector sums[rows][vectors] = {};
    if (accumulate) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v)
                sums[i][v] = reinterpret_cast<const InMemory*>(c + i * c_width)[v];
    }
    for (std::int64_t p = 0; p < depth; ++p) {
        const T* column = a.data + p * a.column_stride;
        Vector row[vectors];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) row[v] = reinterpret_cast<const InMemory*>(b + p * b_width)[v];
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
            const T factor = column[i * a.row_stride];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) sums[i][v] += factor * row[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) reinterpret_cast<InMemory*>(c + i * c_width)[v] = sums[i][v];
}

template <class T, int rows, int vectors>
void product_rows_left(std::int64_t count, std::int64_t depth, LeftTile<T> a, const T* b,
                       std::int64_t b_width, T* c, std::int64_t c_width, bool accumulate) {
    std::int64_t i = 0;
    for (; i + rows <= count; i += rows)
        product_block<T, rows, vectors>(depth, {a.data + i * a.row_stride, a.row_stride, a.column_stride}, b,
                                        b_width, c + i * c_width, c_width, accumulate);
    if constexpr (rows > 1) {
        a.data += i * a.row_stride;
        product_rows_left<T, rows / 2, vectors>(count - i, depth, a, b, b_width, c + i * c_width, c_width,
                                                accumulate);
    }
}

}  // namespace detail

/// c = a b, or c += a b: a (rows, depth), b (depth, columns), c (rows, columns); columns are whole vectors, and b and c
/// have row strides b_width and c_width.
template <class T>
void tile_product(std::int64_t rows, std::int64_t columns, std::int64_t depth, LeftTile<T> a, const T* b,
                  std::int64_t b_width, T* c, std::int64_t c_width, bool accumulate) {
    constexpr std::int64_t pair = 2 * vector_width<T>;
    std::int64_t j = 0;
    for (; j + pair <= columns; j += pair)
        detail::product_rows_left<T, product_rows, 2>(rows, depth, a, b + j, b_width, c + j, c_width,
                                                      accumulate);
    if (j < columns)
        detail::product_rows_left<T, product_rows, 1>(rows, depth, a, b + j, b_width, c + j, c_width,
                                                      accumulate);
}

namespace detail {

/// Reduces `bytes` of lanes by halves.
template <class T, std::int64_t bytes, class Operation>
T fold_lanes(const T* lanes, Operation operation) {
    if constexpr (bytes == 2 * sizeof(T)) {
        return operation(lanes[0], lanes[1]);
    } else {
        typedef T Half __attribute__((vector_size(bytes / 2), may_alias));
        const Half joined = operation(*reinterpret_cast<const Half*>(lanes),
                                      *reinterpret_cast<const Half*>(lanes + bytes / 2 / sizeof(T)));
        return fold_lanes<T, bytes / 2>(reinterpret_cast<const T*>(&joined), operation);
    }
}

}  // namespace detail

/// Reduces all elements of a row of whole vectors (at least one) by an operation that is defined on numbers and
/// vectors.
template <class T, class Operation>
T fold_row(const T* row, std::int64_t width, Operation operation) {
    typedef T Vector __attribute__((vector_size(vector_bytes), may_alias));
    typedef T InMemory __attribute__((vector_size(vector_bytes), aligned(alignof(T)), may_alias));
    Vector joined = *reinterpret_cast<const InMemory*>(row);
    for (std::int64_t j = vector_width<T>; j < width; j += vector_width<T>)
        joined = operation(joined, Vector(*reinterpret_cast<const InMemory*>(row + j)));
    return detail::fold_lanes<T, vector_bytes>(reinterpret_cast<const T*>(&joined), operation);
}

}  // namespace potluck::cpu
