#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/rows.h"

namespace potluck {
namespace {

using namespace cpu;

/// Mean over a row of term(i), which is 0 for an empty row. When the sum leaves the range of T it is taken in
/// f64.
template <class T, class Term>
double mean_of(std::int64_t n, Term&& term) {
    if (n == 0) return 0;
    double total = sum_of<T>(n, [&](std::int64_t i) { return term(i, T{}); });
    if constexpr (std::is_same_v<T, float>)
        if (std::isinf(total)) total = sum_of<double>(n, [&](std::int64_t i) { return term(i, double{}); });
    return total / static_cast<double>(n);
}

/// Taken relative to the first element: exact for a row of equal elements, whatever they are.
template <class T>
T mean_of_row(const T* x, std::int64_t n) {
    if (n == 0) return 0;
    const double distance = mean_of<T>(n, [&](std::int64_t i, auto zero) {
        using Wide = decltype(zero);
        return static_cast<Wide>(x[i]) - static_cast<Wide>(x[0]);
    });
    return static_cast<T>(static_cast<double>(x[0]) + distance);
}

/// Mean of (x - center)^2.
template <class T>
double mean_square(const T* x, T center, std::int64_t n) {
    return mean_of<T>(n, [&](std::int64_t i, auto zero) {
        using Wide = decltype(zero);
        const Wide deviation = static_cast<Wide>(x[i]) - static_cast<Wide>(center);
        return deviation * deviation;
    });
}

/// What backward needs to know of the input, row by row: normalised x = (x - mean) * reciprocal.
template <class T>
struct Statistics {
    const T* mean;  // nullptr: 0
    const T* reciprocal;
    T mean_of(std::int64_t row) const { return mean == nullptr ? T{0} : mean[row]; }
};

/// dx = reciprocal * (g - mean(g) - normalised * mean(g * normalised)) with g = weight * dy; the middle term
/// stands for the subtracted mean and is absent in rms_norm.
template <class T>
void row_gradient(const T* x, const T* dy, const T* weight, T mean, T reciprocal, bool centered, T* dx,
                  std::int64_t n) {
    const auto g = [&](std::int64_t i) { return weight == nullptr ? dy[i] : weight[i] * dy[i]; };
    const auto normalised = [&](std::int64_t i) { return (x[i] - mean) * reciprocal; };
    const auto count = static_cast<double>(n);
    const T mean_g = centered ? static_cast<T>(sum_of<T>(n, g) / count) : T{0};
    const T mean_product =
        static_cast<T>(sum_of<T>(n, [&](std::int64_t i) { return g(i) * normalised(i); }) / count);
    for (std::int64_t i = 0; i < n; ++i) dx[i] = reciprocal * (g(i) - mean_g - normalised(i) * mean_product);
}

/// y = sum over pieces of partial (pieces, width), in the order of the pieces and in f64.
template <class T>
void combine(const std::vector<T>& partial, std::int64_t pieces, std::int64_t width, Tensor& y) {
    std::vector<double> totals(static_cast<std::size_t>(width));
    parallel_for(width, block_size, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t piece = 0; piece < pieces; ++piece) {
            const T* row = partial.data() + piece * width;
            for (std::int64_t i = first; i < last; ++i)
                totals[static_cast<std::size_t>(i)] += static_cast<double>(row[i]);
        }
    });
    if (width > 0) convert_from(totals.data(), y.raw_data(), y.dtype(), 1, width);
}

/// Backward of both norms. Each piece of rows sums its share of dweight and dbias; the shares are added in
/// order.
template <class T>
void norm_backward(const Tensor& x, const Tensor& weight, Statistics<T> statistics, const Tensor& dy,
                   Tensor& dx, Tensor& dweight, Tensor& dbias) {
    const std::int64_t rows = x.size(0);
    const std::int64_t width = x.size(1);
    const std::int64_t piece = std::max<std::int64_t>(16, rows_per_piece(width));
    const std::int64_t pieces = (rows + piece - 1) / piece;
    const std::vector<T> weights = read_vector<T>(weight);
    const T* weight_of = weight.defined() ? weights.data() : nullptr;
    std::vector<T> dweights(static_cast<std::size_t>(dweight.defined() ? pieces * width : 0));
    std::vector<T> dbiases(static_cast<std::size_t>(dbias.defined() ? pieces * width : 0));
    parallel_for(width == 0 ? 0 : rows, piece, [&](std::int64_t first, std::int64_t last) {
        RowReader<T> x_reader(x);
        RowReader<T> dy_reader(dy);
        std::optional<RowWriter<T>> writer;
        if (dx.defined()) writer.emplace(dx);
        T* dweight_of = dweight.defined() ? dweights.data() + first / piece * width : nullptr;
        T* dbias_of = dbias.defined() ? dbiases.data() + first / piece * width : nullptr;
        for (std::int64_t row = first; row < last; ++row) {
            const T* values = x_reader.read(row);
            const T* gradients = dy_reader.read(row);
            const T mean = statistics.mean_of(row);
            const T reciprocal = statistics.reciprocal[row];
            if (dweight_of != nullptr)
                for (std::int64_t i = 0; i < width; ++i)
                    dweight_of[i] += gradients[i] * ((values[i] - mean) * reciprocal);
            if (dbias_of != nullptr)
                for (std::int64_t i = 0; i < width; ++i) dbias_of[i] += gradients[i];
            if (!writer) continue;
            row_gradient(values, gradients, weight_of, mean, reciprocal, statistics.mean != nullptr,
                         writer->begin(row), width);
            writer->end();
        }
    });
    if (dweight.defined()) combine(dweights, pieces, width, dweight);
    if (dbias.defined()) combine(dbiases, pieces, width, dbias);
}

}  // namespace

void CpuBackend::layer_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none,
                            double epsilon, Tensor& y, Tensor& mean, Tensor& reciprocal_deviation) {
    const std::int64_t width = x.size(1);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> weight = read_vector<T>(weight_or_none);
        const std::vector<T> bias = read_vector<T>(bias_or_none);
        T* mean_of = mean.data<T>();
        T* reciprocal_of = reciprocal_deviation.data<T>();
        parallel_for(x.size(0), rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(x);
            RowWriter<T> writer(y);
            for (std::int64_t row = first; row < last; ++row) {
                const T* from = reader.read(row);
                T* to = writer.begin(row);
                const T center = mean_of_row(from, width);
                const T reciprocal =
                    static_cast<T>(1 / std::sqrt(mean_square(from, center, width) + epsilon));
                mean_of[row] = center;
                reciprocal_of[row] = reciprocal;
                for (std::int64_t i = 0; i < width; ++i) to[i] = (from[i] - center) * reciprocal;
                if (!weight.empty())
                    for (std::int64_t i = 0; i < width; ++i) to[i] *= weight[static_cast<std::size_t>(i)];
                if (!bias.empty())
                    for (std::int64_t i = 0; i < width; ++i) to[i] += bias[static_cast<std::size_t>(i)];
                writer.end();
            }
        });
    });
}

void CpuBackend::layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                                     const Tensor& reciprocal_deviation, const Tensor& dy, Tensor& dx_or_none,
                                     Tensor& dweight_or_none, Tensor& dbias_or_none) {
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        norm_backward<T>(x, weight_or_none, {mean.data<T>(), reciprocal_deviation.data<T>()}, dy, dx_or_none,
                         dweight_or_none, dbias_or_none);
    });
}

void CpuBackend::rms_norm(const Tensor& x, const Tensor& weight_or_none, double epsilon, Tensor& y,
                          Tensor& reciprocal_rms) {
    const std::int64_t width = x.size(1);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> weight = read_vector<T>(weight_or_none);
        T* reciprocal_of = reciprocal_rms.data<T>();
        parallel_for(x.size(0), rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(x);
            RowWriter<T> writer(y);
            for (std::int64_t row = first; row < last; ++row) {
                const T* from = reader.read(row);
                T* to = writer.begin(row);
                const T reciprocal = static_cast<T>(1 / std::sqrt(mean_square(from, T{0}, width) + epsilon));
                reciprocal_of[row] = reciprocal;
                for (std::int64_t i = 0; i < width; ++i) to[i] = from[i] * reciprocal;
                if (!weight.empty())
                    for (std::int64_t i = 0; i < width; ++i) to[i] *= weight[static_cast<std::size_t>(i)];
                writer.end();
            }
        });
    });
}

void CpuBackend::rms_norm_backward(const Tensor& x, const Tensor& weight_or_none,
                                   const Tensor& reciprocal_rms, const Tensor& dy, Tensor& dx_or_none,
                                   Tensor& dweight_or_none) {
    Tensor no_bias;
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        norm_backward<T>(x, weight_or_none, {nullptr, reciprocal_rms.data<T>()}, dy, dx_or_none,
                         dweight_or_none, no_bias);
    });
}

}  // namespace potluck
