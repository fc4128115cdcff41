#pragma once

// The states of reductions. Each struct accumulates blocks of a row (`first` is the position of the block in its row),
// merges the state of the following stretch, and computes the result in finish(). T is the compute type of x: double,
// float or int64.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/cpu/blocks.h"
#include "core/cpu/vector_math.h"

namespace potluck::cpu {

/// A sum in f64 that also accumulates its rounding errors (Neumaier, 1974).
struct CompensatedSum {
    double sum = 0.0;
    double lost = 0.0;

    void add(double value) {
        const double next = sum + value;
        // Infinities and NaN must be kept: their rounding error would be NaN.
        if (std::isfinite(next))
            lost += std::fabs(sum) >= std::fabs(value) ? (sum - next) + value : (value - next) + sum;
        sum = next;
    }
    double value() const { return std::isfinite(sum) ? sum + lost : sum; }
};

/// The sum of transform(values[i]) over one block, in f64. The pragma lets the compiler vectorise the sum, in an order
/// that is fixed at compile time.
template <class T, class Transform>
double block_sum(const T* values, std::int64_t n, Transform transform) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < n; ++i) sum += transform(static_cast<double>(values[i]));
    return sum;
}

/// A sum that may leave the range of f64 where what is made of it (a mean) does not: sum * 2^exponent. The exponent is 0
/// until then.
struct WideSum {
    CompensatedSum sum;
    int exponent = 0;

    /// Adds values[i] - center of one block.
    template <class T>
    void fold(const T* values, std::int64_t n, double center = 0.0) {
        const double terms = block_sum(values, n, [center](double x) { return x - center; });
        if constexpr (std::is_same_v<T, double>) {
            if (!std::isfinite(terms))
                return add(block_sum(values, n, [center](double x) { return x * step - center * step; }),
                           step_exponent);
        }
        add(terms, 0);
    }
    void add(double terms, int their_exponent) {
        if (their_exponent > exponent) widen();
        if (their_exponent < exponent) terms *= step;
        if (exponent == 0 && std::isfinite(terms) && !std::isfinite(sum.sum + terms)) {
            widen();
            terms *= step;
        }
        sum.add(terms);
    }
    void join(const WideSum& next) {
        add(next.sum.sum, next.exponent);
        sum.lost += next.exponent < exponent ? next.sum.lost * step : next.sum.lost;
    }
    /// The sum over n, times 2^-power.
    double over(double n, int power = 0) const { return std::ldexp(sum.value() / n, exponent - power); }

private:
    static constexpr double step = 0x1p-64;
    static constexpr int step_exponent = 64;

    void widen() {
        sum.sum *= step;
        sum.lost *= step;
        exponent = step_exponent;
    }
};

/// A sum of squares: sum * 2^(2 exponent). The exponent stays 0 while the squares are within the range of f64; so 1e200
/// and 1e-200 can be squared too, as in BLAS's nrm2.
struct SquareSum {
    CompensatedSum sum;
    int exponent = 0;

    /// Adds (values[i] - center)^2 of one block.
    template <class T>
    void fold(const T* values, std::int64_t n, double center) {
        const double squares =
            block_sum(values, n, [center](double x) { return (x - center) * (x - center); });
        if constexpr (std::is_same_v<T, double>) {
            if (!(squares >= 0x1p-900 && squares <= 0x1p900)) return fold_scaled(values, n, center, squares);
        }
        add(squares, 0);
    }
    void add(double squares, int their_exponent) {
        if (their_exponent != exponent) {
            if (squares == 0.0) return;
            const int common = sum.sum == 0.0 ? their_exponent : std::max(exponent, their_exponent);
            sum.sum = std::ldexp(sum.sum, 2 * (exponent - common));
            sum.lost = std::ldexp(sum.lost, 2 * (exponent - common));
            squares = std::ldexp(squares, 2 * (their_exponent - common));
            exponent = common;
        }
        sum.add(squares);
    }
    double value() const { return std::ldexp(sum.value(), 2 * exponent); }

private:
    void fold_scaled(const double* values, std::int64_t n, double center, double squares) {
        // The distance of two finite numbers may leave the range, too: then halves are taken.
        double part = 1.0;
        double largest = largest_of(values, n, center, part);
        if (std::isinf(largest)) largest = largest_of(values, n, center, part = 0.5);
        if (!(largest > 0.0) || !std::isfinite(largest)) return add(squares, 0);
        const int scale = std::ilogb(largest);
        add(block_sum(values, n,
                      [=](double x) {
                          const double scaled = std::ldexp(x * part - center * part, -scale);
                          return scaled * scaled;
                      }),
            part < 1.0 ? scale + 1 : scale);
    }
    static double largest_of(const double* values, std::int64_t n, double center, double part) {
        double largest = 0.0;
        for (std::int64_t i = 0; i < n; ++i)
            largest = std::fmax(largest, std::fabs(values[i] * part - center * part));
        return largest;
    }
};

/// The square root of the sum of squares.
template <class T>
struct Norm {
    using Result = double;
    SquareSum squares;

    void fold(const T* values, std::int64_t n, std::int64_t) { squares.fold(values, n, 0.0); }
    void join(const Norm& next) { squares.add(next.squares.sum.value(), next.squares.exponent); }
    Result finish(std::int64_t) const { return std::ldexp(std::sqrt(squares.sum.value()), squares.exponent); }
};

template <class T>
struct Sum {
    using Result = double;
    CompensatedSum total;

    void fold(const T* values, std::int64_t n, std::int64_t) {
        total.add(block_sum(values, n, [](double x) { return x; }));
    }
    void join(const Sum& next) {
        total.add(next.total.sum);
        total.lost += next.total.lost;
    }
    Result finish(std::int64_t) const { return total.value(); }
};

template <>
struct Sum<std::int64_t> {
    using Result = std::int64_t;
    std::uint64_t total = 0;  // wraps around

    void fold(const std::int64_t* values, std::int64_t n, std::int64_t) {
        for (std::int64_t i = 0; i < n; ++i) total += static_cast<std::uint64_t>(values[i]);
    }
    void join(const Sum& next) { total += next.total; }
    Result finish(std::int64_t) const { return static_cast<std::int64_t>(total); }
};

template <class T>
struct Mean {
    using Result = double;
    WideSum total;

    void fold(const T* values, std::int64_t n, std::int64_t) { total.fold(values, n); }
    void join(const Mean& next) { total.join(next.total); }
    Result finish(std::int64_t n) const { return total.over(static_cast<double>(n)); }
};

/// Whether `candidate` replaces `best`. NaN beats all numbers; nothing beats a NaN.
template <class T, bool largest>
bool beats(T candidate, T best) {
    if constexpr (std::is_integral_v<T>)
        return largest ? candidate > best : candidate < best;
    else
        return (largest ? candidate > best : candidate < best) || (candidate != candidate && best == best);
}

/// The identity: any element beats or equals it.
template <class T, bool largest>
constexpr T worst() {
    using Limits = std::numeric_limits<T>;
    if constexpr (Limits::has_infinity)
        return largest ? -Limits::infinity() : Limits::infinity();
    else
        return largest ? Limits::lowest() : Limits::max();
}

/// The largest or smallest element of one block; NaN if any is NaN.
template <class T, bool largest>
T block_extreme(const T* values, std::int64_t n) {
    T best = worst<T, largest>();
    int nan = 0;
    if constexpr (largest) {
#pragma omp simd reduction(max : best) reduction(| : nan)
        for (std::int64_t i = 0; i < n; ++i) {
            best = values[i] > best ? values[i] : best;
            nan |= values[i] != values[i];
        }
    } else {
#pragma omp simd reduction(min : best) reduction(| : nan)
        for (std::int64_t i = 0; i < n; ++i) {
            best = values[i] < best ? values[i] : best;
            nan |= values[i] != values[i];
        }
    }
    if constexpr (std::numeric_limits<T>::has_quiet_NaN)
        if (nan != 0) return std::numeric_limits<T>::quiet_NaN();
    return best;
}

template <class T, bool largest>
struct Extreme {
    using Result = T;
    T best = worst<T, largest>();

    void fold(const T* values, std::int64_t n, std::int64_t) {
        const T candidate = block_extreme<T, largest>(values, n);
        if (beats<T, largest>(candidate, best)) best = candidate;
    }
    void join(const Extreme& next) {
        if (beats<T, largest>(next.best, best)) best = next.best;
    }
    Result finish(std::int64_t) const { return best; }
};

template <class T, bool largest>
struct ExtremePlace {
    using Result = std::int64_t;
    T best = worst<T, largest>();
    std::int64_t place = -1;  // none yet

    void fold(const T* values, std::int64_t n, std::int64_t first) {
        const T candidate = block_extreme<T, largest>(values, n);
        if (place >= 0 && !beats<T, largest>(candidate, best)) return;
        std::int64_t i = 0;
        while (!(values[i] == candidate || (values[i] != values[i] && candidate != candidate))) ++i;
        best = candidate;
        place = first + i;
    }
    void join(const ExtremePlace& next) {
        if (next.place >= 0 && (place < 0 || beats<T, largest>(next.best, best))) *this = next;
    }
    Result finish(std::int64_t) const { return place; }
};

/// log(sum(exp(x))) in one pass: the sum is kept relative to the largest element so far.
template <class T>
struct LogSumExp {
    using Result = double;
    T largest = worst<T, true>();
    double sum = 0.0;

    void fold(const T* values, std::int64_t n, std::int64_t) {
        const T block_largest = block_extreme<T, true>(values, n);
        if (beats<T, true>(block_largest, largest)) rescale(block_largest);
        if (!std::isfinite(largest)) return;  // only -inf so far, or inf or NaN, which finish() returns
        T terms[block_size];
        for (std::int64_t i = 0; i < n; ++i) terms[i] = exponential(values[i] - largest);
        sum += block_sum(terms, n, [](double x) { return x; });
    }
    void join(const LogSumExp& next) {
        if (beats<T, true>(next.largest, largest)) rescale(next.largest);
        if (std::isfinite(largest))
            sum += next.sum * std::exp(static_cast<double>(next.largest) - static_cast<double>(largest));
    }
    Result finish(std::int64_t) const {
        return std::isfinite(largest) ? static_cast<double>(largest) + std::log(sum)
                                      : static_cast<double>(largest);
    }

private:
    void rescale(T new_largest) {
        sum = std::isfinite(largest)
                  ? sum * std::exp(static_cast<double>(largest) - static_cast<double>(new_largest))
                  : 0.0;
        largest = new_largest;
    }
};

template <class T, bool wanted>
struct Search {  // any: is an element true; all: is an element false
    using Result = bool;
    bool found = false;

    void fold(const T* values, std::int64_t n, std::int64_t) {
        bool here = false;
        for (std::int64_t i = 0; i < n; ++i) here |= (values[i] != T(0)) == wanted;
        found |= here;
    }
    void join(const Search& next) { found |= next.found; }
    Result finish(std::int64_t) const { return found == wanted; }
};

/// The sum of (x - center)^2, and that of (x - center), which corrects the rounding error of the center.
template <class T>
struct SquaredDeviations {
    double center = 0.0;
    SquareSum squares;
    WideSum deviations;

    void fold(const T* values, std::int64_t n, std::int64_t) {
        squares.fold(values, n, center);
        deviations.fold(values, n, center);
    }
    void join(const SquaredDeviations& next) {
        squares.add(next.squares.sum.value(), next.squares.exponent);
        deviations.join(next.deviations);
    }
    /// The variance, or its square root.
    double finish(std::int64_t n, double correction, bool root) const {
        const auto count = static_cast<double>(n);
        if (count <= correction) return std::numeric_limits<double>::quiet_NaN();
        const double rest = deviations.over(1.0, squares.exponent);
        const double sum = squares.sum.value() - rest * rest / count;
        const double scaled = (sum < 0.0 ? 0.0 : sum) / (count - correction);  // NaN stays NaN
        return root ? std::ldexp(std::sqrt(scaled), squares.exponent)
                    : std::ldexp(scaled, 2 * squares.exponent);
    }
};

}  // namespace potluck::cpu
