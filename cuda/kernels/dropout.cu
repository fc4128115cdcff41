// Dropout: the same mask as on the CPU, computed where it is used and never stored. A thread draws the numbers of its
// own pack of adjacent elements (random_words.h), so backward, which is the same kernel applied to dy, draws the same
// mask.
//
// Floor: 2 sizeof(T) bytes an element; 5 products of 32 x 32 bits an element.

#include "core/cpu/dropout_rule.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/element_map.h"
#include "cuda/kernels/random_words.h"

namespace potluck::cuda {
namespace {

template <class Computed>
struct Dropout {
    MovingKey key;
    NumberedRuns numbers;
    bool has_whole_packs;  // the numbers of a pack are consecutive and begin at a multiple of its size
    std::uint32_t lowest_kept;
    Computed scale;

    template <int N, class T>
    __device__ void operator()(std::int64_t first, Pack<T, N>& y, const Pack<T, N>& x) const {
        std::uint32_t words[N];
        if (has_whole_packs) {
            random_words(key, numbers.of(first), words);
        } else {
            const RandomKey here = key;
            for (int i = 0; i < N; ++i) words[i] = random_word(here, numbers.of(first + i));
        }
        for (int i = 0; i < N; ++i) {
            const Computed kept = to_compute(x.values[i]) * scale;
            y.values[i] = from_compute<T>(words[i] >= lowest_kept ? kept : Computed{0});
        }
    }
};

bool has_whole_packs(const NumberedRuns& numbers) {
    constexpr std::int64_t most = 8;  // elements of a pack
    bool fits = numbers.first % most == 0;
    for (int axis = 0; axis < numbers.axes; ++axis)
        fits = fits && numbers.run % most == 0 && numbers.strides[axis] % most == 0;
    return fits;
}

}  // namespace

void dropout(KernelDevice& device, RandomKey key, const RandomPart& part, double p, const Tensor& x,
             Tensor& y) {
    const std::uint64_t threshold = cpu::dropout_threshold(p);
    if (threshold >> 32 != 0) return device.fill(y, 0);  // p = 1
    const NumberedRuns numbers = numbered_runs(y.shape(), part);
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        const Dropout<Computed> body{{key, device.random_advance(key)},
                                     numbers,
                                     has_whole_packs(numbers),
                                     static_cast<std::uint32_t>(threshold),
                                     static_cast<Computed>(1.0 / (1.0 - p))};
        ElementMap<T, T>::run(device.stream(), body, y, x);
    });
}

}  // namespace potluck::cuda
