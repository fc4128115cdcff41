#include <algorithm>
#include <cmath>

#include "core/cpu/rows.h"
#include "core/cpu/vector_math.h"

namespace potluck::cpu {
namespace {

/// y = exp(x - shift); returns the sum.
template <class T>
double exponentials(const T* x, T shift, T* y, std::int64_t n) {
    double total = 0;
    for (std::int64_t first = 0; first < n; first += block_size) {
        const std::int64_t end = std::min(n, first + block_size);
        for (std::int64_t i = first; i < end; ++i) y[i] = exponential_weight(x[i] - shift);
        total += sum_of<T>(end - first, [&](std::int64_t i) { return y[first + i]; });
    }
    return total;
}

template <class T>
void softmax_row(const T* x, T* y, std::int64_t n) {
    const T largest = largest_of(x, n);
    const double total = exponentials(x, largest == -infinity<T> ? T{0} : largest, y, n);
    // A row of -inf only gives 0, not 0 / 0.
    const T factor = total == 0 ? T{0} : static_cast<T>(1 / total);
    for (std::int64_t i = 0; i < n; ++i) y[i] *= factor;
}

template <class T>
void log_softmax_row(const T* x, T* y, std::int64_t n) {
    const T largest = largest_of(x, n);
    const T shift = largest == -infinity<T> ? T{0} : largest;
    const double total = exponentials(x, shift, y, n);
    if (total == 0) {
        std::fill_n(y, n, -infinity<T>);
        return;
    }
    const T logarithm_of_total = static_cast<T>(std::log(total));
    for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] - shift) - logarithm_of_total;
}

template <class T>
void softmax_backward_row(const T* y, const T* dy, T* dx, std::int64_t n) {
    const T mean = static_cast<T>(sum_of<T>(n, [&](std::int64_t i) { return y[i] * dy[i]; }));
    for (std::int64_t i = 0; i < n; ++i) dx[i] = y[i] * (dy[i] - mean);
}

template <class T>
void log_softmax_backward_row(const T* y, const T* dy, T* dx, std::int64_t n) {
    // The softmax of a row of -inf only is defined as 0, a constant: its gradient is 0.
    const bool is_dead = std::all_of(y, y + n, [](T value) { return value == -infinity<T>; });
    if (is_dead) {
        std::fill_n(dx, n, T{0});
        return;
    }
    const T total = static_cast<T>(sum_of<T>(n, [&](std::int64_t i) { return dy[i]; }));
    for (std::int64_t i = 0; i < n; ++i) dx[i] = dy[i] - exponential_weight(y[i]) * total;
}

}  // namespace

void softmax(const Tensor& x, bool logarithm, Tensor& y) {
    if (y.count() == 0) return;
    const std::int64_t width = x.size(-1);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_for(x.count() / width, rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(x);
            RowWriter<T> writer(y);
            for (std::int64_t row = first; row < last; ++row) {
                const T* from = reader.read(row);
                T* to = writer.begin(row);
                if (logarithm)
                    log_softmax_row(from, to, width);
                else
                    softmax_row(from, to, width);
                writer.end();
            }
        });
    });
}

void softmax_backward(const Tensor& y, const Tensor& dy, bool logarithm, Tensor& dx) {
    if (dx.count() == 0) return;
    const std::int64_t width = y.size(-1);
    visit_floating_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_for(y.count() / width, rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> y_reader(y);
            RowReader<T> dy_reader(dy);
            RowWriter<T> writer(dx);
            for (std::int64_t row = first; row < last; ++row) {
                const T* values = y_reader.read(row);
                const T* gradients = dy_reader.read(row);
                T* to = writer.begin(row);
                if (logarithm)
                    log_softmax_backward_row(values, gradients, to, width);
                else
                    softmax_backward_row(values, gradients, to, width);
                writer.end();
            }
        });
    });
}

}  // namespace potluck::cpu
