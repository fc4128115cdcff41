#include <cmath>
#include <optional>
#include <vector>

#include "core/cpu/rows.h"

namespace potluck::cpu {
namespace {

/// What backward needs about each row of the input: normalised x = (x - mean) * reciprocal.
template <class T>
struct Statistics {
    const T* mean;  // nullptr: 0
    const T* reciprocal;
    T mean_of(std::int64_t row) const { return mean == nullptr ? T{0} : mean[row]; }
};

/// dx = reciprocal * (g - mean(g) - normalised * mean(g * normalised)) with g = weight * dy; mean(g) is the derivative
/// through the mean, which rms_norm does not have. The result is added to dx_so_far, unless that is nullptr.
template <class T>
void row_gradient(const T* x, const T* dy, const T* weight, T mean, T reciprocal, bool centered,
                  const T* dx_so_far, T* dx, std::int64_t n) {
    const auto g = [&](std::int64_t i) { return weight == nullptr ? dy[i] : weight[i] * dy[i]; };
    const auto normalised = [&, of = Normalised<T>(mean, reciprocal)](std::int64_t i) { return of(x[i]); };
    const auto count = static_cast<double>(n);
    const T mean_g = centered ? static_cast<T>(sum_of<T>(n, g) / count) : T{0};
    const T mean_product =
        static_cast<T>(sum_of<T>(n, [&](std::int64_t i) { return g(i) * normalised(i); }) / count);
    const auto gradient = [&](std::int64_t i) {
        return reciprocal * (g(i) - mean_g - normalised(i) * mean_product);
    };
    if (dx_so_far == nullptr)
        for (std::int64_t i = 0; i < n; ++i) dx[i] = gradient(i);
    else
        for (std::int64_t i = 0; i < n; ++i) dx[i] = dx_so_far[i] + gradient(i);
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

/// Backward of both norms. Each piece of rows computes a partial dweight and dbias; these are added in order.
template <class T>
void norm_backward(const Tensor& x, const Tensor& weight, Statistics<T> statistics, const Tensor& dy,
                   bool accumulate, Tensor& dx, Tensor& dweight, Tensor& dbias) {
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
        std::optional<RowReader<T>> dx_reader;
        std::optional<RowWriter<T>> writer;
        if (dx.defined() && accumulate) dx_reader.emplace(dx);
        if (dx.defined()) writer.emplace(dx);
        T* dweight_of = dweight.defined() ? dweights.data() + first / piece * width : nullptr;
        T* dbias_of = dbias.defined() ? dbiases.data() + first / piece * width : nullptr;
        for (std::int64_t row = first; row < last; ++row) {
            const T* values = x_reader.read(row);
            const T* gradients = dy_reader.read(row);
            const T mean = statistics.mean_of(row);
            const T reciprocal = statistics.reciprocal[row];
            const Normalised<T> normalised(mean, reciprocal);
            if (dweight_of != nullptr)
                for (std::int64_t i = 0; i < width; ++i)
                    dweight_of[i] += gradients[i] * normalised(values[i]);
            if (dbias_of != nullptr)
                for (std::int64_t i = 0; i < width; ++i) dbias_of[i] += gradients[i];
            if (!writer) continue;
            row_gradient(values, gradients, weight_of, mean, reciprocal, statistics.mean != nullptr,
                         dx_reader ? dx_reader->read(row) : nullptr, writer->begin(row), width);
            writer->end();
        }
    });
    if (dweight.defined()) combine(dweights, pieces, width, dweight);
    if (dbias.defined()) combine(dbiases, pieces, width, dbias);
}

/// sum = x + residual.
template <class T>
void add_row(const T* x, const T* residual, std::int64_t row, std::int64_t width, RowWriter<T>& sum) {
    T* to = sum.begin(row);
    for (std::int64_t i = 0; i < width; ++i) to[i] = x[i] + residual[i];
    sum.end();
}

/// y = (x - mean) * reciprocal * weight + bias.
template <class T>
void normalise_row(const T* x, T mean, double reciprocal, const std::vector<T>& weight,
                   const std::vector<T>& bias, T* y, std::int64_t n) {
    const Normalised<T> normalised(mean, static_cast<T>(reciprocal));
    if (std::isinf(static_cast<T>(reciprocal)) && std::isfinite(reciprocal))  // of tiny elements
        for (std::int64_t i = 0; i < n; ++i)
            y[i] = static_cast<T>((static_cast<double>(x[i]) - static_cast<double>(mean)) * reciprocal);
    else
        for (std::int64_t i = 0; i < n; ++i) y[i] = normalised(x[i]);
    if (!weight.empty())
        for (std::int64_t i = 0; i < n; ++i) y[i] *= weight[static_cast<std::size_t>(i)];
    if (!bias.empty())
        for (std::int64_t i = 0; i < n; ++i) y[i] += bias[static_cast<std::size_t>(i)];
}

/// Forward of both norms; mean_or_none is nullptr for rms_norm, which subtracts no mean.
void norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
          const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor* mean_or_none,
          Tensor& reciprocal_root) {
    const std::int64_t width = x.size(1);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> weight = read_vector<T>(weight_or_none);
        const std::vector<T> bias = read_vector<T>(bias_or_none);
        T* mean_of = mean_or_none == nullptr ? nullptr : mean_or_none->data<T>();
        T* reciprocal_of = reciprocal_root.data<T>();
        parallel_for(x.size(0), rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> x_reader(x);
            std::optional<RowReader<T>> residual_reader, sum_reader;
            std::optional<RowWriter<T>> sum_writer;
            if (residual_or_none.defined()) {
                residual_reader.emplace(residual_or_none);
                sum_reader.emplace(sum_or_none);
                sum_writer.emplace(sum_or_none);
            }
            RowWriter<T> writer(y);
            for (std::int64_t row = first; row < last; ++row) {
                const T* from = x_reader.read(row);
                if (sum_writer) {
                    add_row(from, residual_reader->read(row), row, width, *sum_writer);
                    from = sum_reader->read(row);  // as rounded to the dtype
                }
                const T mean = mean_of == nullptr ? T{0} : mean_of_row(from, width);
                const double reciprocal = mean_square(from, mean, width, epsilon).reciprocal_root(epsilon);
                if (mean_of != nullptr) mean_of[row] = mean;
                reciprocal_of[row] = static_cast<T>(reciprocal);
                normalise_row(from, mean, reciprocal, weight, bias, writer.begin(row), width);
                writer.end();
            }
        });
    });
}

}  // namespace

void layer_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none,
                const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& mean,
                Tensor& rstd) {
    norm(x, residual_or_none, weight_or_none, bias_or_none, epsilon, sum_or_none, y, &mean, rstd);
}

void layer_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                         Tensor& dweight_or_none, Tensor& dbias_or_none) {
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        norm_backward<T>(x, weight_or_none, {mean.data<T>(), rstd.data<T>()}, dy, accumulate, dx_or_none,
                         dweight_or_none, dbias_or_none);
    });
}

void rms_norm(const Tensor& x, const Tensor& residual_or_none, const Tensor& weight_or_none, double epsilon,
              Tensor& sum_or_none, Tensor& y, Tensor& rrms) {
    norm(x, residual_or_none, weight_or_none, {}, epsilon, sum_or_none, y, nullptr, rrms);
}

void rms_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& rrms, const Tensor& dy,
                       bool accumulate, Tensor& dx_or_none, Tensor& dweight_or_none) {
    Tensor no_bias;
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        norm_backward<T>(x, weight_or_none, {nullptr, rrms.data<T>()}, dy, accumulate, dx_or_none,
                         dweight_or_none, no_bias);
    });
}

}  // namespace potluck::cpu
