// Rotary position embedding: rotates pairs (x[i], x[i + head_size / 2]) of each head by the angle of the position. The
// work is divided into steps of up to 16 bytes of the first half of a row and the same amount of the second half;
// threads process the steps in a grid-stride loop, and adjacent threads process adjacent steps.

#include <limits>
#include <type_traits>

#include "cuda/kernel_device.h"
#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {
namespace {

constexpr int threads = 256;

struct Rotary {
    std::int64_t steps;  // of N pairs
    std::int64_t steps_of_row, heads, time, half;
    std::int64_t strides[4];  // of x; the last is 1 for N > 1
    bool inverse;
};

/// Index is the type in which positions are divided: 32 bits are faster where they are enough.
/// x (batch, heads, time, 2 * half) of any strides, cosine and sine (time, half). Floor: reads x and writes y once, reads
/// the tables from the caches, 6 operations a pair.
template <class T, int N, class Index>
__global__ void __launch_bounds__(threads)
    rotary_kernel(const Rotary r, const T* x, const float* cosine, const float* sine, T* y) {
    using Computed = compute_type<T>;
    using Values = Pack<T, N>;
    using Angles = Pack<float, N>;
    for (std::int64_t step = global_thread(); step < r.steps; step += global_threads()) {
        const Index row_index = static_cast<Index>(step) / static_cast<Index>(r.steps_of_row);
        const Index head_index = row_index / static_cast<Index>(r.time);
        const Index batch_index = head_index / static_cast<Index>(r.heads);
        const auto row = static_cast<std::int64_t>(row_index);    // (batch, heads, time) in a line
        const auto head = static_cast<std::int64_t>(head_index);  // (batch, heads)
        const auto batch = static_cast<std::int64_t>(batch_index);
        const std::int64_t i = (step - row * r.steps_of_row) * N;
        const std::int64_t position = row - head * r.time;
        const T* from = x + batch * r.strides[0] + (head - batch * r.heads) * r.strides[1] +
                        position * r.strides[2] + i * r.strides[3];
        T* to = y + row * 2 * r.half + i;
        const Values a = *reinterpret_cast<const Values*>(from);
        const Values b = *reinterpret_cast<const Values*>(from + r.half * r.strides[3]);
        const auto c = *reinterpret_cast<const Angles*>(cosine + position * r.half + i);
        const auto s = *reinterpret_cast<const Angles*>(sine + position * r.half + i);
        Values turned_a;
        Values turned_b;
        for (int j = 0; j < N; ++j) {
            const Computed first = to_compute(a.values[j]);
            const Computed second = to_compute(b.values[j]);
            const auto along = static_cast<Computed>(c.values[j]);
            const auto across = static_cast<Computed>(r.inverse ? -s.values[j] : s.values[j]);
            turned_a.values[j] = from_compute<T>(first * along - second * across);
            turned_b.values[j] = from_compute<T>(second * along + first * across);
        }
        *reinterpret_cast<Values*>(to) = turned_a;
        *reinterpret_cast<Values*>(to + r.half) = turned_b;
    }
}

/// Whether every step of N pairs is aligned to its size, in x, y and the tables.
template <class T, int N>
bool allows_packs(const Rotary& r, const T* x, const float* cosine, const float* sine, const T* y) {
    const auto is_aligned = [](const auto* data) {
        return reinterpret_cast<std::uintptr_t>(data) % (N * sizeof(*data)) == 0;
    };
    return r.half % N == 0 && r.strides[3] == 1 && r.strides[0] % N == 0 && r.strides[1] % N == 0 &&
           r.strides[2] % N == 0 && is_aligned(x) && is_aligned(cosine) && is_aligned(sine) && is_aligned(y);
}

}  // namespace

void rotary(KernelDevice& device, const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse,
            Tensor& y) {
    if (y.count() == 0) return;
    const cudaStream_t queue = device.stream();
    const Tensor cosines = contiguous(device, cosine, DType::f32);
    const Tensor sines = contiguous(device, sine, DType::f32);
    Rotary r{.steps = x.count() / 2,
             .steps_of_row = x.size(3) / 2,
             .heads = x.size(1),
             .time = x.size(2),
             .half = x.size(3) / 2,
             .strides = {x.strides()[0], x.strides()[1], x.strides()[2], x.strides()[3]},
             .inverse = inverse};
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        constexpr int n = Pack<T>::size;
        const auto* c = elements_of<float>(cosines);
        const auto* s = elements_of<float>(sines);
        const auto* from = elements_of<T>(x);
        auto* to = elements_of<T>(y);
        const auto start = [&](auto size) {
            constexpr int pairs = decltype(size)::value;
            r.steps /= pairs;
            r.steps_of_row /= pairs;
            const bool short_index = r.steps <= std::numeric_limits<std::uint32_t>::max();
            launch(short_index ? &rotary_kernel<T, pairs, std::uint32_t>
                               : &rotary_kernel<T, pairs, std::uint64_t>,
                   blocks_for(r.steps, threads, 32 * device.multiprocessors()), threads, 0, queue, r, from, c,
                   s, to);
        };
        if (allows_packs<T, n>(r, from, c, s, to))
            start(std::integral_constant<int, n>{});
        else
            start(std::integral_constant<int, 1>{});
    });
}

}  // namespace potluck::cuda
