// Batch norm over x (batch, channels, positions), by our own kernels: cuDNN has none that computes only the statistics,
// none that accepts the reciprocal standard deviation of given statistics, and none with weight and bias of a half
// type.
//
// Sums over a channel (statistics; the gradients of weight and bias) take two steps. In the first, blockIdx.y is a
// slice of the batch and of the positions, and the 256 threads of a block are divided into lanes along the positions,
// lanes along the channels (only where there are too few positions for coalesced reads), and lanes along the batch; the
// states of one channel are reduced in shared memory, as a tree. In the second step, one thread combines the slices of
// its channel in order. A thread sums short runs in f32 and adds them in f64, so that a million equal terms add up.
// The rest is element-wise: 16 bytes per thread, where a pack does not cross the end of a channel.

#include <algorithm>

#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/numbers.h"
#include "cuda/kernels/reduce.h"

namespace potluck::cuda {
namespace {

constexpr int block_threads = 256;

/// How a channel is distributed over blocks and threads.
struct ChannelSlices {
    std::int64_t batch, channels, positions;
    int position_lanes, channel_lanes, batch_lanes;  // powers of two, their product is `block_threads`
    std::int64_t batch_slices, position_slices;
    std::int64_t batch_step, position_step;  // the size of a slice

    std::int64_t slices() const { return batch_slices * position_slices; }
    std::int64_t channel_blocks() const { return (channels + channel_lanes - 1) / channel_lanes; }
};

std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

ChannelSlices slices_over(const Tensor& x, int multiprocessors) {
    ChannelSlices s{};
    s.batch = x.size(0);
    s.channels = x.size(1);
    s.positions = x.size(2);
    s.position_lanes = 1;
    while (s.position_lanes < block_threads && s.position_lanes < s.positions) s.position_lanes *= 2;
    s.channel_lanes = std::max(1, 32 / s.position_lanes);
    s.batch_lanes = block_threads / s.position_lanes / s.channel_lanes;
    // Enough blocks to occupy the GPU, while each thread still has some elements to sum.
    constexpr std::int64_t least_elements = 16;
    const std::int64_t wanted = pieces(std::int64_t{8} * multiprocessors, s.channel_blocks());
    s.batch_slices = std::clamp<std::int64_t>(pieces(s.batch, s.batch_lanes * least_elements), 1, wanted);
    s.position_slices = std::clamp<std::int64_t>(pieces(s.positions, s.position_lanes * least_elements), 1,
                                                 pieces(wanted, s.batch_slices));
    s.batch_step = pieces(s.batch, s.batch_slices);
    s.position_step = pieces(s.positions, s.position_slices);
    return s;
}

/// The channel of this thread, and its index among the threads of that channel.
struct ThreadPosition {
    std::int64_t channel;
    int channel_lane, member, members;
};

__device__ inline ThreadPosition position_of_thread(const ChannelSlices& s) {
    const int thread = static_cast<int>(threadIdx.x);
    const int position_lane = thread % s.position_lanes;
    const int rest = thread / s.position_lanes;
    const int channel_lane = rest % s.channel_lanes, batch_lane = rest / s.channel_lanes;
    return {static_cast<std::int64_t>(blockIdx.x) * s.channel_lanes + channel_lane, channel_lane,
            batch_lane * s.position_lanes + position_lane, block_threads / s.channel_lanes};
}

/// Calls visit(position in x) for this thread's elements of its channel.
template <class Visit>
__device__ void for_each_element(const ChannelSlices& s, const ThreadPosition& at, const Visit& visit) {
    if (at.channel >= s.channels) return;
    const std::int64_t slice = blockIdx.y;
    const std::int64_t first_row = slice / s.position_slices * s.batch_step;
    const std::int64_t first_position = slice % s.position_slices * s.position_step;
    const std::int64_t last_row = min(s.batch, first_row + s.batch_step);
    const std::int64_t last_position = min(s.positions, first_position + s.position_step);
    for (std::int64_t row = first_row + at.member / s.position_lanes; row < last_row; row += s.batch_lanes) {
        const std::int64_t begin = (row * s.channels + at.channel) * s.positions;
        for (std::int64_t position = first_position + at.member % s.position_lanes; position < last_position;
             position += s.position_lanes)
            visit(begin + position);
    }
}

/// Combines the states of the threads of each channel; the first of them gets the result. All threads must call it.
template <class State>
__device__ State fold_channel(const State& state, const ThreadPosition& at) {
    __shared__ State states[block_threads];
    State* own = states + at.channel_lane * at.members;
    own[at.member] = state;
    for (int distance = at.members / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (at.member < distance) own[at.member].add(own[at.member + distance]);
    }
    return own[at.member];
}

// ---- statistics ----

/// Count, mean, and sum of squared deviations from it (Welford 1962; Chan, Golub, LeVeque 1979 for two parts). The
/// share of the other part is computed in S: its rounding error only scales the difference of the means, and a division
/// in f64 is a function call that makes the compiler spill.
template <class S>
struct Moments {
    double count, mean, squares;

    __device__ void add(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, distance = other.mean - mean;
        const auto share = static_cast<double>(static_cast<S>(other.count) / static_cast<S>(total));
        mean += distance * share;
        squares += other.squares + distance * distance * (count * share);
        count = total;
    }
};

// After this many elements the running state of a thread, in the compute type, is added to one in f64.
constexpr int run_length = 64;

/// The statistics of this thread's elements. S is the compute type of the elements.
template <class S, class T>
__device__ Moments<compute_type<T>> moments_of_thread(const T* x, const ChannelSlices& s,
                                                      const ThreadPosition& at) {
    Moments<compute_type<T>> total{0, 0, 0};
    S mean = 0, squares = 0;
    int count = 0;
    const auto flush = [&] {
        total.add({static_cast<double>(count), static_cast<double>(mean), static_cast<double>(squares)});
        mean = squares = 0;
        count = 0;
    };
    for_each_element(s, at, [&](std::int64_t i) {
        const S value = static_cast<S>(to_compute(x[i]));
        ++count;
        const S distance = value - mean;
        mean += distance / static_cast<S>(count);
        squares += distance * (value - mean);
        if (count == run_length) flush();
    });
    flush();
    return total;
}

// Squares that leave the range of f32 are taken in f64, by the thread that met them.
// Floor: reads x once (sizeof(T) bytes an element); a division, four multiplications and additions an element.
template <class T>
__global__ void __launch_bounds__(block_threads)
    statistics_of_slices(const T* x, ChannelSlices s, Moments<compute_type<T>>* partial) {
    using S = compute_type<T>;
    const ThreadPosition at = position_of_thread(s);
    Moments<S> total = moments_of_thread<S>(x, s, at);
    if (std::is_same_v<S, float> && total.count > 1 &&
        !(total.squares > 1e-30 && total.squares <= std::numeric_limits<double>::max()))
        total = moments_of_thread<double>(x, s, at);
    const Moments<S> folded = fold_channel(total, at);
    if (at.member == 0 && at.channel < s.channels) partial[at.channel * gridDim.y + blockIdx.y] = folded;
}

// Floor: reads 24 bytes a channel and slice, writes 3 numbers a channel.
template <class S>
__global__ void finish_statistics(const Moments<S>* partial, std::int64_t channels, std::int64_t slices,
                                  double epsilon, S* mean, S* variance, S* rstd) {
    const std::int64_t channel = global_thread();
    if (channel >= channels) return;
    Moments<S> total = partial[channel * slices];
    for (std::int64_t slice = 1; slice < slices; ++slice) total.add(partial[channel * slices + slice]);
    const double spread = total.squares / total.count;
    mean[channel] = static_cast<S>(total.mean);
    variance[channel] = static_cast<S>(spread);
    rstd[channel] = static_cast<S>(1.0 / sqrt(spread + epsilon));
}

// From the standard deviation, as its square may overflow f64. Floor: reads 1 and writes 2 numbers a channel.
__global__ void finish_deviations(const double* deviation, std::int64_t channels, double epsilon,
                                  double* variance, double* rstd) {
    const std::int64_t channel = global_thread();
    if (channel >= channels) return;
    variance[channel] = deviation[channel] * deviation[channel];
    rstd[channel] = 1.0 / hypot(deviation[channel], sqrt(epsilon));
}

// ---- gradients of weight and bias ----

/// Sums over a channel of dy * normalised x, and of dy.
struct GradientSums {
    double products, sums;

    __device__ void add(const GradientSums& other) {
        products += other.products;
        sums += other.sums;
    }
};

// Floor: reads x and dy once (2 sizeof(T) bytes an element); five multiplications and additions an element.
template <class T>
__global__ void __launch_bounds__(block_threads)
    slopes_of_slices(const T* x, const T* dy, const compute_type<T>* mean, const compute_type<T>* rstd,
                     ChannelSlices s, GradientSums* partial) {
    using S = compute_type<T>;
    const ThreadPosition at = position_of_thread(s);
    const bool used = at.channel < s.channels;
    const Normalised<S> normalised(used ? mean[at.channel] : S{0}, used ? rstd[at.channel] : S{0});
    GradientSums total{0, 0};
    S products = 0, sums = 0;
    int count = 0;
    const auto flush = [&] {
        total.add({static_cast<double>(products), static_cast<double>(sums)});
        products = sums = 0;
        count = 0;
    };
    for_each_element(s, at, [&](std::int64_t i) {
        const S slope = to_compute(dy[i]);
        products += slope * normalised(to_compute(x[i]));
        sums += slope;
        if (++count == run_length) flush();
    });
    flush();
    const GradientSums folded = fold_channel(total, at);
    if (at.member == 0 && used) partial[at.channel * gridDim.y + blockIdx.y] = folded;
}

// Also leaves the total of each channel in the place of its first slice.
// Floor: reads 16 bytes a channel and slice, writes 2 numbers a channel.
template <class T>
__global__ void finish_gradient_sums(GradientSums* partial, std::int64_t channels, std::int64_t slices,
                                     GradientPointer<T> dweight, GradientPointer<T> dbias) {
    const std::int64_t channel = global_thread();
    if (channel >= channels) return;
    GradientSums total = partial[channel * slices];
    for (std::int64_t slice = 1; slice < slices; ++slice) total.add(partial[channel * slices + slice]);
    partial[channel * slices] = total;
    using S = compute_type<T>;
    dweight.store(channel, static_cast<S>(total.products));
    dbias.store(channel, static_cast<S>(total.sums));
}

// ---- element-wise ----

/// The scale and offset of a channel: pointers that may be nullptr (1 and 0), and strides between channels.
template <class T>
struct Affine {
    const T* weight;
    const T* bias;
    std::int64_t weight_step, bias_step;

    __device__ compute_type<T> factor(std::int64_t channel) const {
        return weight == nullptr ? compute_type<T>{1} : to_compute(weight[channel * weight_step]);
    }
    __device__ compute_type<T> offset(std::int64_t channel) const {
        return bias == nullptr ? compute_type<T>{0} : to_compute(bias[channel * bias_step]);
    }
};

// N neighbours lie in one channel.
// Floor: reads x and writes y once (2 sizeof(T) bytes an element); four multiplications and additions an element.
template <class T, int N>
__global__ void normalise(const T* x, const compute_type<T>* mean, const compute_type<T>* rstd,
                          Affine<T> affine, std::int64_t channels, std::int64_t positions, std::int64_t packs,
                          T* y) {
    using S = compute_type<T>;
    for (std::int64_t pack = global_thread(); pack < packs; pack += global_threads()) {
        const std::int64_t channel = pack * N / positions % channels;
        const Normalised<S> normalised(mean[channel], rstd[channel]);
        const S factor = affine.factor(channel), offset = affine.offset(channel);
        const auto in = reinterpret_cast<const Pack<T, N>*>(x)[pack];
        Pack<T, N> out;
        for (int i = 0; i < N; ++i)
            out.values[i] = from_compute<T>(normalised(to_compute(in.values[i])) * factor + offset);
        reinterpret_cast<Pack<T, N>*>(y)[pack] = out;
    }
}

// dx = reciprocal * weight * (dy - mean(dy) - normalised * mean(dy * normalised)); `totals` (one every `slices`) holds
// the sums, and is nullptr for given statistics, which do not depend on x.
// Floor: reads x and dy and writes dx once (3 sizeof(T) bytes an element); six multiplications and additions an element.
template <class T, int N>
__global__ void gradient(const T* x, const T* dy, const compute_type<T>* mean, const compute_type<T>* rstd,
                         Affine<T> affine, const GradientSums* totals, std::int64_t slices, double count,
                         std::int64_t channels, std::int64_t positions, std::int64_t packs, T* dx) {
    using S = compute_type<T>;
    for (std::int64_t pack = global_thread(); pack < packs; pack += global_threads()) {
        const std::int64_t channel = pack * N / positions % channels;
        const S scale = rstd[channel];
        const Normalised<S> normalised_of(mean[channel], scale);
        const S factor = scale * affine.factor(channel);
        S mean_slope = 0, mean_product = 0;
        if (totals != nullptr) {
            mean_slope = static_cast<S>(totals[channel * slices].sums / count);
            mean_product = static_cast<S>(totals[channel * slices].products / count);
        }
        const auto values = reinterpret_cast<const Pack<T, N>*>(x)[pack];
        const auto gradients = reinterpret_cast<const Pack<T, N>*>(dy)[pack];
        Pack<T, N> out;
        for (int i = 0; i < N; ++i) {
            const S normalised = normalised_of(to_compute(values.values[i]));
            out.values[i] = from_compute<T>(
                factor * (to_compute(gradients.values[i]) - mean_slope - normalised * mean_product));
        }
        reinterpret_cast<Pack<T, N>*>(dx)[pack] = out;
    }
}

// ---- host side ----

template <class T>
T* elements_or_null(const Tensor& x) {
    return x.defined() ? elements_of<T>(x) : nullptr;
}

template <class T>
Affine<T> affine_of(const Tensor& weight_or_none, const Tensor& bias_or_none) {
    return {elements_or_null<T>(weight_or_none), elements_or_null<T>(bias_or_none),
            weight_or_none.defined() ? weight_or_none.strides()[0] : 0,
            bias_or_none.defined() ? bias_or_none.strides()[0] : 0};
}

/// New memory for one State per channel and slice.
template <class State>
Tensor states(const ChannelSlices& s, const Tensor& like) {
    const auto bytes = static_cast<std::int64_t>(sizeof(State));
    return Tensor::empty({s.channels * s.slices() * bytes / size_of(DType::f64)},
                         {DType::f64, like.device()});
}

dim3 grid_of(const ChannelSlices& s) {
    return {static_cast<unsigned>(s.channel_blocks()), static_cast<unsigned>(s.slices())};
}

/// Calls launch_with with the widest possible packs and their number: Width{} is the width.
template <class T, class Launch>
void with_packs(std::int64_t count, std::int64_t positions, std::initializer_list<const T*> pointers,
                const Launch& launch_with) {
    constexpr int wide = Pack<T>::size;
    const bool aligned = std::all_of(pointers.begin(), pointers.end(),
                                     [](const T* pointer) { return is_aligned_for_packs(pointer); });
    if (aligned && positions % wide == 0)
        launch_with(std::integral_constant<int, wide>{}, count / wide);
    else
        launch_with(std::integral_constant<int, 1>{}, count);
}

}  // namespace

void batch_norm_statistics(KernelDevice& device, const Tensor& given_x, double epsilon, Tensor& mean,
                           Tensor& variance, Tensor& rstd) {
    const cudaStream_t queue = device.stream();
    if (mean.count() == 0) return;
    if (given_x.dtype() == DType::f64) {  // by reductions that handle numbers whose squares are out of range
        const Tensor rows = given_x.alias({given_x.size(1), given_x.size(0), given_x.size(2)},
                                          {given_x.strides()[1], given_x.strides()[0], given_x.strides()[2]},
                                          given_x.offset());
        Tensor deviation = Tensor::empty(mean.shape(), {DType::f64, mean.device()});
        reduce(device, ReduceOp::mean, rows, 2, mean);
        cuda::variance(device, rows, 2, /*correction=*/0.0, /*root=*/true, deviation);
        launch(finish_deviations, dim3(blocks_for(mean.count(), block_threads)), dim3(block_threads), 0,
               queue, elements_of<double>(deviation), mean.count(), epsilon, elements_of<double>(variance),
               elements_of<double>(rstd));
        return;
    }
    const Tensor x = contiguous(device, given_x);
    const ChannelSlices s = slices_over(x, device.multiprocessors());
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using S = compute_type<T>;
        const Tensor partial = states<Moments<S>>(s, x);
        auto* moments = static_cast<Moments<S>*>(partial.raw_data());
        launch(statistics_of_slices<T>, grid_of(s), dim3(block_threads), 0, queue, elements_of<T>(x), s,
               moments);
        launch(finish_statistics<S>, dim3(blocks_for(s.channels, block_threads)), dim3(block_threads), 0,
               queue, moments, s.channels, s.slices(), epsilon, elements_of<S>(mean),
               elements_of<S>(variance), elements_of<S>(rstd));
    });
}

void batch_norm(KernelDevice& device, const Tensor& given_x, const Tensor& weight_or_none,
                const Tensor& bias_or_none, const Tensor& mean, const Tensor& rstd, Tensor& y) {
    const cudaStream_t queue = device.stream();
    const Tensor x = contiguous(device, given_x), center = contiguous(device, mean),
                 reciprocal = contiguous(device, rstd);
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using S = compute_type<T>;
        with_packs<T>(x.count(), x.size(2), {elements_of<T>(x), elements_of<T>(y)},
                      [&](auto width, std::int64_t packs) {
                          launch(normalise<T, decltype(width)::value>, dim3(blocks_for(packs, block_threads)),
                                 dim3(block_threads), 0, queue, elements_of<T>(x), elements_of<S>(center),
                                 elements_of<S>(reciprocal), affine_of<T>(weight_or_none, bias_or_none),
                                 x.size(1), x.size(2), packs, elements_of<T>(y));
                      });
    });
}

void batch_norm_backward(KernelDevice& device, const Tensor& given_x, const Tensor& weight_or_none,
                         const Tensor& mean, const Tensor& rstd, const Tensor& given_dy,
                         bool batch_statistics, Tensor& dx_or_none, Tensor& dweight_or_none,
                         Tensor& dbias_or_none) {
    const cudaStream_t queue = device.stream();
    const Tensor x = contiguous(device, given_x), dy = contiguous(device, given_dy),
                 center = contiguous(device, mean), reciprocal = contiguous(device, rstd);
    if (x.size(1) == 0) return;
    const ChannelSlices s = slices_over(x, device.multiprocessors());
    const bool wants_dx = dx_or_none.defined() && x.count() > 0;
    const bool wants_sums = dweight_or_none.defined() || dbias_or_none.defined() || batch_statistics;
    const Tensor partial = wants_sums ? states<GradientSums>(s, x) : Tensor();
    auto* sums = wants_sums ? static_cast<GradientSums*>(partial.raw_data()) : nullptr;
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using S = compute_type<T>;
        const S* means = elements_of<S>(center);
        const S* reciprocals = elements_of<S>(reciprocal);
        if (wants_sums) {
            launch(slopes_of_slices<T>, grid_of(s), dim3(block_threads), 0, queue, elements_of<T>(x),
                   elements_of<T>(dy), means, reciprocals, s, sums);
            launch(finish_gradient_sums<T>, dim3(blocks_for(s.channels, block_threads)), dim3(block_threads),
                   0, queue, sums, s.channels, s.slices(), GradientPointer<T>(dweight_or_none),
                   GradientPointer<T>(dbias_or_none));
        }
        if (!wants_dx) return;
        with_packs<T>(
            x.count(), x.size(2), {elements_of<T>(x), elements_of<T>(dy), elements_of<T>(dx_or_none)},
            [&](auto width, std::int64_t packs) {
                launch(gradient<T, decltype(width)::value>, dim3(blocks_for(packs, block_threads)),
                       dim3(block_threads), 0, queue, elements_of<T>(x), elements_of<T>(dy), means,
                       reciprocals, affine_of<T>(weight_or_none, Tensor()), batch_statistics ? sums : nullptr,
                       s.slices(), static_cast<double>(x.size(0) * x.size(2)), x.size(1), x.size(2), packs,
                       elements_of<T>(dx_or_none));
            });
    });
}

}  // namespace potluck::cuda
