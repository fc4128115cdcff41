// Random tensors. Number i of the sequence at a key decides element i, so a thread computes the numbers of its own
// elements (random_words.h): one pack, which is one block of Philox for f32. Uniform numbers and integers have the same
// bits as on the CPU, normal ones are the same up to the rounding of the logarithm.
//
// Floor: sizeof(T) bytes an element, written; 5 products of 32 x 32 bits an element (10 where 64 bits are needed), and a
// logarithm, a square root and a turn for two normal numbers.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/random_rules.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/element_map.h"
#include "cuda/kernels/random_words.h"

namespace potluck::cuda {
namespace {

/// f64 takes 64 random bits per element, the other dtypes 32.
template <class Computed>
using Word = std::conditional_t<std::is_same_v<Computed, double>, std::uint64_t, std::uint32_t>;

template <class Computed>
struct Uniform {
    MovingKey key;
    int shift;  // leaves as many bits as the dtype can represent
    Computed unit, base, width, limit;

    template <int N, class T>
    __device__ void operator()(std::int64_t first, Pack<T, N>& y) const {
        Word<Computed> words[N];
        random_words(key, first, words);
        for (int i = 0; i < N; ++i) {
            const Computed part = static_cast<Computed>(words[i] >> shift) * unit;
            const Computed value = base + width * part;
            y.values[i] = from_compute<T>(limit < value ? limit : value);  // rounding may reach the upper end
        }
    }
};

/// Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958: a pair of uniform numbers, those of
/// elements 2k and 2k + 1, gives a pair of normal ones.
struct NormalPair {
    double even, odd;
};
__device__ NormalPair normal_pair(std::uint64_t length, std::uint64_t angle) {
    const double u = (static_cast<double>(length >> 12) + 0.5) * 0x1p-52;
    const double turned = static_cast<double>(angle >> 11) * (0x1p-53 * 2 * std::numbers::pi);
    const double radius = std::sqrt(-2.0 * std::log(u));
    return {radius * std::cos(turned), radius * std::sin(turned)};
}
struct NormalFloats {
    float even, odd;
};
__device__ NormalFloats normal_pair(std::uint32_t length, std::uint32_t angle) {
    const float u = static_cast<float>(length) * 0x1p-32f + 0x1p-33f;  // in (0, 1]
    const float square = -2 * std::log(u);
    const float radius = std::sqrt(square < 0.0f ? 0.0f : square);
    const UnitVector direction = unit_vector(angle >> 8);
    return {radius * direction.cosine, radius * direction.sine};
}

template <class Computed>
struct Normal {
    MovingKey key;
    Computed mean, std;

    template <int N, class T>
    __device__ void operator()(std::int64_t first, Pack<T, N>& y) const {
        if constexpr (N == 1) {  // computes the whole pair and keeps one of the two
            Word<Computed> words[2];
            random_words(key, first - first % 2, words);
            const auto pair = normal_pair(words[0], words[1]);
            y.values[0] = from_compute<T>((first % 2 == 0 ? pair.even : pair.odd) * std + mean);
        } else {
            Word<Computed> words[N];
            random_words(key, first, words);
            for (int i = 0; i < N; i += 2) {
                const auto pair = normal_pair(words[i], words[i + 1]);
                y.values[i] = from_compute<T>(pair.even * std + mean);
                y.values[i + 1] = from_compute<T>(pair.odd * std + mean);
            }
        }
    }
};

struct Integers {
    MovingKey key;
    std::uint64_t low, range;

    template <int N, class T>
    __device__ void operator()(std::int64_t first, Pack<T, N>& y) const {
        constexpr int at_once = N < 4 ? N : 4;  // the words of a pack of bytes would take 64 registers
        const RandomKey here = key;
        for (int i = 0; i < N; i += at_once) {
            std::uint64_t words[at_once];
            random_words(here, first + i, words);
            // The upper half of the product scales a word from [0, 2^64) to [0, range).
            for (int lane = 0; lane < at_once; ++lane)
                y.values[i + lane] =
                    from_compute<T>(static_cast<std::int64_t>(low + __umul64hi(words[lane], range)));
        }
    }
};

}  // namespace

void uniform(KernelDevice& device, RandomKey key, double low, double high, Tensor& y) {
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        const int bits = precision_of(y.dtype());
        const Uniform<Computed> body{
            .key = {key, device.random_advance(key)},
            .shift = static_cast<int>(8 * sizeof(Word<Computed>)) - bits,
            .unit = static_cast<Computed>(std::ldexp(1.0, -bits)),
            .base = static_cast<Computed>(low),
            .width = static_cast<Computed>(high - low),
            .limit = static_cast<Computed>(below(high, y.dtype())),
        };
        ElementMap<T>::run(device.stream(), body, y);
    });
}

void normal(KernelDevice& device, RandomKey key, double mean, double std, Tensor& y) {
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        const Normal<Computed> body{
            {key, device.random_advance(key)}, static_cast<Computed>(mean), static_cast<Computed>(std)};
        ElementMap<T>::run(device.stream(), body, y);
    });
}

void random_integers(KernelDevice& device, RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) {
    const auto range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    const Integers body{{key, device.random_advance(key)}, static_cast<std::uint64_t>(low), range};
    visit_device(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        ElementMap<T>::run(device.stream(), body, y);
    });
}

}  // namespace potluck::cuda
