#include <cmath>
#include <vector>

#include "core/cpu/rows.h"
#include "core/cpu/vector_math.h"
#include "core/kernel_errors.h"
#include "core/kernel_specs.h"

namespace potluck::cpu {
namespace {

/// The labels as a dense array, each of them a class or ignore_index.
std::vector<std::int64_t> checked_labels(const Tensor& labels, std::int64_t classes,
                                         std::int64_t ignore_index) {
    const std::vector<std::int64_t> values = read_vector<std::int64_t>(labels);
    for (std::size_t row = 0; row < values.size(); ++row) {
        const std::int64_t label = values[row];
        if ((label >= 0 && label < classes) || label == ignore_index) continue;
        throw bad_label(label, static_cast<std::int64_t>(row), classes, ignore_index);
    }
    return values;
}

/// The loss of one row and its logsumexp.
template <class T>
void row_loss(const T* x, std::int64_t classes, std::int64_t label, double smoothing, T& loss, T& logsumexp) {
    const T largest = largest_of(x, classes);
    const T shift = largest == -infinity<T> ? T{0} : largest;
    const double total = sum_of<T>(classes, [&](std::int64_t i) { return exponential_weight(x[i] - shift); });
    if (total == 0) {  // -inf only: every class is impossible
        loss = infinity<T>;
        logsumexp = -infinity<T>;
        return;
    }
    const double logarithm_of_total = std::log(total);
    logsumexp = static_cast<T>(static_cast<double>(shift) + logarithm_of_total);
    double distance = (1 - smoothing) * (static_cast<double>(shift) - static_cast<double>(x[label]));
    if (smoothing != 0)
        distance += smoothing / static_cast<double>(classes) *
                    sum_of<T>(classes, [&](std::int64_t i) { return shift - x[i]; });
    loss = static_cast<T>(logarithm_of_total + distance);
}

/// dx = dloss (softmax(x) - target), where target is the one-hot label after smoothing.
template <class T>
void row_gradient(const T* x, std::int64_t classes, std::int64_t label, double smoothing, T logsumexp,
                  T dloss, T* dx) {
    const T shift = logsumexp == -infinity<T> ? T{0} : logsumexp;
    const T uniform = static_cast<T>(smoothing / static_cast<double>(classes));
    for (std::int64_t i = 0; i < classes; ++i) dx[i] = dloss * (exponential_weight(x[i] - shift) - uniform);
    dx[label] -= static_cast<T>(1 - smoothing) * dloss;
}

}  // namespace

void cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropySpec& options,
                   Tensor& losses, Tensor& logsumexp) {
    const std::int64_t rows = logits.size(0);
    const std::int64_t classes = logits.size(1);
    const std::vector<std::int64_t> label_of = checked_labels(labels, classes, options.ignore_index);
    visit_floating_compute(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        T* loss_of = losses.data<T>();
        T* logsumexp_of = logsumexp.data<T>();
        parallel_for(rows, rows_per_piece(classes), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(logits);
            for (std::int64_t row = first; row < last; ++row) {
                const std::int64_t label = label_of[static_cast<std::size_t>(row)];
                loss_of[row] = 0;
                logsumexp_of[row] = 0;
                if (label == options.ignore_index) continue;
                row_loss(reader.read(row), classes, label, options.label_smoothing, loss_of[row],
                         logsumexp_of[row]);
            }
        });
    });
}

void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& logsumexp,
                            const Tensor& dlosses, const CrossEntropySpec& options, Tensor& dlogits) {
    const std::int64_t rows = logits.size(0);
    const std::int64_t classes = logits.size(1);
    const std::vector<std::int64_t> label_of = checked_labels(labels, classes, options.ignore_index);
    visit_floating_compute(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> dloss_of = read_vector<T>(dlosses);
        const std::vector<T> logsumexp_of = read_vector<T>(logsumexp);
        parallel_for(rows, rows_per_piece(classes), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(logits);
            RowWriter<T> writer(dlogits);
            for (std::int64_t row = first; row < last; ++row) {
                const auto index = static_cast<std::size_t>(row);
                T* to = writer.begin(row);
                if (label_of[index] == options.ignore_index)
                    std::fill_n(to, classes, T{0});
                else
                    row_gradient(reader.read(row), classes, label_of[index], options.label_smoothing,
                                 logsumexp_of[index], dloss_of[index], to);
                writer.end();
            }
        });
    });
}

}  // namespace potluck::cpu
