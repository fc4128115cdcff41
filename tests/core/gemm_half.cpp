// Products of half types below the ops: every layout, size and destination, against sums in f64.

#include "core/cpu/gemm_half.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/skip.h"

using namespace potluck;

namespace {

using cpu::Matrix;

enum class Layout { rows, columns, gaps };

/// Elements in a layout, in memory that ends with the last of them: a sanitizer sees what is read beyond it.
template <class T>
struct Operand {
    std::vector<T> memory;
    Matrix<const T> matrix;

    Operand(std::int64_t rows, std::int64_t columns, Layout layout, std::uint32_t seed) {
        const std::int64_t row_stride = layout == Layout::columns ? 1
                                        : layout == Layout::rows  ? columns + 1
                                                                  : 2 * columns + 1;
        const std::int64_t column_stride = layout == Layout::columns ? rows + 2
                                           : layout == Layout::rows  ? 1
                                                                     : 2;
        const bool is_empty = rows == 0 || columns == 0;
        const std::int64_t last = (rows - 1) * row_stride + (columns - 1) * column_stride;
        memory.resize(static_cast<std::size_t>(is_empty ? 0 : last + 1));
        for (T& element : memory) {
            seed = seed * 1664525 + 1013904223;
            element = T(static_cast<float>(seed >> 8) * 0x1p-23F - 1.0F);
        }
        matrix = {memory.data(), rows, columns, row_stride, column_stride};
    }
    T& at(std::int64_t row, std::int64_t column) {
        return memory[static_cast<std::size_t>(row * matrix.row_stride + column * matrix.column_stride)];
    }
};

/// The function under test: false where this machine cannot.
template <class T, class C>
using Product = bool (*)(const Matrix<const T>&, const Matrix<const T>&, const Matrix<C>&, bool);

template <class T, class C>
bool of_halves(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<C>& c, bool accumulate) {
    cpu::gemm(a, b, c, accumulate);
    return true;
}

bool of_onednn(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b, const Matrix<float>& c,
               bool accumulate) {
    return cpu::bfloat16_gemm(a, b, c, accumulate);
}

bool of_onednn(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b, const Matrix<bfloat16>& c,
               bool accumulate) {
    return cpu::bfloat16_gemm(a, b, c, accumulate);
}

/// The largest error of one product, in units of what rounding may do to it: the f32 sums, and the result once.
template <class T, class C>
double error_of(const Matrix<const T>& a, const Matrix<const T>& b, const std::vector<C>& before,
                const std::vector<C>& c, std::int64_t stride, bool accumulate) {
    const double rounding = std::is_same_v<C, float>     ? 0x1p-24
                            : std::is_same_v<C, float16> ? 0x1p-11
                                                         : 0x1p-8;
    double largest = 0.0;
    for (std::int64_t i = 0; i < a.rows; ++i)
        for (std::int64_t j = 0; j < b.columns; ++j) {
            const auto at = static_cast<std::size_t>(i * stride + j);
            double sum = accumulate ? static_cast<double>(static_cast<float>(before[at])) : 0.0;
            double magnitude = std::abs(sum);
            for (std::int64_t p = 0; p < a.columns; ++p) {
                const double term =
                    static_cast<double>(static_cast<float>(a.data[i * a.row_stride + p * a.column_stride])) *
                    static_cast<double>(static_cast<float>(b.data[p * b.row_stride + j * b.column_stride]));
                sum += term;
                magnitude += std::abs(term);
            }
            const double allowed = rounding * std::abs(sum) + 0x1p-20 * magnitude + 1e-6 * rounding;
            const double error = std::abs(static_cast<double>(static_cast<float>(c[at])) - sum);
            // NaN counts as an error too.
            if (!(error / allowed <= largest)) largest = error / allowed;
        }
    return largest;
}

struct Sizes {
    std::int64_t rows, columns, depth;
};

template <class T, class C>
void check_product(Product<T, C> product, const Sizes& sizes, Layout a_layout, Layout b_layout,
                   bool accumulate) {
    CAPTURE(sizes.rows);
    CAPTURE(sizes.columns);
    CAPTURE(sizes.depth);
    CAPTURE(static_cast<int>(a_layout));
    CAPTURE(static_cast<int>(b_layout));
    CAPTURE(accumulate);
    const Operand<T> a(sizes.rows, sizes.depth, a_layout, 1), b(sizes.depth, sizes.columns, b_layout, 2);
    const std::int64_t stride = sizes.columns + 3;
    const Operand<C> before(sizes.rows, stride, Layout::rows, 3);
    std::vector<C> c(static_cast<std::size_t>(sizes.rows * stride));
    for (std::size_t i = 0; i < c.size(); ++i) c[i] = before.memory[i];
    if (!product(a.matrix, b.matrix, {c.data(), sizes.rows, sizes.columns, stride, 1}, accumulate)) {
        // Refused for gaps: then nothing is written.
        CHECK((a_layout == Layout::gaps || b_layout == Layout::gaps));
        for (std::size_t i = 0; i < c.size(); ++i) CHECK(c[i] == before.memory[i]);
        return;
    }
    CHECK(error_of(a.matrix, b.matrix, before.memory, c, stride, accumulate) <= 1.0);
    for (std::int64_t i = 0; i < sizes.rows; ++i)
        for (std::int64_t j = sizes.columns; j < stride; ++j) {
            const auto beside = static_cast<std::size_t>(i * stride + j);
            CHECK(c[beside] == before.memory[beside]);
        }
}

template <class T, class C>
void check_products(Product<T, C> product) {
    for (const bool accumulate : {false, true}) {
        for (const Layout a : {Layout::rows, Layout::columns, Layout::gaps})
            for (const Layout b : {Layout::rows, Layout::columns, Layout::gaps})
                for (const Sizes& sizes : {Sizes{1, 1, 1},
                                           {1, 37, 65},
                                           {4, 33, 400},
                                           {5, 3, 7},
                                           {18, 35, 33},
                                           {0, 3, 2},
                                           {3, 0, 2},
                                           {3, 2, 0},
                                           {6, 2, 0}})
                    check_product(product, sizes, a, b, accumulate);
        check_product(product, {300, 17, 801}, Layout::rows, Layout::columns, accumulate);
        check_product(product, {2, 401, 801}, Layout::columns, Layout::rows, accumulate);
        check_product(product, {7, 2, 20001}, Layout::columns, Layout::rows, accumulate);
    }
}

/// Infinity and NaN stay in their rows and columns, also beside an inner size that fills no register.
template <class T>
void check_not_finite(Product<T, float> product, std::int64_t rows) {
    const std::int64_t columns = 19, depth = 35;
    for (const Layout layout : {Layout::rows, Layout::columns}) {
        Operand<T> a(rows, depth, layout, 1), b(depth, columns, layout, 2);
        for (std::int64_t p = 0; p < depth; ++p) {
            a.at(1, p) = T(std::numeric_limits<float>::quiet_NaN());
            b.at(p, 5) = T(std::numeric_limits<float>::infinity());
        }
        std::vector<float> c(static_cast<std::size_t>(rows * columns));
        REQUIRE(product(a.matrix, b.matrix, {c.data(), rows, columns, columns, 1}, false));
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < columns; ++j) {
                const float got = c[static_cast<std::size_t>(i * columns + j)];
                CAPTURE(i);
                CAPTURE(j);
                if (i == 1)
                    CHECK(std::isnan(got));
                else
                    CHECK(std::isfinite(got) == (j != 5));
            }
    }
}

/// 256 + (1 + 1/1024): more than half way to the next bf16, 258; a product that were rounded alone would be 1, and the
/// sum 257 would fall to the even 256. f16 has ten bits more below 1 and needs others: 2048 + (1 + 1/4096) gives 2050.
template <class T>
void check_one_rounding(Product<T, T> product, float before, float small, float after) {
    for (const std::int64_t rows : {std::int64_t{2}, std::int64_t{6}}) {
        std::vector<T> left;
        for (std::int64_t i = 0; i < rows; ++i) {
            left.push_back(T(1.0F));
            left.push_back(T(small));
        }
        const std::vector<T> right(2, T(1.0F));
        std::vector<T> c(static_cast<std::size_t>(rows), T(before));
        REQUIRE(product({left.data(), rows, 2, 2, 1}, {right.data(), 2, 1, 1, 1}, {c.data(), rows, 1, 1, 1},
                        true));
        for (const T& sum : c) CHECK(static_cast<float>(sum) == after);
    }
}

bool has_onednn_bfloat16() {
    const bfloat16 one(1.0F);
    float y = 0;
    return cpu::bfloat16_gemm({&one, 1, 1, 1, 1}, {&one, 1, 1, 1, 1}, Matrix<float>{&y, 1, 1, 1, 1}, false);
}

}  // namespace

TEST_CASE("gemm of half types: every layout, size and destination") {
    check_products<bfloat16, float>(of_halves);
    check_products<bfloat16, bfloat16>(of_halves);
    check_products<float16, float>(of_halves);
    check_products<float16, float16>(of_halves);
}

TEST_CASE("gemm of half types: infinity and NaN keep to their rows and columns") {
    for (const std::int64_t rows : {3, 37}) {
        check_not_finite<bfloat16>(of_halves, rows);
        check_not_finite<float16>(of_halves, rows);
    }
}

TEST_CASE("gemm of half types: a sum is rounded once, with what it is added to") {
    check_one_rounding<bfloat16>(of_halves, 256.0F, 0x1p-10F, 258.0F);
    check_one_rounding<float16>(of_halves, 2048.0F, 0x1p-12F, 2050.0F);
}

TEST_CASE("gemm of bf16 by oneDNN: the same contract, also where it is not the faster way") {
    if (!has_onednn_bfloat16()) return test::skip("oneDNN has no product of bf16 for this processor");
    check_products<bfloat16, float>(of_onednn);
    check_products<bfloat16, bfloat16>(of_onednn);
    for (const std::int64_t rows : {3, 37}) check_not_finite<bfloat16>(of_onednn, rows);
    check_one_rounding<bfloat16>(of_onednn, 256.0F, 0x1p-10F, 258.0F);
}
