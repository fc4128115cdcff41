#pragma once

// For kernels that work along the last axis: whole rows in the compute type, and sums along them in a fixed order.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/convert.h"
#include "core/tensor.h"

namespace potluck::cpu {

template <class T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();

/// Number of rows that one thread processes at a time, so that a piece has about 16 thousand elements.
inline std::int64_t rows_per_piece(std::int64_t width) {
    return std::max<std::int64_t>(1, piece_size / std::max<std::int64_t>(1, width));
}

/// Reads rows along the last axis of a tensor of any strides and floating dtype as dense arrays of T (double or float).
/// A row that already has this layout is returned without a copy. One object per thread and piece.
template <class T>
class RowReader {
public:
    explicit RowReader(const Tensor& x)
        : base_(static_cast<const std::byte*>(x.raw_data())),
          dtype_(x.dtype()),
          element_(size_of(x.dtype())),
          width_(x.size(-1)),
          stride_(x.strides().back()),
          rows_(Shape(x.shape().begin(), x.shape().end() - 1),
                Strides(x.strides().begin(), x.strides().end() - 1)) {
        in_place_ = dtype_ == dtype_of<T>() && (stride_ == 1 || width_ <= 1);
        if (!in_place_) buffer_.resize(static_cast<std::size_t>(width_));
    }

    /// Valid until the next call.
    const T* read(std::int64_t row) {
        const std::byte* from = base_;
        rows_.for_each_run(
            row, 1, [&](std::int64_t offset, std::int64_t, std::int64_t) { from += offset * element_; });
        if (in_place_) return reinterpret_cast<const T*>(from);
        convert_to(buffer_.data(), from, dtype_, stride_, width_);
        return buffer_.data();
    }

private:
    const std::byte* base_;
    DType dtype_;
    std::int64_t element_, width_, stride_;
    Cursor rows_;
    bool in_place_;
    std::vector<T> buffer_;
};

/// Writes rows of a contiguous tensor of any floating dtype: `T* to = writer.begin(row); ...; writer.end();`
template <class T>
class RowWriter {
public:
    explicit RowWriter(Tensor& y)
        : base_(static_cast<std::byte*>(y.raw_data())),
          dtype_(y.dtype()),
          row_bytes_(y.size(-1) * size_of(y.dtype())),
          width_(y.size(-1)) {
        if (dtype_ != dtype_of<T>()) buffer_.resize(static_cast<std::size_t>(width_));
    }

    /// Returns where to write the row. The content is undefined, unless the reader of the same memory returned it.
    T* begin(std::int64_t row) {
        to_ = base_ + row * row_bytes_;
        return buffer_.empty() ? reinterpret_cast<T*>(to_) : buffer_.data();
    }
    void end() {
        if (!buffer_.empty()) convert_from(buffer_.data(), to_, dtype_, 1, width_);
    }

private:
    std::byte* base_;
    DType dtype_;
    std::int64_t row_bytes_, width_;
    std::byte* to_ = nullptr;
    std::vector<T> buffer_;
};

/// The elements of a vector (such as a weight) in the compute type; empty for an undefined tensor.
template <class T>
std::vector<T> read_vector(const Tensor& x) {
    if (!x.defined()) return {};
    std::vector<T> values(static_cast<std::size_t>(x.size(0)));
    if (!values.empty())
        convert_to(values.data(), x.raw_data(), x.dtype(), x.strides()[0],
                   static_cast<std::int64_t>(values.size()));
    return values;
}

/// Partial results that are kept in parallel, so that the compiler uses vector registers.
inline constexpr std::int64_t lane_count = 32;

/// term(0) + ... + term(n - 1), in lanes and blocks of a fixed size: at most a few dozen terms are added sequentially
/// in T, and the blocks in double.
template <class T, class Term>
double sum_of(std::int64_t n, Term&& term) {
    double total = 0;
    if (n < lane_count) {
        for (std::int64_t i = 0; i < n; ++i) total += static_cast<double>(term(i));
        return total;
    }
    for (std::int64_t first = 0; first < n; first += block_size) {
        const std::int64_t end = std::min(n, first + block_size);
        T lanes[lane_count] = {};
        std::int64_t i = first;
        for (; i + lane_count <= end; i += lane_count)
            for (std::int64_t lane = 0; lane < lane_count; ++lane) lanes[lane] += term(i + lane);
        for (std::int64_t lane = 0; i + lane < end; ++lane) lanes[lane] += term(i + lane);
        for (std::int64_t half = lane_count / 2; half > 0; half /= 2)
            for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        total += static_cast<double>(lanes[0]);
    }
    return total;
}

/// Mean of term(i) over a row; 0 for an empty row. When the sum overflows T it is computed in f64.
template <class T, class Term>
double mean_of(std::int64_t n, Term&& term) {
    if (n == 0) return 0;
    double total = sum_of<T>(n, [&](std::int64_t i) { return term(i, T{}); });
    if constexpr (std::is_same_v<T, float>)
        if (!std::isfinite(total))
            total = sum_of<double>(n, [&](std::int64_t i) { return term(i, double{}); });
    return total / static_cast<double>(n);
}

/// The mean of a row, taken relative to the first element: exact for a row of equal elements, whatever they are. f64
/// elements whose sum leaves the range are scaled by a power of two.
template <class T>
T mean_of_row(const T* x, std::int64_t n) {
    if (n == 0) return 0;
    const double distance = mean_of<T>(n, [&](std::int64_t i, auto zero) {
        using Wide = decltype(zero);
        return static_cast<Wide>(x[i]) - static_cast<Wide>(x[0]);
    });
    if constexpr (std::is_same_v<T, double>) {
        if (!std::isfinite(distance)) {
            const double scaled =
                mean_of<double>(n, [&](std::int64_t i, double) { return x[i] * 0x1p-64 - x[0] * 0x1p-64; });
            return (x[0] * 0x1p-64 + scaled) * 0x1p64;
        }
    }
    return static_cast<T>(static_cast<double>(x[0]) + distance);
}

/// A mean of squares: value * 2^(2 exponent).
struct MeanSquare {
    double value = 0.0;
    int exponent = 0;

    double plain() const { return std::ldexp(value, 2 * exponent); }
    /// 1 / sqrt(mean of squares + epsilon).
    double reciprocal_root(double epsilon) const {
        if (exponent == 0) return 1 / std::sqrt(value + epsilon);
        return std::ldexp(1 / std::sqrt(value + std::ldexp(epsilon, -2 * exponent)), -exponent);
    }
};

/// Mean of (x - center)^2 over a row: the second of the two passes. Squares out of the range of T are computed in f64,
/// or scaled by a power of two; `epsilon` is the number that will be added to the mean.
template <class T>
MeanSquare mean_square(const T* x, T center, std::int64_t n, double epsilon) {
    if (n == 0) return {};
    const auto count = static_cast<double>(n);
    const double total = sum_of<T>(n, [&](std::int64_t i) {
        const T deviation = x[i] - center;
        return deviation * deviation;
    });
    if constexpr (std::is_same_v<T, float>) {
        if (total > 1e-30 && total < std::numeric_limits<double>::infinity()) return {total / count};
        return {sum_of<double>(n,
                               [&](std::int64_t i) {
                                   const double deviation =
                                       static_cast<double>(x[i]) - static_cast<double>(center);
                                   return deviation * deviation;
                               }) /
                count};
    } else {
        if (total >= 0x1p-900 && total <= 0x1p900) return {total / count};
        // part(i) is the distance of an element times 2^-scale.
        const auto scaled = [&](auto part, int scale) -> MeanSquare {
            double largest = std::ldexp(std::sqrt(epsilon), -scale);
            for (std::int64_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(part(i)));
            if (!(largest > 0.0) || !std::isfinite(largest)) return {total / count};
            const int exponent = std::ilogb(largest);
            const double squares = sum_of<double>(n, [&](std::int64_t i) {
                const double small = std::ldexp(part(i), -exponent);
                return small * small;
            });
            return {squares / count, exponent + scale};
        };
        const MeanSquare result = scaled([&](std::int64_t i) { return x[i] - center; }, 0);
        if (!std::isinf(result.value)) return result;
        // The distance of two finite numbers may leave the range, too.
        return scaled([&](std::int64_t i) { return x[i] * 0.5 - center * 0.5; }, 1);
    }
}

/// (x - mean) * reciprocal, also where the distance of two finite numbers leaves the range of T: that happens only in rows
/// whose deviation is not far from its end, and there halves are taken.
template <class T>
class Normalised {
public:
    Normalised(T mean, T reciprocal)
        : part_(reciprocal > T{0} && reciprocal < smallest_whole ? T(0.5) : T{1}),
          mean_(mean * part_),
          factor_(reciprocal / part_) {}

    T operator()(T x) const { return (x * part_ - mean_) * factor_; }

private:
    static constexpr T smallest_whole = std::is_same_v<T, float> ? T(0x1p-96) : T(0x1p-900);
    T part_, mean_, factor_;
};

/// The largest of n elements, ignoring NaN; -inf when there is none.
template <class T>
T largest_of(const T* x, std::int64_t n) {
    T lanes[lane_count];
    std::fill_n(lanes, lane_count, -infinity<T>);
    std::int64_t i = 0;
    for (; i + lane_count <= n; i += lane_count)
        for (std::int64_t lane = 0; lane < lane_count; ++lane)
            lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    for (std::int64_t lane = 0; i + lane < n; ++lane)
        lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    return *std::max_element(lanes, lanes + lane_count);
}

}  // namespace potluck::cpu
