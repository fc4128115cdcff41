#include <cmath>
#include <numbers>

#include "core/cpu/blocks.h"
#include "core/cpu/copy.h"
#include "core/cpu/dropout_rule.h"
#include "core/cpu/random_words.h"
#include "core/cpu/vector_math.h"
#include "core/random_part.h"
#include "core/random_rules.h"

namespace potluck::cpu {
namespace {

/// Random bits of one block of elements.
template <class Word>
struct WordBlock;

template <>
struct WordBlock<std::uint32_t> {
    alignas(64) std::array<std::uint32_t, block_size> words;

    WordBlock(RandomKey key, std::int64_t first, std::int64_t n) {
        random_words(key, first, n, words.data());
    }
    std::uint32_t operator[](std::size_t i) const { return words[i]; }
};

template <>
struct WordBlock<std::uint64_t> {
    alignas(64) std::array<std::uint32_t, block_size> high, low;

    WordBlock(RandomKey key, std::int64_t first, std::int64_t n) {
        random_words(key, first, n, high.data());
        random_words(key, first, n, low.data(), 1);
    }
    std::uint64_t operator[](std::size_t i) const { return std::uint64_t{high[i]} << 32 | low[i]; }
};

template <class T, class Word>
void fill_uniform(RandomKey key, double low, double high, Tensor& y) {
    const int bits = precision_of(y.dtype());
    const int shift = static_cast<int>(8 * sizeof(Word)) - bits;
    const T unit = static_cast<T>(std::ldexp(1.0, -bits));
    const T width = static_cast<T>(high - low);
    const T base = static_cast<T>(low);
    const T limit = static_cast<T>(below(high, y.dtype()));  // rounding may reach `high` itself
    BlockMap<T>::run_at(y, [&](std::int64_t first, T* to, std::int64_t n) {
        const WordBlock<Word> words(key, first, n);
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
            const T part = static_cast<T>(words[i] >> shift) * unit;
            to[i] = std::min(base + width * part, limit);
        }
    });
}

/// Turns a pair of uniform numbers into a pair of normal ones: elements 2k and 2k + 1.
/// Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
void normal_block(RandomKey key, std::int64_t first, std::int64_t n, float mean, float std, float* to) {
    const WordBlock<std::uint32_t> words(key, first, n + n % 2);
    const auto pairs = static_cast<std::size_t>((n + 1) / 2);
    alignas(64) std::array<float, block_size> values;
    for (std::size_t i = 0; i < pairs; ++i) {
        const float u = static_cast<float>(words[2 * i]) * 0x1p-32F + 0x1p-33F;  // in (0, 1]
        const float radius = std::sqrt(std::max(-2 * logarithm(u), 0.0F)) * std;
        const UnitVector direction = unit_vector(words[2 * i + 1] >> 8);
        values[2 * i] = radius * direction.cosine + mean;
        values[2 * i + 1] = radius * direction.sine + mean;
    }
    std::copy_n(values.begin(), n, to);
}

void normal_block(RandomKey key, std::int64_t first, std::int64_t n, double mean, double std, double* to) {
    const WordBlock<std::uint64_t> words(key, first, n + n % 2);
    for (std::int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i - i % 2);
        const double u = (static_cast<double>(words[at] >> 12) + 0.5) * 0x1p-52;
        const double angle = static_cast<double>(words[at + 1] >> 11) * (0x1p-53 * 2 * std::numbers::pi);
        const double radius = std::sqrt(-2.0 * std::log(u)) * std;
        to[i] = mean + radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
}

/// The upper 64 bits of the product: scales `word` from [0, 2^64) to [0, range).
std::uint64_t scale_word(std::uint64_t word, std::uint64_t range) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>(static_cast<Wide>(word) * range >> 64);
}

}  // namespace

void uniform(RandomKey key, double low, double high, Tensor& y) {
    if (y.dtype() == DType::f64)
        fill_uniform<double, std::uint64_t>(key, low, high, y);
    else
        fill_uniform<float, std::uint32_t>(key, low, high, y);
}

void normal(RandomKey key, double mean, double std, Tensor& y) {
    visit_floating_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        BlockMap<T>::run_at(y, [&](std::int64_t first, T* to, std::int64_t n) {
            normal_block(key, first, n, static_cast<T>(mean), static_cast<T>(std), to);
        });
    });
}

void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) {
    const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    BlockMap<std::int64_t>::run_at(y, [&](std::int64_t first, std::int64_t* to, std::int64_t n) {
        const WordBlock<std::uint64_t> words(key, first, n);
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
            to[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + scale_word(words[i], range));
    });
}

void dropout(RandomKey key, const RandomPart& part, double p, const Tensor& x, Tensor& y) {
    const std::uint64_t threshold = dropout_threshold(p);
    if (threshold >> 32 != 0) return fill(y, 0);  // p = 1
    const auto lowest_kept = static_cast<std::uint32_t>(threshold);
    const NumberedRuns numbers = numbered_runs(y.shape(), part);
    visit_floating_compute(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const T scale = static_cast<T>(1.0 / (1.0 - p));
        BlockMap<T, T>::run_at(y, x, [&](std::int64_t first, T* to, const T* from, std::int64_t n) {
            alignas(64) std::array<std::uint32_t, block_size> words;
            for (std::int64_t at = 0, rest = n; rest > 0;) {
                const std::int64_t count = std::min(rest, numbers.left_of_run(first + at));
                random_words(key, numbers.of(first + at), count, words.data() + at);
                at += count;
                rest -= count;
            }
            for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
                const T scaled = from[i] * scale;  // a separate statement, so that the compiler vectorises it
                to[i] = words[i] >= lowest_kept ? scaled : T{0};
            }
        });
    });
}

}  // namespace potluck::cpu
