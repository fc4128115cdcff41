// Optimizer steps: a single pass over parameter, gradient and moments, so that only memory bandwidth limits them.

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/random_words.h"
#include "core/kernel_specs.h"
#include "core/stochastic_rounding.h"
#include "core/update_rule.h"

namespace potluck::cpu {

namespace {

/// A tensor that is read and written in place, block by block.
template <class T>
class InPlace {
public:
    explicit InPlace(Tensor& x) : reader_(x), writer_(x) {}

    /// Elements [first, first + n), to be changed in place.
    T* begin(std::int64_t first, std::int64_t n) {
        const T* values = reader_.read(first, n);
        T* to = writer_.begin(first, n);
        if (to != values) std::copy(values, values + n, to);
        return to;
    }
    void end() { writer_.end(); }

private:
    BlockReader<T> reader_;
    BlockWriter<T> writer_;
};

/// A parameter that is updated block by block. It may be rounded in two ways: stochastically in place, or to nearest
/// into a second tensor.
template <class T>
class Parameter {
public:
    Parameter(Tensor& parameter, Tensor& rounded_or_none, bool stochastic_rounding, RandomKey key,
              std::int64_t first_random)
        : values_(parameter),
          stochastic_(stochastic_rounding && parameter.dtype() == DType::bf16),
          key_(key),
          first_random_(first_random) {
        if (rounded_or_none.defined()) rounded_.emplace(rounded_or_none);
    }

    T* begin(std::int64_t first, std::int64_t n) { return values_.begin(first, n); }
    /// Declares that the block returned by begin() holds the new values.
    void end(T* values, std::int64_t first, std::int64_t n) {
        if constexpr (std::is_same_v<T, float>)
            if (stochastic_) round(values, first, n);
        if (rounded_) {
            std::copy(values, values + n, rounded_->begin(first, n));
            rounded_->end();
        }
        values_.end();
    }

private:
    void round(float* values, std::int64_t first, std::int64_t n) {
        std::array<std::uint32_t, block_size> words;
        random_words(key_, first_random_ + first, n, words.data());
        for (std::int64_t i = 0; i < n; ++i) {
            const std::uint16_t bits = round_stochastically(std::bit_cast<std::uint32_t>(values[i]),
                                                            words[static_cast<std::size_t>(i)]);
            values[i] = std::bit_cast<float>(std::uint32_t{bits} << 16);
        }
    }

    InPlace<T> values_;
    std::optional<BlockWriter<T>> rounded_;
    bool stochastic_;
    RandomKey key_;
    std::int64_t first_random_;  // the random number of this tensor's first element
};

/// Elements [first, last) of one of the tensors of a call.
struct Piece {
    std::size_t tensor;
    std::int64_t first, last;
};

/// All pieces of tensors with so many elements, in order.
template <class CountOf>
std::vector<Piece> pieces_of(std::size_t tensors, const CountOf& count_of) {
    std::vector<Piece> pieces;
    for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
        const std::int64_t count = count_of(tensor);
        for (std::int64_t first = 0; first < count; first += piece_size)
            pieces.push_back({tensor, first, std::min(first + piece_size, count)});
    }
    return pieces;
}

/// Calls body(index of the piece, piece) for all, on all threads. One loop for all tensors: a small model has many small
/// ones, and starting the threads for each takes longer than its update.
template <class Body>
void for_each_piece(const std::vector<Piece>& pieces, const Body& body) {
    parallel_for(static_cast<std::int64_t>(pieces.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
            body(i, pieces[i]);
    });
}

template <class T>
void update(const AdamWSpec& step, UpdateTensors& tensors, std::int64_t begin, std::int64_t end) {
    const auto t = static_cast<double>(step.step);
    const T beta1 = static_cast<T>(step.beta1);
    const T beta2 = static_cast<T>(step.beta2);
    const T rest1 = static_cast<T>(1.0 - step.beta1);
    const T rest2 = static_cast<T>(1.0 - step.beta2);
    // m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon), with the corrections hoisted out of the loop
    const T rate = static_cast<T>(step.learning_rate / (1.0 - std::pow(step.beta1, t)));
    const T root_correction = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(step.beta2, t)));
    const T epsilon = static_cast<T>(step.epsilon);
    const T scale = static_cast<T>(step.gradient_scale);
    const T decay = static_cast<T>(step.decoupled ? step.learning_rate * step.weight_decay : 0.0);
    const T gradient_decay = static_cast<T>(step.decoupled ? 0.0 : step.weight_decay);

    Parameter<T> parameter(tensors.parameter, tensors.rounded_or_none, step.stochastic_rounding,
                           tensors.rounding_key, tensors.rounding_first);
    InPlace<T> first_moments(tensors.first_moment_or_none);
    InPlace<T> second_moments(tensors.second_moment_or_none);
    BlockReader<T> gradients(tensors.gradient);
    for (std::int64_t first = begin; first < end; first += block_size) {
        const std::int64_t n = std::min(block_size, end - first);
        T* p = parameter.begin(first, n);
        T* m = first_moments.begin(first, n);
        T* v = second_moments.begin(first, n);
        const T* dp = gradients.read(first, n);
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i) {
            const T g = dp[i] * scale + gradient_decay * p[i];
            m[i] = beta1 * m[i] + rest1 * g;
            v[i] = beta2 * v[i] + rest2 * (g * g);
            p[i] -= decay * p[i] + rate * m[i] / (std::sqrt(v[i]) * root_correction + epsilon);
        }
        parameter.end(p, first, n);
        first_moments.end();
        second_moments.end();
    }
}

template <class T>
void update(const SgdSpec& step, UpdateTensors& tensors, std::int64_t begin, std::int64_t end) {
    const T rate = static_cast<T>(step.learning_rate);
    const T momentum = static_cast<T>(step.momentum);
    const T rest = static_cast<T>(1.0 - step.dampening);
    const T decay = static_cast<T>(step.weight_decay);
    const T scale = static_cast<T>(step.gradient_scale);

    Parameter<T> parameter(tensors.parameter, tensors.rounded_or_none, step.stochastic_rounding,
                           tensors.rounding_key, tensors.rounding_first);
    BlockReader<T> gradients(tensors.gradient);
    if (!tensors.first_moment_or_none.defined()) {
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            T* p = parameter.begin(first, n);
            const T* dp = gradients.read(first, n);
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) p[i] -= rate * (dp[i] * scale + decay * p[i]);
            parameter.end(p, first, n);
        }
        return;
    }
    InPlace<T> momenta(tensors.first_moment_or_none);
    for (std::int64_t first = begin; first < end; first += block_size) {
        const std::int64_t n = std::min(block_size, end - first);
        T* p = parameter.begin(first, n);
        T* m = momenta.begin(first, n);
        const T* dp = gradients.read(first, n);
        if (step.step == 1) {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) m[i] = dp[i] * scale + decay * p[i];
        } else {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i)
                m[i] = momentum * m[i] + rest * (dp[i] * scale + decay * p[i]);
        }
        if (step.nesterov) {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i)
                p[i] -= rate * ((dp[i] * scale + decay * p[i]) + momentum * m[i]);
        } else {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) p[i] -= rate * m[i];
        }
        parameter.end(p, first, n);
        momenta.end();
    }
}

/// measure(values, n) of each block, joined by join(a, b): blocks in order within a piece, pieces within a tensor, then
/// tensors.
template <class Result, class Measure, class Join>
Result measure_all(std::span<const Tensor> tensors, Measure measure, Join join) {
    const std::vector<Piece> pieces =
        pieces_of(tensors.size(), [&](std::size_t i) { return tensors[i].count(); });
    std::vector<Result> results(pieces.size());
    for_each_piece(pieces, [&](std::size_t index, const Piece& piece) {
        const Tensor& x = tensors[piece.tensor];
        visit_floating_compute(x.dtype(), [&](auto zero) {
            BlockReader<decltype(zero)> reader(x);
            for (std::int64_t first = piece.first; first < piece.last; first += block_size) {
                const std::int64_t n = std::min(block_size, piece.last - first);
                results[index] = join(results[index], measure(reader.read(first, n), n));
            }
        });
    });
    Result total{};
    for (std::size_t i = 0; i < pieces.size();) {
        Result of_tensor{};
        for (const std::size_t tensor = pieces[i].tensor; i < pieces.size() && pieces[i].tensor == tensor;
             ++i)
            of_tensor = join(of_tensor, results[i]);
        total = join(total, of_tensor);
    }
    return total;
}

/// The squares of floats neither overflow nor underflow in f64.
SquareSums block_sum_of_squares(const float* values, std::int64_t n) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<double>(values[i]);
        sum += value * value;
    }
    return {.middle = sum};
}
SquareSums block_sum_of_squares(const double* values, std::int64_t n) {
    SquareSums sums;
    for (std::int64_t i = 0; i < n; ++i) sums = with_square_of(sums, values[i]);
    return sums;
}

/// The largest magnitude; NaN if any value is NaN.
template <class T>
double block_largest_magnitude(const T* values, std::int64_t n) {
    T largest = 0;
    int nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : nan)
    for (std::int64_t i = 0; i < n; ++i) {
        const T magnitude = std::fabs(values[i]);
        largest = magnitude > largest ? magnitude : largest;
        nan |= magnitude != magnitude;
    }
    return nan != 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(largest);
}

/// The larger number; NaN wins.
double larger(double a, double b) { return (b <= a || a != a) ? a : b; }

/// The numbers of an update's control; nullptr without a control.
const UpdateNumbers* numbers_of(const Tensor& control_or_none) {
    return control_or_none.defined() ? reinterpret_cast<const UpdateNumbers*>(control_or_none.data<double>())
                                     : nullptr;
}

/// Updates all tensors, by the numbers of the control where there is one.
template <class Spec>
void update_all(Spec step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) {
    if (const UpdateNumbers* update = numbers_of(control_or_none)) {
        if (update->skip != 0.0) return;
        step.learning_rate *= update->learning_rate;
        step.gradient_scale *= update->gradient_scale;
        step.step += static_cast<std::int64_t>(update->steps);
    }
    const auto count_of = [&](std::size_t i) { return tensors[i].parameter.count(); };
    for_each_piece(pieces_of(tensors.size(), count_of), [&](std::size_t, const Piece& piece) {
        UpdateTensors& one = tensors[piece.tensor];
        visit_floating_compute(one.parameter.dtype(), [&](auto zero) {
            update<decltype(zero)>(step, one, piece.first, piece.last);
        });
    });
}

}  // namespace

void adamw(const AdamWSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) {
    update_all(step, tensors, control_or_none);
}

void sgd(const SgdSpec& step, std::span<UpdateTensors> tensors, const Tensor& control_or_none) {
    update_all(step, tensors, control_or_none);
}

void sum_of_squares(std::span<const Tensor> tensors, Tensor& sums) {
    const SquareSums total = measure_all<SquareSums>(
        tensors, [](const auto* values, std::int64_t n) { return block_sum_of_squares(values, n); },
        [](const SquareSums& a, const SquareSums& b) { return a + b; });
    auto* to = sums.data<double>();
    to[0] = total.middle;
    to[1] = total.large;
    to[2] = total.small;
}

void largest_magnitude(std::span<const Tensor> tensors, Tensor& magnitude) {
    *magnitude.data<double>() = measure_all<double>(
        tensors, [](const auto* values, std::int64_t n) { return block_largest_magnitude(values, n); },
        [](double a, double b) { return larger(a, b); });
}

void decide_update(Tensor& control) {
    // This device reports bad elements immediately, so none is pending here.
    potluck::decide_update(*reinterpret_cast<UpdateNumbers*>(control.data<double>()), false,
                           [](double x) { return std::sqrt(x); });
}

}  // namespace potluck::cpu
