#include <cmath>
#include <optional>
#include <vector>

#include "core/cpu/rows.h"

// Batch norm. Statistics and gradients are sums over a channel: each thread processes whole channels and gathers each
// into a dense row first, so that the sums are those of norm.cpp and do not depend on the number of threads.

namespace potluck::cpu {
namespace {

/// x (batch, channels, positions) as (channels, batch, positions).
Tensor by_channel(const Tensor& x) {
    return x.alias({x.size(1), x.size(0), x.size(2)}, {x.strides()[1], x.strides()[0], x.strides()[2]},
                   x.offset());
}

/// Gathers consecutive channels as dense rows of batch * positions elements.
template <class T>
class ChannelReader {
public:
    explicit ChannelReader(const Tensor& x)
        : reader_(by_channel(x)), row_(static_cast<std::size_t>(x.size(0) * x.size(2))) {}

    const T* read(std::int64_t channel) {
        const auto n = static_cast<std::int64_t>(row_.size());
        for (std::int64_t i = 0; i < n; i += block_size) {
            const std::int64_t length = std::min(block_size, n - i);
            std::copy_n(reader_.read(channel * n + i, length), length, row_.data() + i);
        }
        return row_.data();
    }

private:
    BlockReader<T> reader_;
    std::vector<T> row_;
};

/// Computes value(i) for each element i of a channel.
template <class T, class Value>
void write_channel(BlockWriter<T>& writer, std::int64_t channel, std::int64_t n, const Value& value) {
    for (std::int64_t first = 0; first < n; first += block_size) {
        const std::int64_t length = std::min(block_size, n - first);
        T* to = writer.begin(channel * n + first, length);
        for (std::int64_t i = 0; i < length; ++i) to[i] = value(first + i);
        writer.end();
    }
}

void store(const std::vector<double>& values, Tensor& y) {
    if (!values.empty())
        convert_from(values.data(), y.raw_data(), y.dtype(), 1, static_cast<std::int64_t>(values.size()));
}

}  // namespace

void batch_norm_statistics(const Tensor& x, double epsilon, Tensor& mean, Tensor& variance, Tensor& rstd) {
    const std::int64_t n = x.size(0) * x.size(2);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        T* mean_of = mean.data<T>();
        T* variance_of = variance.data<T>();
        T* reciprocal_of = rstd.data<T>();
        parallel_for(x.size(1), rows_per_piece(n), [&](std::int64_t first, std::int64_t last) {
            ChannelReader<T> reader(x);
            for (std::int64_t channel = first; channel < last; ++channel) {
                const T* values = reader.read(channel);
                const T center = mean_of_row(values, n);
                const MeanSquare spread = mean_square(values, center, n, epsilon);
                mean_of[channel] = center;
                variance_of[channel] = static_cast<T>(spread.plain());
                reciprocal_of[channel] = static_cast<T>(spread.reciprocal_root(epsilon));
            }
        });
    });
}

void batch_norm(const Tensor& x, const Tensor& weight_or_none, const Tensor& bias_or_none, const Tensor& mean,
                const Tensor& rstd, Tensor& y) {
    const std::int64_t channels = x.size(1), positions = x.size(2);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> weight = read_vector<T>(weight_or_none);
        const std::vector<T> bias = read_vector<T>(bias_or_none);
        const std::vector<T> center = read_vector<T>(mean);
        const std::vector<T> reciprocal = read_vector<T>(rstd);
        BlockMap<T, T>::run_at(y, x, [&](std::int64_t first, T* to, const T* from, std::int64_t n) {
            std::int64_t channel = first / positions % channels;
            std::int64_t run = positions - first % positions;  // remaining elements of this channel
            for (std::int64_t done = 0; done < n; run = positions) {
                const auto c = static_cast<std::size_t>(channel);
                const Normalised<T> normalised(center[c], reciprocal[c]);
                const T factor = weight.empty() ? T{1} : weight[c];
                const T offset = bias.empty() ? T{0} : bias[c];
                const std::int64_t end = std::min(n, done + run);
                for (; done < end; ++done) to[done] = normalised(from[done]) * factor + offset;
                channel = channel + 1 == channels ? 0 : channel + 1;
            }
        });
    });
}

// With g = weight * dy and normalised = (x - mean) * reciprocal, over the n elements of a channel:
//   dweight = sum(dy * normalised), dbias = sum(dy),
//   dx = reciprocal * (g - mean(g) - normalised * mean(g * normalised)), or reciprocal * g with given statistics.
void batch_norm_backward(const Tensor& x, const Tensor& weight_or_none, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dy, bool batch_statistics, Tensor& dx_or_none,
                         Tensor& dweight_or_none, Tensor& dbias_or_none) {
    const std::int64_t channels = x.size(1), n = x.size(0) * x.size(2);
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> weight = read_vector<T>(weight_or_none);
        const std::vector<T> center = read_vector<T>(mean);
        const std::vector<T> reciprocal = read_vector<T>(rstd);
        std::vector<double> dweight(static_cast<std::size_t>(channels));
        std::vector<double> dbias(static_cast<std::size_t>(channels));
        Tensor dx = dx_or_none.defined() ? by_channel(dx_or_none) : Tensor();
        parallel_for(channels, rows_per_piece(n), [&](std::int64_t first, std::int64_t last) {
            ChannelReader<T> x_reader(x), dy_reader(dy);
            std::optional<BlockWriter<T>> writer;
            if (dx.defined()) writer.emplace(dx);
            for (std::int64_t channel = first; channel < last; ++channel) {
                const auto c = static_cast<std::size_t>(channel);
                const T* values = x_reader.read(channel);
                const T* slopes = dy_reader.read(channel);
                const T scale = reciprocal[c];
                const Normalised<T> normalised_of(center[c], scale);
                const auto normalised = [&](std::int64_t i) { return normalised_of(values[i]); };
                dweight[c] = sum_of<T>(n, [&](std::int64_t i) { return slopes[i] * normalised(i); });
                dbias[c] = sum_of<T>(n, [&](std::int64_t i) { return slopes[i]; });
                if (!writer || n == 0) continue;
                const T factor = scale * (weight.empty() ? T{1} : weight[c]);
                const auto count = static_cast<double>(n);
                const T mean_slope = batch_statistics ? static_cast<T>(dbias[c] / count) : T{0};
                const T mean_product = batch_statistics ? static_cast<T>(dweight[c] / count) : T{0};
                write_channel(*writer, channel, n, [&](std::int64_t i) {
                    return factor * (slopes[i] - mean_slope - normalised(i) * mean_product);
                });
            }
        });
        if (dweight_or_none.defined()) store(dweight, dweight_or_none);
        if (dbias_or_none.defined()) store(dbias, dbias_or_none);
    });
}

}  // namespace potluck::cpu
