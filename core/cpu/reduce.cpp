// Reductions over the last axes of a tensor: each element of y reduces one row of x.
//
// Each operation is a small struct (reduce_states.h) that accumulates blocks of a row in a state and merges the states
// of consecutive stretches. Rows are divided into stretches of fixed length, and the states of the stretches are merged
// from left to right: the result does not depend on the number of threads. Floating sums use f64 with compensation, so
// that a sum of 1e9 f32 values is nearly exact.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "core/copies.h"
#include "core/cpu/blocks.h"
#include "core/cpu/reduce_states.h"
#include "core/format.h"
#include "core/kernel_specs.h"

namespace potluck::cpu {

namespace {

/// Elements of a row that are accumulated in one state.
constexpr std::int64_t stretch_size = 64 * block_size;

/// x as (rows, n): row i is elements [i n, (i + 1) n) in row-major order.
struct Rows {
    std::int64_t count = 1;
    std::int64_t length = 1;
};
Rows rows_of(const Tensor& x, std::int64_t axes) {
    Rows rows;
    const auto kept = static_cast<std::size_t>(x.ndim() - axes);
    for (std::size_t i = 0; i < x.shape().size(); ++i) (i < kept ? rows.count : rows.length) *= x.shape()[i];
    return rows;
}

/// Accumulates each row of x in a state, starting from start(row), and calls finish(row, state) once per row, from any
/// thread.
template <class T, class Start, class Finish>
void fold_rows(const Tensor& x, Rows rows, Start start, Finish finish) {
    const auto fold = [](BlockReader<T>& reader, auto& state, std::int64_t row_begin, std::int64_t begin,
                         std::int64_t end) {
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            state.fold(reader.read(row_begin + first, n), n, first);
        }
    };
    if (rows.length > stretch_size) {  // long rows: all threads share each row
        const std::int64_t stretches = (rows.length + stretch_size - 1) / stretch_size;
        using State = decltype(start(std::int64_t{0}));
        std::vector<State> states(static_cast<std::size_t>(rows.count * stretches), start(0));
        parallel_for(rows.count * stretches, 1, [&](std::int64_t index, std::int64_t) {
            const std::int64_t row = index / stretches;
            const std::int64_t begin = index % stretches * stretch_size;
            BlockReader<T> reader(x);
            State state = start(row);
            fold(reader, state, row * rows.length, begin, std::min(begin + stretch_size, rows.length));
            states[static_cast<std::size_t>(index)] = state;
        });
        for (std::int64_t row = 0; row < rows.count; ++row) {
            State& state = states[static_cast<std::size_t>(row * stretches)];
            for (std::int64_t i = 1; i < stretches; ++i)
                state.join(states[static_cast<std::size_t>(row * stretches + i)]);
            finish(row, state);
        }
        return;
    }
    const std::int64_t piece = std::max<std::int64_t>(1, piece_size / std::max<std::int64_t>(1, rows.length));
    parallel_for(rows.count, piece, [&](std::int64_t begin, std::int64_t end) {
        BlockReader<T> reader(x);
        // Several short rows are read at a time.
        const std::int64_t together =
            rows.length == 0 ? end - begin : std::max<std::int64_t>(1, block_size / rows.length);
        for (std::int64_t row = begin; row < end; row += together) {
            const std::int64_t some = std::min(together, end - row);
            if (rows.length * some > block_size) {
                auto state = start(row);
                fold(reader, state, row * rows.length, 0, rows.length);
                finish(row, state);
                continue;
            }
            const T* values = rows.length == 0 ? nullptr : reader.read(row * rows.length, some * rows.length);
            for (std::int64_t i = 0; i < some; ++i) {
                auto state = start(row + i);
                if (rows.length > 0) state.fold(values + i * rows.length, rows.length, 0);
                finish(row + i, state);
            }
        }
    });
}

/// Stores results from any thread.
template <class Result>
class Output {
public:
    explicit Output(Tensor& y)
        : to_(static_cast<std::byte*>(y.raw_data())), dtype_(y.dtype()), element_(size_of(y.dtype())) {}
    void store(std::int64_t index, Result result) const {
        // The usual dtypes are stored directly: rows may be as short as one element.
        if (dtype_ == dtype_of<Result>())
            reinterpret_cast<Result*>(to_)[index] = result;
        else if (std::is_same_v<Result, double> && dtype_ == DType::f32)
            reinterpret_cast<float*>(to_)[index] = static_cast<float>(result);
        else
            convert_from(&result, to_ + index * element_, dtype_, 1, 1);
    }
    void store(std::int64_t index, const Result* results, std::int64_t n) const {
        convert_from(results, to_ + index * element_, dtype_, 1, n);
    }

private:
    std::byte* to_;
    DType dtype_;
    std::int64_t element_;
};

template <class T, class State>
void reduce_rows(const Tensor& x, Rows rows, Tensor& y) {
    const Output<typename State::Result> output(y);
    fold_rows<T>(
        x, rows, [](std::int64_t) { return State{}; },
        [&](std::int64_t row, const State& state) { output.store(row, state.finish(rows.length)); });
}

// ---- sums over columns: neighbouring results read neighbouring elements (a bias gradient) ----

/// How many neighbouring elements of y read neighbouring elements of x, if this is faster than reading along the rows.
std::int64_t column_width(const Tensor& x, std::int64_t axes) {
    const auto kept = static_cast<std::size_t>(x.ndim() - axes);
    std::int64_t width = 1;
    for (std::size_t i = kept; i-- > 0;) {
        if (x.shape()[i] == 1) continue;
        if (x.strides()[i] != width) break;
        width *= x.shape()[i];
    }
    return width >= 16 ? width : 1;
}

/// Sums each of the `width` columns, over rows of `width` neighbouring elements, in f64.
template <class T>
void sum_columns(const Tensor& x, std::int64_t axes, std::int64_t width, bool mean, Tensor& y) {
    constexpr std::int64_t tile = 128;            // columns that one thread sums at a time
    constexpr std::int64_t rows_in_piece = 1024;  // rows of a piece, if several threads share the columns
    const Rows rows = rows_of(x, axes);
    const std::int64_t outer = rows.count / width;
    const std::int64_t length = rows.length;

    // (outer.., reduced.., width..): the axes of x in traversal order
    const auto rank = static_cast<std::size_t>(x.ndim());
    const std::size_t kept = rank - static_cast<std::size_t>(axes);
    std::size_t first_of_width = kept;
    for (std::int64_t covered = 1; covered < width;) covered *= x.shape()[--first_of_width];
    Shape shape;
    Strides strides;
    const auto take = [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            shape.push_back(x.shape()[i]);
            strides.push_back(x.strides()[i]);
        }
    };
    take(0, first_of_width);
    take(kept, rank);
    take(first_of_width, kept);
    const Tensor walk = x.alias(shape, strides, x.offset());

    const std::int64_t tiles = (width + tile - 1) / tile;
    const std::int64_t pieces = std::max<std::int64_t>(1, (length + rows_in_piece - 1) / rows_in_piece);
    std::vector<double> sums(pieces > 1 ? static_cast<std::size_t>(outer * pieces * width) : 0);
    const Output<double> output(y);
    const double divisor = mean ? static_cast<double>(length) : 1.0;

    parallel_for(outer * pieces * tiles, 1, [&](std::int64_t index, std::int64_t) {
        const std::int64_t column = index % tiles * tile;
        const std::int64_t piece = index / tiles % pieces;
        const std::int64_t outer_index = index / (tiles * pieces);
        const std::int64_t n = std::min(tile, width - column);
        const std::int64_t last = std::min(length, (piece + 1) * rows_in_piece);
        BlockReader<T> reader(walk);
        double partial[tile] = {};
        for (std::int64_t row = piece * rows_in_piece; row < last; ++row) {
            const T* values = reader.read((outer_index * length + row) * width + column, n);
#pragma omp simd
            for (std::int64_t j = 0; j < n; ++j) partial[j] += static_cast<double>(values[j]);
        }
        if (pieces > 1) {
            std::copy(
                partial, partial + n,
                sums.begin() + static_cast<std::ptrdiff_t>((outer_index * pieces + piece) * width + column));
        } else {
            for (std::int64_t j = 0; j < n; ++j) partial[j] /= divisor;
            output.store(outer_index * width + column, partial, n);
        }
    });
    if (pieces == 1) return;
    for (std::int64_t o = 0; o < outer; ++o) {
        for (std::int64_t column = 0; column < width; ++column) {
            CompensatedSum total;
            for (std::int64_t piece = 0; piece < pieces; ++piece)
                total.add(sums[static_cast<std::size_t>((o * pieces + piece) * width + column)]);
            output.store(o * width + column, total.value() / divisor);
        }
    }
}

/// Reading along columns element by element would load each cache line many times: other reductions make a transposed
/// copy first.
Tensor with_near_rows(const Tensor& x, std::int64_t axes) {
    return column_width(x, axes) == 1 ? x : potluck::detail::copy_of(x);
}

/// Whether y, if it is f64, holds neither infinity nor NaN. It is contiguous.
bool all_finite(const Tensor& y) {
    if (y.dtype() != DType::f64) return true;
    const auto* values = static_cast<const double*>(y.raw_data());
    return std::all_of(values, values + y.count(), [](double value) { return std::isfinite(value); });
}

template <class T>
void reduce_as(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) {
    const Rows rows = rows_of(x, axes);
    if (op == ReduceOp::sum || op == ReduceOp::mean) {
        const std::int64_t width = column_width(x, axes);
        const bool floating = !std::is_integral_v<T> || op == ReduceOp::mean;
        if (width > 1 && floating) {
            sum_columns<T>(x, axes, width, op == ReduceOp::mean, y);
            if (op == ReduceOp::sum || all_finite(y)) return;
            // The sum may have left the range, where the mean does not: it is taken again, by states that keep it.
        }
        if (op == ReduceOp::sum) return reduce_rows<T, Sum<T>>(x, rows, y);
        return reduce_rows<T, Mean<T>>(x, rows, y);
    }
    const Tensor near = with_near_rows(x, axes);
    switch (op) {
        case ReduceOp::max:
            return reduce_rows<T, Extreme<T, true>>(near, rows, y);
        case ReduceOp::min:
            return reduce_rows<T, Extreme<T, false>>(near, rows, y);
        case ReduceOp::argmax:
            return reduce_rows<T, ExtremePlace<T, true>>(near, rows, y);
        case ReduceOp::argmin:
            return reduce_rows<T, ExtremePlace<T, false>>(near, rows, y);
        case ReduceOp::any:
            return reduce_rows<T, Search<T, true>>(near, rows, y);
        case ReduceOp::all:
            return reduce_rows<T, Search<T, false>>(near, rows, y);
        case ReduceOp::logsumexp:
            if constexpr (!std::is_integral_v<T>) return reduce_rows<T, LogSumExp<T>>(near, rows, y);
            break;
        case ReduceOp::norm:
            if constexpr (!std::is_integral_v<T>) return reduce_rows<T, Norm<T>>(near, rows, y);
            break;
        case ReduceOp::sum:
        case ReduceOp::mean:
            break;
    }
    const char* name = op == ReduceOp::norm ? "norm" : "logsumexp";
    throw Error(name, fmt::format("there is no {} for {}. Convert to a floating dtype first.", name,
                                  name_of(x.dtype())));
}

void check_not_empty(ReduceOp op, const Tensor& x, std::int64_t axes, const Tensor& y) {
    const bool needs_elements =
        op == ReduceOp::max || op == ReduceOp::min || op == ReduceOp::argmax || op == ReduceOp::argmin;
    if (!needs_elements || y.count() == 0 || rows_of(x, axes).length > 0) return;
    const char* name = op == ReduceOp::max      ? "max"
                       : op == ReduceOp::min    ? "min"
                       : op == ReduceOp::argmax ? "argmax"
                                                : "argmin";
    throw Error(name, fmt::format("nothing to choose from: the last {} axes of {} hold no element.", axes,
                                  pretty(x.shape())));
}

}  // namespace

void reduce(ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) {
    check_not_empty(op, x, axes, y);
    if (y.count() == 0) return;
    visit_compute(x.dtype(), [&](auto zero) { reduce_as<decltype(zero)>(op, x, axes, y); });
}

void variance(const Tensor& x, std::int64_t axes, double correction, bool root, Tensor& y) {
    if (y.count() == 0) return;
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const Tensor near = with_near_rows(x, axes);
        const Rows rows = rows_of(x, axes);
        std::vector<double> centers(static_cast<std::size_t>(rows.count));
        fold_rows<T>(
            near, rows, [](std::int64_t) { return Mean<T>{}; },
            [&](std::int64_t row, const Mean<T>& state) {
                centers[static_cast<std::size_t>(row)] = state.finish(rows.length);
            });
        const Output<double> output(y);
        fold_rows<T>(
            near, rows,
            [&](std::int64_t row) {
                return SquaredDeviations<T>{centers[static_cast<std::size_t>(row)], {}, {}};
            },
            [&](std::int64_t row, const SquaredDeviations<T>& state) {
                output.store(row, state.finish(rows.length, correction, root));
            });
    });
}

}  // namespace potluck::cpu
