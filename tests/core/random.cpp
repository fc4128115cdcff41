#include "core/random.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "core/backend.h"
#include "core/cpu/random_words.h"
#include "core/factories.h"
#include "core/philox.h"

using namespace potluck;

namespace {

using Four = std::array<std::uint32_t, 4>;

bool same_bits(const Tensor& a, const Tensor& b) {
    return a.bytes() == b.bytes() &&
           std::memcmp(a.raw_data(), b.raw_data(), static_cast<std::size_t>(a.bytes())) == 0;
}

struct Moments {
    double mean = 0, deviation = 0, skew = 0, kurtosis = 0;
};

Moments moments_of(const std::vector<double>& values) {
    Moments result;
    const auto n = static_cast<double>(values.size());
    for (const double value : values) result.mean += value / n;
    double second = 0, third = 0, fourth = 0;
    for (const double value : values) {
        const double d = value - result.mean;
        second += d * d / n;
        third += d * d * d / n;
        fourth += d * d * d * d / n;
    }
    result.deviation = std::sqrt(second);
    result.skew = third / std::pow(second, 1.5);
    result.kurtosis = fourth / (second * second);
    return result;
}

/// Kernels under test, by name: each fills `y` from a key.
using Fill = void (*)(RandomKey, Tensor&);
const std::vector<std::pair<const char*, Fill>> fills{
    {"uniform", [](RandomKey key, Tensor& y) { backend(y.device()).uniform(key, -2.0, 3.0, y); }},
    {"normal", [](RandomKey key, Tensor& y) { backend(y.device()).normal(key, 1.0, 2.0, y); }},
    {"random_integers",
     [](RandomKey key, Tensor& y) { backend(y.device()).random_integers(key, 0, 100, y); }},
    {"dropout",
     [](RandomKey key, Tensor& y) {
         const Tensor x = ones_like(y);
         backend(y.device()).dropout(key, {}, 0.3, x, y);
     }},
};

}  // namespace

TEST_CASE("philox: the published known answers") {
    CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    const std::uint32_t all = 0xffffffff;
    CHECK(philox4x32({all, all, all, all}, {all, all}) ==
          Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
    CHECK(philox({0, 0}, 0) == Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    CHECK(philox({9, 5}, 7) == philox({9, 12}, 0));
    CHECK(philox({9, 5}, 7) != philox({9, 5}, 8));
    CHECK(philox({9, 5}, 7) != philox({10, 5}, 7));
}

TEST_CASE("random_words: many blocks at once are the blocks one by one") {
    const RandomKey key{0x123456789abcdef0, 0xfffffffa};  // the counter crosses 32 bits
    for (const std::int64_t first : {0, 1, 2, 3, 4, 61, 64, 1000}) {
        for (const std::int64_t n : {0, 1, 2, 5, 63, 64, 65, 300}) {
            for (const std::uint32_t stream : {0U, 1U}) {
                std::vector<std::uint32_t> words(static_cast<std::size_t>(n));
                cpu::random_words(key, first, n, words.data(), stream);
                int wrong = 0;
                for (std::int64_t i = 0; i < n; ++i) {
                    const auto block = philox_block(key, static_cast<std::uint64_t>((first + i) / 4), stream);
                    if (words[static_cast<std::size_t>(i)] !=
                        block[static_cast<std::size_t>((first + i) % 4)])
                        ++wrong;
                }
                CHECK(wrong == 0);
            }
        }
    }
}

TEST_CASE("Generator: takes places in order, repeats when its state is restored") {
    Generator generator(17);
    const RandomKey first = generator.take(5);
    CHECK(first.seed == 17);
    CHECK(first.offset == 0);
    CHECK(generator.take(0).offset == 2);
    CHECK(generator.take(4).offset == 2);
    CHECK(generator.state().offset == 3);
    const RandomKey saved = generator.state();
    const Tensor once = randn({100}, {}, &generator);
    generator.set_state(saved);
    CHECK(same_bits(once, randn({100}, {}, &generator)));
    Generator copy = generator;
    CHECK(same_bits(rand({9}, {}, &copy), rand({9}, {}, &generator)));
    CHECK_THROWS_AS(generator.take(-1), Error);
}

TEST_CASE("Generator: threads that share one never get the same place") {
    Generator generator(1);
    std::array<std::vector<std::uint64_t>, 4> places;
    {
        std::vector<std::jthread> workers;
        for (auto& mine : places)
            workers.emplace_back([&] {
                for (int i = 0; i < 10'000; ++i) mine.push_back(generator.take(1).offset);
            });
    }
    std::vector<std::uint64_t> all;
    for (const auto& some : places) all.insert(all.end(), some.begin(), some.end());
    std::sort(all.begin(), all.end());
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
    CHECK(generator.state().offset == 40'000);
}

TEST_CASE("manual_seed: the default generator begins anew") {
    const RandomKey before = default_generator().state();
    manual_seed(3);
    const Tensor first = randn({10});
    const Tensor second = randn({10});
    CHECK_FALSE(same_bits(first, second));
    manual_seed(3);
    CHECK(same_bits(first, randn({10})));
    default_generator().set_state(before);
}

TEST_CASE(
    "generator_states: those of the CPU and of the tensors' devices, which set_generator_states() brings "
    "back") {
    static const Device other = add_cpu_device({.threads = 1});
    const GeneratorStates before = generator_states({});
    CHECK(before.size() == 1);
    CHECK(before.contains("cpu"));
    const std::array tensors{zeros({2}), zeros({2}, {DType::f32, other}), zeros({2}, {DType::f32, other})};
    const GeneratorStates states = generator_states(tensors);
    CHECK(states.size() == 2);
    const Tensor here = randn({5}), there = randn({5}, {DType::f32, other});
    GeneratorStates more = states;
    more["cuda:63"] = {1, 2};  // of another machine
    set_generator_states(more);
    CHECK(same_bits(here, randn({5})));
    CHECK(same_bits(there, randn({5}, {DType::f32, other})));

    more["toaster"] = {1, 2};
    const std::uint64_t offset = default_generator().state().offset;
    more["cpu"].offset = offset + 9;
    CHECK_THROWS_AS(set_generator_states(more), Error);
    CHECK(default_generator().state().offset == offset);
    set_generator_states(before);
}

TEST_CASE("random kernels: the same bits for any number of threads, split and strides") {
    const RandomKey key{77, 1000};
    for (const auto& [name, fill] : fills) {
        for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
            CAPTURE(name);
            CAPTURE(name_of(dtype));
            constexpr std::int64_t count = 100'003;
            set_threads(1);
            Tensor whole = empty({count}, {dtype});
            fill(key, whole);
            for (const int threads : {2, 3}) {
                set_threads(threads);
                Tensor again = empty({count}, {dtype});
                fill(key, again);
                CHECK(same_bits(whole, again));
            }
            set_threads(0);
            // Element i depends only on the key and i: pieces that begin at a block give the same elements.
            for (const std::int64_t first : {4, 1024, 4096 + 36, 99'996}) {
                const std::int64_t length = std::min<std::int64_t>(count - first, 777);
                Tensor part = empty({length}, {dtype});
                fill({key.seed, key.offset + static_cast<std::uint64_t>(first / 4)}, part);
                CHECK(same_bits(part, whole.alias({length}, {1}, first)));
            }
            // A target with strides is filled in row-major order.
            Tensor turned = empty({77, 13}, {dtype}).alias({13, 77}, {1, 13}, 0);
            fill(key, turned);
            CHECK(turned.to_vector() == whole.alias({1001}, {1}, 0).to_vector());
        }
    }
}

TEST_CASE("uniform: inside its range, evenly") {
    Generator generator(2);
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
        CAPTURE(name_of(dtype));
        const auto values = rand({400'000}, {dtype}, &generator).to_vector();
        CHECK(*std::min_element(values.begin(), values.end()) >= 0.0);
        CHECK(*std::max_element(values.begin(), values.end()) < 1.0);
        const Moments moments = moments_of(values);
        const double step = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0.0;
        CHECK(std::fabs(moments.mean - (0.5 - step / 2)) < 5 * 0.2887 / std::sqrt(4e5));
        CHECK(std::fabs(moments.deviation - 0.28868) < 1e-3);
    }
    // A range whose upper end rounding would reach.
    Tensor narrow = empty({100'000}, {DType::bf16});
    backend(narrow.device()).uniform({1, 0}, 1.0, 1.0078125, narrow);
    const auto values = narrow.to_vector();
    CHECK(*std::max_element(values.begin(), values.end()) == 1.0);
    Tensor negative = empty({100'000}, {DType::f16});
    backend(negative.device()).uniform({1, 0}, -3.0, -1.0, negative);
    const auto below = negative.to_vector();
    CHECK(*std::max_element(below.begin(), below.end()) < -1.0);
    CHECK(*std::min_element(below.begin(), below.end()) >= -3.0);
}

TEST_CASE("normal: moments, tails and independence") {
    Generator generator(3);
    for (const DType dtype : {DType::f32, DType::f64}) {
        CAPTURE(name_of(dtype));
        constexpr std::int64_t count = 1'000'000;
        const auto values = randn({count}, {dtype}, &generator).to_vector();
        const Moments moments = moments_of(values);
        CHECK(std::fabs(moments.mean) < 0.005);
        CHECK(std::fabs(moments.deviation - 1) < 0.004);
        CHECK(std::fabs(moments.skew) < 0.013);
        CHECK(std::fabs(moments.kurtosis - 3) < 0.03);
        // Beyond 1, 2 and 4 standard deviations, on each side: the count may deviate by 5 of its own.
        for (const auto& [limit, share] : {std::pair(1.0, 0.158655), {2.0, 0.0227501}, {4.0, 3.16712e-5}}) {
            const double wanted = share * count;
            const double slack = 5 * std::sqrt(wanted);
            const auto above =
                std::count_if(values.begin(), values.end(), [&](double x) { return x > limit; });
            const auto below =
                std::count_if(values.begin(), values.end(), [&](double x) { return x < -limit; });
            CHECK(std::fabs(static_cast<double>(above) - wanted) < slack);
            CHECK(std::fabs(static_cast<double>(below) - wanted) < slack);
        }
        double neighbours = 0;
        for (std::size_t i = 0; i + 1 < values.size(); ++i) neighbours += values[i] * values[i + 1];
        CHECK(std::fabs(neighbours / count) < 0.005);
    }
    // f32 is f64 with fewer digits: the same random words decide both.
    Tensor wide = empty({10'000}, {DType::f64});
    Tensor narrow = empty({10'000}, {DType::f32});
    backend(wide.device()).normal({5, 5}, 0.0, 1.0, wide);
    backend(narrow.device()).normal({5, 5}, 0.0, 1.0, narrow);
    double difference = 0;
    const auto a = wide.to_vector();
    const auto b = narrow.to_vector();
    for (std::size_t i = 0; i < a.size(); ++i) difference = std::max(difference, std::fabs(a[i] - b[i]));
    CHECK(difference < 1e-5);
    Tensor moved = empty({100'000});
    backend(moved.device()).normal({6, 0}, 10.0, 0.5, moved);
    CHECK(std::fabs(moments_of(moved.to_vector()).mean - 10) < 0.01);
    CHECK(std::fabs(moments_of(moved.to_vector()).deviation - 0.5) < 0.01);
    Tensor constant = empty({100});
    backend(constant.device()).normal({6, 0}, 10.0, 0.0, constant);
    CHECK(constant.to_vector() == std::vector<double>(100, 10.0));
}

TEST_CASE("random_integers: even over small and huge ranges") {
    Tensor bytes = empty({256'000}, {DType::u8});
    backend(bytes.device()).random_integers({4, 0}, 0, 256, bytes);
    std::vector<int> seen(256, 0);
    for (const auto value : bytes.to_vector<std::uint8_t>()) ++seen[value];
    CHECK(*std::min_element(seen.begin(), seen.end()) > 1000 - 5 * 32);
    CHECK(*std::max_element(seen.begin(), seen.end()) < 1000 + 5 * 32);
    Tensor wide = empty({10'000}, {DType::i64});
    backend(wide.device()).random_integers({4, 0}, INT64_MIN, INT64_MAX, wide);
    const auto values = wide.to_vector<std::int64_t>();
    const auto negative = std::count_if(values.begin(), values.end(), [](std::int64_t x) { return x < 0; });
    CHECK(std::abs(negative - 5000) < 250);
    CHECK(*std::max_element(values.begin(), values.end()) > (std::int64_t{1} << 62));
    std::vector<std::int64_t> low;
    for (const std::int64_t value : values) low.push_back(value & 0xffff);
    std::sort(low.begin(), low.end());
    CHECK(std::unique(low.begin(), low.end()) - low.begin() > 9000);
}

TEST_CASE("dropout: keeps its share, scales it, and is exact at both ends") {
    constexpr std::int64_t count = 1'000'000;
    const Tensor x = full({count}, 3.0);
    for (const double p : {0.1, 0.5, 0.9}) {
        Tensor y = empty({count});
        backend(y.device()).dropout({8, 0}, {}, p, x, y);
        const auto values = y.to_vector<float>();
        const float kept = 3.0F * static_cast<float>(1 / (1 - p));
        const auto zeros = std::count(values.begin(), values.end(), 0.0F);
        CHECK(zeros + std::count(values.begin(), values.end(), kept) == count);
        CHECK(std::fabs(static_cast<double>(zeros) / count - p) < 0.0025);
    }
    Tensor y = empty({count});
    backend(y.device()).dropout({8, 0}, {}, 0.0, x, y);
    CHECK(same_bits(x, y));
    const Tensor infinite = full({1000}, HUGE_VAL);
    Tensor none = empty({1000});
    backend(none.device()).dropout({8, 0}, {}, 1.0, infinite, none);
    CHECK(none.to_vector() == std::vector<double>(1000, 0.0));
    backend(none.device()).dropout({8, 0}, {}, 0.5, infinite, none);
    for (const double value : none.to_vector()) CHECK((value == 0.0 || value == HUGE_VAL));
    Tensor in_place = full({1000}, 2.0);
    const Tensor same = in_place;
    backend(in_place.device()).dropout({8, 0}, {}, 0.5, same, in_place);
    for (const double value : in_place.to_vector()) CHECK((value == 0.0 || value == 4.0));
}
