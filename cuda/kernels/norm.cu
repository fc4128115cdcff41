// Layer norm and RMS norm. A row of up to 1024 elements is processed by a warp, a longer one by a block. Statistics are
// two-pass in f32 (mean, relative to the row's first element; then mean square of the deviations), so rows far from 0
// and constant rows are accurate; the second and third pass read the row from the caches.
//
// Backward computes all gradients in one kernel: beside dx, each warp (or block) adds its rows' share of dweight and
// dbias to its own accumulators, in shared memory if they fit, and a second kernel sums over the blocks. The number of
// blocks depends only on the shape and every sum has a fixed order: the same bits on every GPU.

#include <cmath>
#include <limits>

#include "cuda/kernels/rows.h"

namespace potluck::cuda {
namespace {

/// Blocks that must fit on a multiprocessor: with two, each thread has 64 registers and the compiler spills none.
constexpr int blocks_at_once = 2;

/// Mean over a row of term(x), 0 for an empty row; each thread of the row gets it. 16 bytes of elements are added in
/// the compute type, and these sums in f64; if a sum overflows f32, all of it is computed in f64.
template <class Wide, class T, class Term>
__device__ double mean_over_row(const T* row, std::int64_t width, Term term) {
    double total = 0;
    visit_row(row, width, [&](std::int64_t, const auto& pack) {
        Wide sum = 0;
        for (int i = 0; i < pack.size; ++i) sum += term(static_cast<Wide>(to_compute(pack.values[i])));
        total += static_cast<double>(sum);
    });
    total = row_sum(total);
    if constexpr (std::is_same_v<Wide, float>)
        if (!std::isfinite(total)) return mean_over_row<double>(row, width, term);
    return width == 0 ? 0.0 : total / static_cast<double>(width);
}

/// The mean of a row that has elements, relative to its first one; each thread of the row gets it. f64 elements whose sum
/// leaves the range are scaled by a power of two.
template <class T>
__device__ compute_type<T> mean_of_row(const T* row, std::int64_t width) {
    using Computed = compute_type<T>;
    const Computed first = to_compute(row[0]);
    const double distance = mean_over_row<Computed>(
        row, width, [&](auto value) { return value - static_cast<decltype(value)>(first); });
    if constexpr (std::is_same_v<Computed, double>) {
        if (!std::isfinite(distance)) {
            const double scaled = mean_over_row<double>(
                row, width, [&](double value) { return value * 0x1p-64 - first * 0x1p-64; });
            return (first * 0x1p-64 + scaled) * 0x1p64;
        }
    }
    return static_cast<Computed>(static_cast<double>(first) + distance);
}

/// 1 / sqrt(x), in f32 where the range allows it: divisions in f64 are slow on most GPUs.
template <class Computed>
__device__ double reciprocal_root(double x) {
    if (std::is_same_v<Computed, float> && x > 1e-37 && x < 1e37)
        return static_cast<double>(1.0F / std::sqrt(static_cast<float>(x)));
    return 1.0 / std::sqrt(x);
}

/// 1 / sqrt(mean of squares + epsilon) of f64 numbers whose squares leave the range, part(x) times 2^scale; each thread of
/// the row gets it. Infinity and NaN among them give 0 or NaN.
template <class Part>
__device__ double scaled_reciprocal(const double* row, std::int64_t width, double epsilon, int scale,
                                    Part part) {
    double largest = scalbn(std::sqrt(epsilon), -scale);
    visit_row(row, width, [&](std::int64_t, const auto& pack) {
        for (int i = 0; i < pack.size; ++i) largest = fmax(largest, fabs(part(pack.values[i])));
    });
    largest = row_largest(largest);
    const bool is_ordinary = largest > 0.0 && largest <= std::numeric_limits<double>::max();
    const int exponent = is_ordinary ? ilogb(largest) : 0;
    const double scaled = mean_over_row<double>(row, width, [&](double value) {
        const double deviation = scalbn(part(value), -exponent);
        return deviation * deviation;
    });
    return scalbn(1.0 / std::sqrt(scaled + scalbn(epsilon, -2 * (exponent + scale))), -(exponent + scale));
}

/// 1 / sqrt(mean of (x - mean)^2 + epsilon) of a row; each thread of the row gets it. Squares out of range of the
/// compute type are computed in f64, or scaled by a power of two.
template <class T>
__device__ double reciprocal_deviation(const T* row, std::int64_t width, compute_type<T> mean,
                                       double epsilon) {
    using Computed = compute_type<T>;
    const auto square = [&](auto value) {
        const auto deviation = value - static_cast<decltype(value)>(mean);
        return deviation * deviation;
    };
    double mean_square = mean_over_row<Computed>(row, width, square);
    if constexpr (std::is_same_v<Computed, float>) {
        if (!(mean_square > 1e-30)) mean_square = mean_over_row<double>(row, width, square);
    } else if (!(mean_square >= 0x1p-900 && mean_square <= 0x1p900)) {
        const double reciprocal =
            scaled_reciprocal(row, width, epsilon, 0, [&](double value) { return value - mean; });
        if (reciprocal != 0.0) return reciprocal;
        // The distance of two finite numbers may leave the range, too.
        return scaled_reciprocal(row, width, epsilon, 1,
                                 [&](double value) { return value * 0.5 - mean * 0.5; });
    }
    return reciprocal_root<Computed>(mean_square + epsilon);
}

template <class T>
struct NormForward {
    const T* x;
    std::int64_t rows, width, x_stride;
    const T* residual;  // if not nullptr, added to x; the sum is written and normalised
    std::int64_t residual_stride;
    T* sum;
    const T* weight;  // nullptr: 1
    const T* bias;    // nullptr: 0
    double epsilon;
    T* y;
    compute_type<T>* mean;  // layer_norm only
    compute_type<T>* reciprocal;
};

// Floor: reads x and writes y once (2 sizeof(T) bytes an element; with a residual 4: two read, two written).
template <class T, bool centered>
__global__ void __launch_bounds__(most_row_threads, blocks_at_once) norm_kernel(NormForward<T> norm) {
    using Computed = compute_type<T>;
    for (std::int64_t row = first_row(); row < norm.rows; row += row_step()) {
        const T* from = norm.x + row * norm.x_stride;
        if (norm.residual != nullptr) {
            T* sum = norm.sum + row * norm.width;
            const T* residual = norm.residual + row * norm.residual_stride;
            visit_row(from, norm.width, [&](std::int64_t column, const auto& pack) {
                const auto other = load_pack<pack.size>(residual + column);
                auto result = pack;
                for (int i = 0; i < pack.size; ++i)
                    result.values[i] =
                        from_compute<T>(to_compute(pack.values[i]) + to_compute(other.values[i]));
                store_pack(sum + column, result);
            });
            row_barrier();  // later passes over the sum may divide it into packs differently
            from = sum;
        }
        Computed mean = 0;
        if (centered && norm.width > 0) mean = mean_of_row(from, norm.width);
        const double exact = reciprocal_deviation(from, norm.width, mean, norm.epsilon);
        const auto reciprocal = static_cast<Computed>(exact);
        if (threadIdx.x == 0) {
            if (centered) norm.mean[row] = mean;
            norm.reciprocal[row] = reciprocal;
        }
        // The reciprocal of tiny elements leaves the range of f32: they are made larger first.
        const bool is_tiny = std::isinf(reciprocal) && std::isfinite(exact);
        const Computed growth = is_tiny ? Computed(0x1p64) : Computed{1};
        const Normalised<Computed> normalised(mean,
                                              is_tiny ? static_cast<Computed>(exact * 0x1p-64) : reciprocal);
        T* to = norm.y + row * norm.width;
        visit_row(from, norm.width, [&](std::int64_t column, const auto& pack) {
            Computed values[pack.size];
            for (int i = 0; i < pack.size; ++i)
                values[i] = (to_compute(pack.values[i]) * normalised.part - normalised.mean) * growth *
                            normalised.factor;
            if (norm.weight != nullptr) {
                const auto weight = load_pack<pack.size>(norm.weight + column);
                for (int i = 0; i < pack.size; ++i) values[i] *= to_compute(weight.values[i]);
            }
            if (norm.bias != nullptr) {
                const auto bias = load_pack<pack.size>(norm.bias + column);
                for (int i = 0; i < pack.size; ++i) values[i] += to_compute(bias.values[i]);
            }
            auto result = pack;
            for (int i = 0; i < pack.size; ++i) result.values[i] = from_compute<T>(values[i]);
            store_pack(to + column, result);
        });
    }
}

template <class T>
struct NormBackward {
    const T* x;
    std::int64_t rows, width, x_stride;
    const T* weight;
    const compute_type<T>* mean;  // layer_norm only
    const compute_type<T>* reciprocal;
    const T* dy;
    std::int64_t dy_stride;
    T* dx;                    // nullptr: not needed
    bool accumulate;          // dx +=
    int sections;             // 0: no gradient of parameters; 1: dweight; 2: dweight and dbias
    bool shared;              // whether the accumulators are in shared memory
    compute_type<T>* blocks;  // (blocks, sections, width): the sums of each block
};

/// to[i] += terms[i], 16 bytes at a time.
template <class T, int Size>
__device__ void accumulate(T* to, const Pack<T, Size>& terms) {
    constexpr int step = Size < Pack<T>::size ? Size : Pack<T>::size;
    for (int first = 0; first < Size; first += step) {
        auto sums = load_pack<step>(to + first);
        for (int i = 0; i < step; ++i) sums.values[i] += terms.values[first + i];
        store_pack(to + first, sums);
    }
}

// dx = reciprocal (g - mean(g) - normalised mean(g normalised)) with g = weight dy; mean(g) is the derivative
// through the mean, which rms_norm does not have. dweight = sum of dy normalised over the rows, dbias = sum of dy.
// Floor: reads x and dy and writes dx once (3 sizeof(T) bytes an element).
template <class T, bool centered>
__global__ void __launch_bounds__(most_row_threads, blocks_at_once)
    norm_backward_kernel(NormBackward<T> norm) {
    using Computed = compute_type<T>;
    const std::int64_t width = norm.width;
    const std::int64_t accumulators = norm.sections * width;
    Computed* const of_block = norm.blocks + blockIdx.x * accumulators;
    Computed* const dweight =
        norm.shared ? dynamic_shared_memory<Computed>() + threadIdx.y * accumulators : of_block;
    Computed* const dbias = dweight + width;
    for (std::int64_t i = threadIdx.x; i < accumulators; i += blockDim.x) dweight[i] = 0;
    row_barrier();
    for (std::int64_t row = first_row(); row < norm.rows; row += row_step()) {
        const T* x = norm.x + row * norm.x_stride;
        const T* dy = norm.dy + row * norm.dy_stride;
        const Computed mean = centered ? norm.mean[row] : Computed{0};
        const Computed reciprocal = norm.reciprocal[row];
        const Normalised<Computed> normalised_of(mean, reciprocal);
        // visit(column, pack of x, gradients dy, g = weight dy, normalised x)
        const auto walk = [&](auto visit) {
            visit_row(x, width, [&](std::int64_t column, const auto& pack) {
                const auto given = load_pack<pack.size>(dy + column);
                Pack<Computed, pack.size> gradient, scaled, normalised;
                for (int i = 0; i < pack.size; ++i) {
                    gradient.values[i] = to_compute(given.values[i]);
                    scaled.values[i] = gradient.values[i];
                    normalised.values[i] = normalised_of(to_compute(pack.values[i]));
                }
                if (norm.weight != nullptr) {
                    const auto weight = load_pack<pack.size>(norm.weight + column);
                    for (int i = 0; i < pack.size; ++i) scaled.values[i] *= to_compute(weight.values[i]);
                }
                visit(column, pack, gradient, scaled, normalised);
            });
        };
        Computed mean_g = 0;
        Computed mean_product = 0;
        if (norm.dx != nullptr) {
            double sum_g = 0;
            double sum_product = 0;
            walk(
                [&](std::int64_t, const auto& pack, const auto&, const auto& scaled, const auto& normalised) {
                    Computed g = 0;
                    Computed product = 0;
                    for (int i = 0; i < pack.size; ++i) {
                        g += scaled.values[i];
                        product += scaled.values[i] * normalised.values[i];
                    }
                    sum_g += static_cast<double>(g);
                    sum_product += static_cast<double>(product);
                });
            if (centered) mean_g = static_cast<Computed>(row_sum(sum_g) / static_cast<double>(width));
            mean_product = static_cast<Computed>(row_sum(sum_product) / static_cast<double>(width));
        }
        walk([&](std::int64_t column, const auto& pack, const auto& gradient, const auto& scaled,
                 const auto& normalised) {
            if (norm.dx != nullptr) {
                Computed values[pack.size];
                for (int i = 0; i < pack.size; ++i)
                    values[i] =
                        reciprocal * (scaled.values[i] - mean_g - normalised.values[i] * mean_product);
                T* const to = norm.dx + row * width + column;
                if (norm.accumulate) {
                    const auto so_far = load_pack<pack.size>(to);
                    for (int i = 0; i < pack.size; ++i) values[i] += to_compute(so_far.values[i]);
                }
                auto result = pack;
                for (int i = 0; i < pack.size; ++i) result.values[i] = from_compute<T>(values[i]);
                store_pack(to, result);
            }
            if (norm.sections > 1) accumulate(dbias + column, gradient);
            if (norm.sections > 0) {
                Pack<Computed, pack.size> terms;
                for (int i = 0; i < pack.size; ++i)
                    terms.values[i] = gradient.values[i] * normalised.values[i];
                accumulate(dweight + column, terms);
            }
        });
        row_barrier();  // the next row may assign a column to another thread
    }
    if (!norm.shared) return;
    __syncthreads();
    const Computed* const of_rows = dynamic_shared_memory<Computed>();
    for (std::int64_t i = threadIdx.y * blockDim.x + threadIdx.x; i < accumulators;
         i += blockDim.x * blockDim.y) {
        Computed total = 0;
        for (unsigned team = 0; team < blockDim.y; ++team) total += of_rows[team * accumulators + i];
        of_block[i] = total;
    }
}

constexpr unsigned combined_columns = 32;
constexpr unsigned combined_groups = 8;

// dweight and dbias from what the blocks added up: 32 columns a block, each summed by 8 threads that take every eighth
// block's share. Floor: reads sections * sizeof(compute type) bytes a column for each of at most 512 blocks.
template <class T>
__global__ void __launch_bounds__(combined_columns* combined_groups)
    combine_blocks_kernel(const compute_type<T>* blocks, int count, int sections, std::int64_t width,
                          GradientPointer<T> dweight, GradientPointer<T> dbias) {
    __shared__ double totals[combined_groups][combined_columns];
    const std::int64_t columns = sections * width;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * combined_columns + threadIdx.x;
    double total = 0;
    if (column < columns)
        for (auto block = static_cast<int>(threadIdx.y); block < count; block += combined_groups)
            total += static_cast<double>(blocks[block * columns + column]);
    totals[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    for (unsigned group = 1; group < combined_groups; ++group) total += totals[group][threadIdx.x];
    if (column < width)
        dweight.store(column, total);
    else
        dbias.store(column - width, total);
}

/// The most blocks that share the rows in backward.
constexpr std::int64_t most_blocks = 512;
/// Accumulators that a block keeps in shared memory; every GPU since compute capability 8.0 has enough of it.
constexpr std::size_t most_accumulator_bytes = std::size_t{96} << 10;

template <class T>
compute_type<T>* statistics_of(const Tensor* x) {
    return x == nullptr ? nullptr : elements_of<compute_type<T>>(*x);
}

/// Both norms; `mean` is nullptr for rms_norm.
void forward(KernelDevice& backend, const Tensor& x, const Tensor& residual_or_none,
             const Tensor& weight_or_none, const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none,
             Tensor& y, Tensor* mean, Tensor& reciprocal) {
    if (x.size(0) == 0) return;
    const cudaStream_t on = backend.stream();
    const bool empty = x.count() == 0;
    const DenseRows rows = empty ? DenseRows{x, x.size(0), 0, 0} : dense_rows(backend, x);
    const DenseRows residual =
        residual_or_none.defined() && !empty ? dense_rows(backend, residual_or_none) : DenseRows{};
    const Tensor weight = dense_vector(backend, weight_or_none);
    const Tensor bias = dense_vector(backend, bias_or_none);
    const dim3 block = row_block(rows.width);
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const NormForward<T> norm{.x = elements_of<T>(rows.tensor),
                                  .rows = rows.count,
                                  .width = rows.width,
                                  .x_stride = rows.stride,
                                  .residual = elements_or_null<T>(residual.tensor),
                                  .residual_stride = residual.stride,
                                  .sum = elements_or_null<T>(sum_or_none),
                                  .weight = elements_or_null<T>(weight),
                                  .bias = elements_or_null<T>(bias),
                                  .epsilon = epsilon,
                                  .y = elements_of<T>(y),
                                  .mean = statistics_of<T>(mean),
                                  .reciprocal = statistics_of<T>(&reciprocal)};
        launch(mean != nullptr ? norm_kernel<T, true> : norm_kernel<T, false>,
               blocks_for(rows.count, block.y), block, 0, on, norm);
    });
}

void backward(KernelDevice& backend, const Tensor& x, const Tensor& weight_or_none, const Tensor* mean,
              const Tensor& reciprocal, const Tensor& dy, bool accumulate, Tensor& dx, Tensor& dweight,
              Tensor& dbias) {
    const cudaStream_t on = backend.stream();
    const std::int64_t width = x.size(1);
    if (width == 0) return;
    const bool empty = x.count() == 0;
    const DenseRows rows = empty ? DenseRows{x, 0, width, width} : dense_rows(backend, x);
    const DenseRows gradients = empty ? DenseRows{dy, 0, width, width} : dense_rows(backend, dy);
    const Tensor weight = dense_vector(backend, weight_or_none);
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        const int sections = dbias.defined() ? 2 : dweight.defined() ? 1 : 0;
        const dim3 block = row_block(width, sizeof(Computed) == sizeof(double) ? 4 : 8);
        const unsigned blocks = blocks_for(rows.count, block.y, most_blocks);
        const auto bytes = static_cast<std::size_t>(block.y * sections * width) * sizeof(Computed);
        const bool shared = bytes <= most_accumulator_bytes;
        const Tensor of_blocks = Tensor::empty({blocks, sections, width}, {dtype_of<Computed>(), x.device()});
        const NormBackward<T> norm{.x = elements_of<T>(rows.tensor),
                                   .rows = rows.count,
                                   .width = width,
                                   .x_stride = rows.stride,
                                   .weight = elements_or_null<T>(weight),
                                   .mean = statistics_of<T>(mean),
                                   .reciprocal = statistics_of<T>(&reciprocal),
                                   .dy = elements_of<T>(gradients.tensor),
                                   .dy_stride = gradients.stride,
                                   .dx = elements_or_null<T>(dx),
                                   .accumulate = accumulate,
                                   .sections = sections,
                                   .shared = shared,
                                   .blocks = elements_of<Computed>(of_blocks)};
        launch(mean != nullptr ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>, blocks,
               block, shared ? bytes : 0, on, norm);
        launch(combine_blocks_kernel<T>, blocks_for(sections * width, combined_columns),
               dim3(combined_columns, combined_groups), 0, on, elements_of<Computed>(of_blocks),
               static_cast<int>(blocks), sections, width, GradientPointer<T>(dweight),
               GradientPointer<T>(dbias));
    });
}

}  // namespace

void layer_norm(KernelDevice& device, const Tensor& x, const Tensor& residual_or_none,
                const Tensor& weight_or_none, const Tensor& bias_or_none, double epsilon, Tensor& sum_or_none,
                Tensor& y, Tensor& mean, Tensor& rstd) {
    forward(device, x, residual_or_none, weight_or_none, bias_or_none, epsilon, sum_or_none, y, &mean, rstd);
}

void layer_norm_backward(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                         const Tensor& mean, const Tensor& rstd, const Tensor& dy, bool accumulate,
                         Tensor& dx_or_none, Tensor& dweight_or_none, Tensor& dbias_or_none) {
    backward(device, x, weight_or_none, &mean, rstd, dy, accumulate, dx_or_none, dweight_or_none,
             dbias_or_none);
}

void rms_norm(KernelDevice& device, const Tensor& x, const Tensor& residual_or_none,
              const Tensor& weight_or_none, double epsilon, Tensor& sum_or_none, Tensor& y, Tensor& rrms) {
    forward(device, x, residual_or_none, weight_or_none, {}, epsilon, sum_or_none, y, nullptr, rrms);
}

void rms_norm_backward(KernelDevice& device, const Tensor& x, const Tensor& weight_or_none,
                       const Tensor& rrms, const Tensor& dy, bool accumulate, Tensor& dx_or_none,
                       Tensor& dweight_or_none) {
    Tensor no_bias;
    backward(device, x, weight_or_none, nullptr, rrms, dy, accumulate, dx_or_none, dweight_or_none, no_bias);
}

}  // namespace potluck::cuda
