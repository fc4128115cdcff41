// Reductions of the last axes of a tensor of any strides. The operation is a small struct (SumOf, ExtremeOf, ...) that
// initialises a state, accumulates elements, merges two states and stores the result; the elements are read by one of
// two kernels:
//
//   rows     the elements of a row are close together in memory: a warp (short rows) or a block (long rows) reads each
//   row
//   columns  adjacent rows are close together, or rows are very short: adjacent threads process adjacent rows
//
// When there are too few rows to occupy the GPU, each is divided into stretches, and a third kernel merges their states
// in order. The division depends only on the shape. Floating sums are kept in f64, which costs a conversion and an
// addition for each element; the GPU's memory is slower than that.

#include <cmath>
#include <limits>

#include "cuda/kernels/layout.h"
#include "cuda/kernels/reduce.h"
#include "cuda/kernels/rows.h"

namespace potluck::cuda {
namespace {

// ---- operations ----

/// Sum over the divisor. S is the type of the sum: double, or (for integers, which wrap around) unsigned.
template <class T, class S, class Result>
struct SumOf {
    using Element = T;
    struct State {
        S total;
    };
    Result* y;
    double divisor;

    __device__ State start(std::int64_t) const { return {0}; }
    __device__ void fold(State& state, compute_type<T> value, std::int64_t) const {
        state.total += static_cast<S>(value);
    }
    __device__ static void join(State& state, const State& other) { state.total += other.total; }
    __device__ void store(std::int64_t row, const State& state) const {
        if constexpr (std::is_same_v<S, double>)
            y[row] = from_compute<Result>(state.total / divisor);
        else
            y[row] = static_cast<Result>(state.total);
    }
};

/// A sum of f64 that may leave the range where what is made of it does not: total * 2^exponent. The exponent is 0 until
/// then.
struct WideSum {
    double total;
    int exponent, unused;

    __device__ static WideSum start() { return {0.0, 0, 0}; }
    __device__ void add(double value, int their_exponent = 0) {
        if (their_exponent > exponent) widen();
        if (their_exponent < exponent) value *= 0x1p-64;
        if (exponent == 0 && std::isfinite(value) && std::isfinite(total) && !std::isfinite(total + value)) {
            widen();
            value *= 0x1p-64;
        }
        total += value;
    }
    __device__ void join(const WideSum& other) { add(other.total, other.exponent); }

private:
    __device__ void widen() {
        total *= 0x1p-64;
        exponent = 64;
    }
};

/// The mean of f64 elements, which is in range although their sum may not be.
struct WideMeanOf {
    using Element = double;
    using State = WideSum;
    double* y;
    double divisor;

    __device__ State start(std::int64_t) const { return WideSum::start(); }
    __device__ void fold(State& state, double value, std::int64_t) const { state.add(value); }
    __device__ static void join(State& state, const State& other) { state.join(other); }
    __device__ void store(std::int64_t row, const State& state) const {
        y[row] = scalbn(state.total / divisor, state.exponent);
    }
};

/// The largest or smallest element or its index; the first of equals, a NaN before any number.
template <class T>
struct ExtremeOf {
    using Element = T;
    using Computed = compute_type<T>;
    struct State {
        Computed best;
        std::int64_t place;  // -1: none yet
    };
    T* values;              // nullptr: indices are wanted
    std::int64_t* indices;  // nullptr: values are wanted
    bool largest;

    __device__ State start(std::int64_t) const { return {0, -1}; }
    __device__ bool beats(Computed candidate, Computed best) const {
        return (largest ? candidate > best : candidate < best) || (candidate != candidate && best == best);
    }
    /// Elements must be accumulated in the order of their indices.
    __device__ void fold(State& state, Computed value, std::int64_t place) const {
        if (state.place < 0 || beats(value, state.best)) state = {value, place};
    }
    __device__ void join(State& state, const State& other) const {
        if (other.place < 0) return;
        const bool is_equal = !beats(state.best, other.best);
        if (state.place < 0 || beats(other.best, state.best) || (is_equal && other.place < state.place))
            state = other;
    }
    __device__ void store(std::int64_t row, const State& state) const {
        if (values != nullptr)
            values[row] = from_compute<T>(state.best);
        else
            indices[row] = state.place;
    }
};

/// log(sum(exp(x))), with the sum relative to the largest element so far. Infinity and NaN are passed on.
template <class T>
struct LogSumExpOf {
    using Element = T;
    using Computed = compute_type<T>;
    struct State {
        double sum;
        Computed largest;
        Computed unused;
    };
    T* y;

    __device__ State start(std::int64_t) const {
        return {0.0, -std::numeric_limits<Computed>::infinity(), 0};
    }
    __device__ static void raise(State& state, Computed largest) {
        if (!(largest > state.largest) && largest == largest) return;
        state.sum = std::isfinite(state.largest) && std::isfinite(largest)
                        ? state.sum * static_cast<double>(std::exp(state.largest - largest))
                        : 0.0;
        if (state.largest == state.largest) state.largest = largest;
    }
    __device__ void fold(State& state, Computed value, std::int64_t) const {
        raise(state, value);
        if (std::isfinite(state.largest)) state.sum += static_cast<double>(std::exp(value - state.largest));
    }
    __device__ static void join(State& state, const State& other) {
        raise(state, other.largest);
        if (std::isfinite(state.largest))
            state.sum += other.sum * static_cast<double>(std::exp(other.largest - state.largest));
    }
    __device__ void store(std::int64_t row, const State& state) const {
        const auto largest = static_cast<double>(state.largest);
        y[row] = from_compute<T>(std::isfinite(state.largest) ? largest + std::log(state.sum) : largest);
    }
};

/// any: is an element true; all: is an element false.
template <class T>
struct SearchOf {
    using Element = T;
    struct State {
        int found;
    };
    bool* y;
    bool wanted;

    __device__ State start(std::int64_t) const { return {0}; }
    __device__ void fold(State& state, compute_type<T> value, std::int64_t) const {
        state.found |= (value != 0) == wanted;
    }
    __device__ static void join(State& state, const State& other) { state.found |= other.found; }
    __device__ void store(std::int64_t row, const State& state) const {
        y[row] = (state.found != 0) == wanted;
    }
};

/// A sum of squares; f32 and half types use f64, which cannot overflow.
template <class T>
struct SquareSum {
    double sum;

    __device__ static SquareSum start() { return {0.0}; }
    __device__ static constexpr int power() { return 0; }
    __device__ void add(double value) { sum += value * value; }
    __device__ void add_distance(double value, double center) { add(value - center); }
    __device__ void join(const SquareSum& other) { sum += other.sum; }
};
/// The same for f64: sum * 2^(2 exponent). The exponent stays 0 while the squares are in range.
template <>
struct SquareSum<double> {
    double sum;
    int exponent, unused;

    __device__ static SquareSum start() { return {0.0, 0, 0}; }
    __device__ int power() const { return exponent; }
    __device__ void add(double value) {
        const double square = value * value;
        if (exponent == 0 && (value == 0.0 || (square >= 0x1p-900 && square <= 0x1p900))) {
            sum += square;
            return;
        }
        add_scaled(value, 0);
    }
    /// Adds (value - center)^2; the distance of two finite numbers may leave the range, too.
    __device__ void add_distance(double value, double center) {
        const double distance = value - center;
        if (std::isinf(distance))
            add_scaled(value * 0.5 - center * 0.5, 1);
        else
            add(distance);
    }
    __device__ void join(SquareSum other) {
        if (other.exponent != exponent) {
            if (other.sum == 0.0) return;
            const int common = sum == 0.0 || other.exponent > exponent ? other.exponent : exponent;
            sum = scalbn(sum, 2 * (exponent - common));
            other.sum = scalbn(other.sum, 2 * (other.exponent - common));
            exponent = common;
        }
        sum += other.sum;
    }

private:
    /// Adds (value * 2^power)^2.
    __device__ void add_scaled(double value, int power) {
        const double size = fabs(value);
        const bool scales = size > 0.0 && size <= std::numeric_limits<double>::max();
        const int scale = scales ? ilogb(size) : 0;
        const double scaled = scalbn(value, -scale);
        join({scaled * scaled, scale + power, 0});
    }
};

/// The square root of the sum of squares.
template <class T>
struct NormOf {
    using Element = T;
    using State = SquareSum<T>;
    T* y;

    __device__ State start(std::int64_t) const { return State::start(); }
    __device__ void fold(State& state, compute_type<T> value, std::int64_t) const {
        state.add(static_cast<double>(value));
    }
    __device__ static void join(State& state, const State& other) { state.join(other); }
    __device__ void store(std::int64_t row, const State& state) const {
        y[row] = from_compute<T>(scalbn(std::sqrt(state.sum), state.power()));
    }
};

/// The second pass of a variance: the sum of (x - center)^2, and that of (x - center), which corrects the rounding
/// error of the center.
template <class T>
struct VarianceOf {
    using Element = T;
    struct State {
        double center;
        WideSum deviations;
        SquareSum<T> squares;
    };
    const double* centers;
    T* y;
    double count, correction;
    bool root;

    __device__ State start(std::int64_t row) const {
        return {centers[row], WideSum::start(), SquareSum<T>::start()};
    }
    __device__ void fold(State& state, compute_type<T> value, std::int64_t) const {
        const auto wide = static_cast<double>(value);
        state.squares.add_distance(wide, state.center);
        const double deviation = wide - state.center;
        if (std::is_same_v<T, double> && std::isinf(deviation))
            state.deviations.add(wide * 0x1p-64 - state.center * 0x1p-64, 64);
        else
            state.deviations.add(deviation);
    }
    __device__ static void join(State& state, const State& other) {
        state.squares.join(other.squares);
        state.deviations.join(other.deviations);
    }
    __device__ void store(std::int64_t row, const State& state) const {
        const int power = state.squares.power();
        const double rest = scalbn(state.deviations.total, state.deviations.exponent - power);
        const double squares = state.squares.sum - rest * rest / count;
        // Not fmax: a NaN among the elements must be kept.
        const double scaled = (squares < 0 ? 0.0 : squares) / (count - correction);
        const double result = root ? scalbn(std::sqrt(scaled), power) : scalbn(scaled, 2 * power);
        y[row] = from_compute<T>(count <= correction ? std::numeric_limits<double>::quiet_NaN() : result);
    }
};

// ---- reading the elements ----

/// The memory offset of element i along some axes.
class AxisOffsets {
public:
    explicit AxisOffsets(const Layout<1>& layout) : layout_(layout), narrow_(layout.fits<std::uint32_t>()) {}

    std::int64_t count() const { return layout_.count; }
    /// The distance from an element to the next.
    __host__ __device__ std::int64_t step() const {
        return layout_.axes == 0 ? 0 : layout_.strides[0][layout_.axes - 1];
    }
    __host__ __device__ bool is_straight() const { return layout_.axes <= 1; }
    __device__ std::int64_t offset(std::int64_t index) const {
        if (is_straight()) return index * step();
        std::int64_t offset[1];
        if (narrow_)
            layout_.offsets(static_cast<std::uint32_t>(index), offset);
        else
            layout_.offsets(index, offset);
        return offset[0];
    }

private:
    Layout<1> layout_;
    bool narrow_;
};

/// Axes [begin, end) of x.
AxisOffsets axis_offsets_of(const Tensor& x, std::int64_t begin, std::int64_t end) {
    const Shape shape(x.shape().begin() + begin, x.shape().begin() + end);
    if (x.count() == 0) {  // nothing is read
        Layout<1> layout;
        layout.axes = 1;
        layout.sizes[0] = layout.count = element_count(shape);
        return AxisOffsets(layout);
    }
    const Strides strides(x.strides().begin() + begin, x.strides().begin() + end);
    const Tensor axes = x.alias(shape, strides, x.offset());
    return AxisOffsets(layout_of<1>({&axes}));
}

/// Row r, element i is at kept.offset(r) + reduced.offset(i). Block (x, y) reads stretch y of its rows.
template <class T>
struct Source {
    const T* x;
    AxisOffsets kept, reduced;
    std::int64_t rows, length;
    std::int64_t stretch;  // elements of a row that are accumulated in one state
};

// Floor: reads each element once (sizeof(T) bytes).
template <class Op>
__global__ void __launch_bounds__(most_row_threads)
    reduce_rows_kernel(Op op, Source<typename Op::Element> source, typename Op::State* states) {
    const std::int64_t begin = blockIdx.y * source.stretch;
    const std::int64_t end = begin + source.stretch < source.length ? begin + source.stretch : source.length;
    for (std::int64_t row = first_row(); row < source.rows; row += row_step()) {
        const auto* from = source.x + source.kept.offset(row);
        auto state = op.start(row);
        if (source.reduced.is_straight() && source.reduced.step() == 1)
            visit_row(from + begin, end - begin, [&](std::int64_t column, const auto& pack) {
                for (int i = 0; i < pack.size; ++i)
                    op.fold(state, to_compute(pack.values[i]), begin + column + i);
            });
        else
            for (std::int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
                op.fold(state, to_compute(from[source.reduced.offset(i)]), i);
        state = join_row(state, [&](auto& mine, const auto& other) { op.join(mine, other); });
        if (threadIdx.x != 0) continue;
        if (states == nullptr)
            op.store(row, state);
        else
            states[row * gridDim.y + blockIdx.y] = state;
    }
}

constexpr unsigned column_threads = 256;

// Thread (x, y) of a block takes every blockDim.y-th element of its row. Floor: reads each element once.
template <class Op>
__global__ void __launch_bounds__(column_threads)
    reduce_columns_kernel(Op op, Source<typename Op::Element> source, typename Op::State* states) {
    __shared__ typename Op::State scratch[column_threads];
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t begin = blockIdx.y * source.stretch;
    const std::int64_t end = begin + source.stretch < source.length ? begin + source.stretch : source.length;
    const bool is_row = row < source.rows;
    auto state = op.start(is_row ? row : 0);
    if (is_row) {
        const auto* from = source.x + source.kept.offset(row);
        for (std::int64_t i = begin + threadIdx.y; i < end; i += blockDim.y)
            op.fold(state, to_compute(from[source.reduced.offset(i)]), i);
    }
    scratch[threadIdx.y * blockDim.x + threadIdx.x] = state;
    __syncthreads();
    if (threadIdx.y != 0 || !is_row) return;
    for (unsigned y = 1; y < blockDim.y; ++y) op.join(state, scratch[y * blockDim.x + threadIdx.x]);
    if (states == nullptr)
        op.store(row, state);
    else
        states[row * gridDim.y + blockIdx.y] = state;
}

// A warp joins the states of the stretches of a row. Floor: reads each state once.
template <class Op>
__global__ void __launch_bounds__(most_row_threads)
    join_stretches_kernel(Op op, const typename Op::State* states, std::int64_t rows,
                          std::int64_t stretches) {
    for (std::int64_t row = first_row(); row < rows; row += row_step()) {
        auto state = op.start(row);
        for (std::int64_t i = threadIdx.x; i < stretches; i += blockDim.x)
            op.join(state, states[row * stretches + i]);
        state = join_row(state, [&](auto& mine, const auto& other) { op.join(mine, other); });
        if (threadIdx.x == 0) op.store(row, state);
    }
}

/// Blocks that occupy any GPU; rows are not divided into more stretches than this.
constexpr std::int64_t enough_blocks = 1024;

template <class Op>
void run(KernelDevice& backend, const Tensor& x, std::int64_t axes, const Op& op) {
    using State = typename Op::State;
    const cudaStream_t on = backend.stream();
    const AxisOffsets kept = axis_offsets_of(x, 0, x.ndim() - axes);
    const AxisOffsets reduced = axis_offsets_of(x, x.ndim() - axes, x.ndim());
    Source<typename Op::Element> source{
        elements_of<typename Op::Element>(x), kept, reduced, kept.count(), reduced.count(), 0};
    const bool near_columns = kept.step() == 1 && reduced.step() != 1 && source.rows >= warp_size;
    const bool by_columns = near_columns || source.length <= 16;

    dim3 block = row_block(source.length);
    std::int64_t rows_of_block = block.y;
    std::int64_t least_stretch = 16 * warp_row_width;
    if (by_columns) {
        block = source.length < 64 ? dim3(column_threads) : dim3(warp_size, column_threads / warp_size);
        rows_of_block = block.x;
        least_stretch = warp_row_width;
    }
    const std::int64_t blocks = blocks_for(source.rows, rows_of_block);
    std::int64_t stretches = (source.length + least_stretch - 1) / least_stretch;
    if (stretches > enough_blocks / blocks) stretches = enough_blocks / blocks;
    if (stretches < 1) stretches = 1;
    source.stretch = (source.length + stretches - 1) / stretches;

    Tensor states;
    if (stretches > 1) {
        const auto bytes = static_cast<std::int64_t>(sizeof(State));
        states = Tensor::empty(Shape{source.rows, stretches, bytes}, {DType::u8, x.device()});
    }
    auto* const to = states.defined() ? static_cast<State*>(states.raw_data()) : nullptr;
    launch(by_columns ? reduce_columns_kernel<Op> : reduce_rows_kernel<Op>,
           dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(stretches)), block, 0, on, op, source,
           to);
    if (!states.defined()) return;
    block = row_block(stretches);
    launch(join_stretches_kernel<Op>, blocks_for(source.rows, block.y), block, 0, on, op, to, source.rows,
           stretches);
}

template <class T>
void sum(KernelDevice& backend, bool mean, const Tensor& x, std::int64_t axes, Tensor& y) {
    const double divisor = mean ? static_cast<double>(x.count() / y.count()) : 1.0;
    if constexpr (is_half<T>) {
        if (y.dtype() == DType::f32)
            return run(backend, x, axes, SumOf<T, double, float>{elements_of<float>(y), divisor});
    }
    if constexpr (std::is_same_v<T, double>) {
        if (mean) return run(backend, x, axes, WideMeanOf{elements_of<double>(y), divisor});
    }
    if constexpr (!std::is_integral_v<T>)
        run(backend, x, axes, SumOf<T, double, T>{elements_of<T>(y), divisor});
    else if (mean)
        run(backend, x, axes, SumOf<T, double, float>{elements_of<float>(y), divisor});
    else
        run(backend, x, axes,
            SumOf<T, unsigned long long, std::int64_t>{elements_of<std::int64_t>(y), divisor});
}

template <class T>
void reduce(KernelDevice& backend, ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::mean:
            return sum<T>(backend, op == ReduceOp::mean, x, axes, y);
        case ReduceOp::max:
        case ReduceOp::min:
            return run(backend, x, axes, ExtremeOf<T>{elements_of<T>(y), nullptr, op == ReduceOp::max});
        case ReduceOp::argmax:
        case ReduceOp::argmin:
            return run(backend, x, axes,
                       ExtremeOf<T>{nullptr, elements_of<std::int64_t>(y), op == ReduceOp::argmax});
        case ReduceOp::any:
        case ReduceOp::all:
            return run(backend, x, axes, SearchOf<T>{elements_of<bool>(y), op == ReduceOp::any});
        case ReduceOp::norm:
            if constexpr (!std::is_integral_v<T>) run(backend, x, axes, NormOf<T>{elements_of<T>(y)});
            return;
        case ReduceOp::logsumexp:
            if constexpr (!std::is_integral_v<T>)
                return run(backend, x, axes, LogSumExpOf<T>{elements_of<T>(y)});
    }
}

}  // namespace

void reduce(KernelDevice& device, ReduceOp op, const Tensor& x, std::int64_t axes, Tensor& y) {
    if (y.count() == 0) return;
    visit_device(x.dtype(), [&](auto zero) { reduce<decltype(zero)>(device, op, x, axes, y); });
}

void variance(KernelDevice& device, const Tensor& x, std::int64_t axes, double correction, bool root,
              Tensor& y) {
    if (y.count() == 0) return;
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const auto length = static_cast<double>(x.count() / y.count());
        const Tensor centers = Tensor::empty(y.shape(), {DType::f64, x.device()});
        if constexpr (std::is_same_v<T, double>)
            run(device, x, axes, WideMeanOf{elements_of<double>(centers), length});
        else
            run(device, x, axes, SumOf<T, double, double>{elements_of<double>(centers), length});
        run(device, x, axes,
            VarianceOf<T>{elements_of<double>(centers), elements_of<T>(y), length, correction, root});
    });
}

}  // namespace potluck::cuda
