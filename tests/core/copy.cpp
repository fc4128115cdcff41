#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/backend.h"
#include "core/copies.h"
#include "core/cpu/blocks.h"
#include "core/cpu/copy_past_caches.h"
#include "core/factories.h"

using namespace potluck;

namespace {

const std::vector<DType> all_dtypes{DType::f64, DType::f32, DType::f16, DType::bf16,
                                    DType::i64, DType::i32, DType::u8,  DType::boolean};

template <class T>
double as_double(T value) {
    if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>)
        return static_cast<float>(value);
    else
        return static_cast<double>(value);
}

void copy(const Tensor& from, const Tensor& to) {
    Tensor target = to;
    backend(from.device()).copy(from, target);
}

/// The bytes of element `index` (row-major), addressed by plain arithmetic.
const std::byte* element(const Tensor& x, std::int64_t index) {
    std::int64_t offset = 0;
    for (std::size_t axis = x.shape().size(); axis-- > 0;) {
        offset += index % x.shape()[axis] * x.strides()[axis];
        index /= x.shape()[axis];
    }
    return static_cast<const std::byte*>(x.raw_data()) + offset * size_of(x.dtype());
}

/// The expected result of copying one element, by the rules of core/cpu/convert.h, computed in long double.
template <class To>
To expected(long double value, std::int64_t integer, bool from_integer) {
    if constexpr (std::same_as<To, bool>) {
        return value != 0 || std::isnan(value);
    } else if constexpr (std::is_integral_v<To>) {
        if (from_integer) return static_cast<To>(integer);
        if (std::isnan(value)) return 0;
        if (value >= static_cast<long double>(std::numeric_limits<To>::max()))
            return std::numeric_limits<To>::max();
        if (value <= static_cast<long double>(std::numeric_limits<To>::min()))
            return std::numeric_limits<To>::min();
        return static_cast<To>(value);
    } else if constexpr (std::same_as<To, double> || std::same_as<To, float>) {
        return static_cast<To>(value);
    } else {
        return To(static_cast<float>(value));  // the tested numbers are exact in f32 where this matters
    }
}

std::vector<double> interesting_numbers() {
    return {0,        1,         -1,    2.5,  -2.5, 0.3,        255,           256,   300,
            -300,     65504,     70000, 1e-8, 3e9,  -3e9,       1e19,          -1e19, 0.49999,
            HUGE_VAL, -HUGE_VAL, NAN,   127,  128,  2147483647, -2147483648.0, 7};
}

/// A view with random strides (some negative, some 0 when `repeats`) of new memory with random bits.
Tensor random_view(std::mt19937& random, const Shape& shape, DType dtype, bool repeats) {
    const auto pick = [&](std::int64_t n) {
        return static_cast<std::int64_t>(random() % static_cast<unsigned>(n));
    };
    std::vector<std::size_t> order(shape.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    Strides strides(shape.size());
    std::int64_t step = 1 + (pick(4) == 0 ? 1 : 0);
    std::int64_t offset = pick(3);
    for (const std::size_t axis : order) {
        strides[axis] = repeats && pick(5) == 0 ? 0 : step;
        if (strides[axis] != 0) step *= std::max<std::int64_t>(shape[axis], 1);
        if (pick(4) == 0) step += pick(3);
        if (strides[axis] > 0 && shape[axis] > 0 && pick(5) == 0) {
            offset += strides[axis] * (shape[axis] - 1);
            strides[axis] = -strides[axis];
        }
    }
    Tensor memory = Tensor::empty({step + offset + 8}, {dtype});
    auto* bytes = static_cast<std::uint8_t*>(memory.raw_data());
    for (std::int64_t i = 0; i < memory.bytes(); ++i)
        bytes[i] = static_cast<std::uint8_t>(dtype == DType::boolean ? random() & 1U : random());
    return memory.alias(shape, strides, offset);
}

}  // namespace

TEST_CASE("copy: all pairs of dtypes follow the conversion rules") {
    for (const DType from_dtype : all_dtypes) {
        for (const DType to_dtype : all_dtypes) {
            CAPTURE(name_of(from_dtype));
            CAPTURE(name_of(to_dtype));
            const auto numbers = interesting_numbers();
            const Tensor doubles = tensor(numbers, {static_cast<std::int64_t>(numbers.size())}, {DType::f64});
            const Tensor source = detail::cast(doubles, from_dtype);
            const Tensor target = empty(source.shape(), {to_dtype});
            copy(source, target);
            int wrong = 0;
            for (std::int64_t i = 0; i < source.count(); ++i) {
                visit(from_dtype, [&](auto from_zero) {
                    visit(to_dtype, [&](auto to_zero) {
                        using From = decltype(from_zero);
                        using To = decltype(to_zero);
                        const From from = source.data<From>()[i];
                        const To to = target.data<To>()[i];
                        long double value = 0;
                        std::int64_t integer = 0;
                        if constexpr (std::is_integral_v<From>) {
                            value = static_cast<long double>(from);
                            integer = static_cast<std::int64_t>(from);
                        } else if constexpr (std::same_as<From, double>) {
                            value = from;
                        } else {
                            value = static_cast<float>(from);
                        }
                        const To wanted = expected<To>(value, integer, std::is_integral_v<From>);
                        if constexpr (std::is_integral_v<To>) {
                            if (to != wanted) ++wrong;
                        } else {
                            const auto got = as_double(to);
                            const auto want = as_double(wanted);
                            if (std::isnan(want) ? !std::isnan(got) : got != want) ++wrong;
                        }
                    });
                });
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("copy: any strides on both sides, in every size of element") {
    std::mt19937 random(7);
    for (int round = 0; round < 600; ++round) {
        Shape shape(random() % 5);
        for (auto& size : shape) {
            constexpr std::int64_t sizes[] = {1, 2, 3, 4, 7, 31, 33, 64, 0};
            size = sizes[random() % (round % 3 == 0 ? 9 : 6)];
        }
        const DType dtype = all_dtypes[random() % all_dtypes.size()];
        const Tensor source = random_view(random, shape, dtype, true);
        const Tensor target = random_view(random, shape, dtype, false);
        std::vector<std::byte> before(static_cast<std::size_t>(target.storage()->bytes()));
        std::memcpy(before.data(), target.storage()->data(), before.size());
        copy(source, target);
        int wrong = 0;
        std::vector<bool> written(before.size(), false);
        for (std::int64_t i = 0; i < source.count(); ++i) {
            const std::byte* place = element(target, i);
            if (std::memcmp(element(source, i), place, static_cast<std::size_t>(size_of(dtype))) != 0)
                ++wrong;
            for (std::int64_t k = 0; k < size_of(dtype); ++k)
                written[static_cast<std::size_t>(place - target.storage()->data() + k)] = true;
        }
        for (std::size_t i = 0; i < before.size(); ++i)  // nothing outside the view is changed
            if (!written[i] && target.storage()->data()[i] != before[i]) ++wrong;
        CAPTURE(to_string(shape));
        CAPTURE(to_string(source.strides()));
        CAPTURE(to_string(target.strides()));
        CHECK(wrong == 0);
    }
}

TEST_CASE("copy: a conversion with any strides equals the conversion of dense copies") {
    std::mt19937 random(8);
    for (int round = 0; round < 200; ++round) {
        Shape shape(1 + random() % 4);
        for (auto& size : shape) size = 1 + static_cast<std::int64_t>(random() % 40);
        if (element_count(shape) > 200'000) continue;
        const DType from = all_dtypes[random() % all_dtypes.size()];
        const DType to = all_dtypes[random() % all_dtypes.size()];
        const Tensor source = random_view(random, shape, from, true);
        const Tensor dense = empty(shape, {from});
        copy(source, dense);
        const Tensor wanted = empty(shape, {to});
        copy(dense, wanted);
        const Tensor target = random_view(random, shape, to, false);
        copy(source, target);
        int wrong = 0;
        for (std::int64_t i = 0; i < source.count(); ++i) {
            visit(to, [&](auto zero) {
                using To = decltype(zero);
                const To got = *reinterpret_cast<const To*>(element(target, i));
                const To want = wanted.data<To>()[i];
                if constexpr (std::is_integral_v<To>) {
                    if (got != want) ++wrong;
                } else {
                    const auto a = as_double(got);
                    const auto b = as_double(want);
                    if (!(a == b || (std::isnan(a) && std::isnan(b)))) ++wrong;
                }
            });
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("copy: large transposes, with any number of threads") {
    const Tensor x = arange(0, 300 * 501, 1, {DType::i32});
    const Tensor matrix = x.alias({300, 501}, {501, 1}, 0);
    const Tensor turned = x.alias({501, 300}, {1, 501}, 0);
    for (const int count : {1, 2, 3}) {
        set_threads(count);
        const Tensor y = empty({501, 300}, {DType::i32});
        copy(turned, y);
        const Tensor back = empty({300, 501}, {DType::i32});
        copy(y.alias({300, 501}, {1, 300}, 0), back);
        CHECK(y.data<std::int32_t>()[1] == 501);
        CHECK(back.to_vector<std::int32_t>() == matrix.to_vector<std::int32_t>());
        const Tensor halves = empty({501, 300}, {DType::f64});
        copy(turned, halves);
        CHECK(halves.to_vector<std::int32_t>() == y.to_vector<std::int32_t>());
    }
    set_threads(0);
}

TEST_CASE("copy: rank 9 and shapes that differ") {
    std::mt19937 random(9);
    const Shape shape{2, 3, 1, 2, 2, 1, 3, 2, 2};
    const Tensor source = random_view(random, shape, DType::i32, false);
    const Tensor target = empty(shape, {DType::i32});
    copy(source, target);
    CHECK(target.to_vector<std::int32_t>() == source.to_vector<std::int32_t>());
    CHECK_THROWS_WITH_AS(copy(zeros({2, 3}), zeros({3, 2})), doctest::Contains("(2, 3) into (3, 2)"), Error);
}

TEST_CASE("fill: any dtype and strides, nothing beside the view") {
    for (const DType dtype : all_dtypes) {
        const Tensor base = zeros({6, 8}, {dtype});
        Tensor inner = base.alias({3, 2}, {16, 3}, 9);
        backend(base.device()).fill(inner, 1);
        const auto values = base.to_vector();
        int set = 0;
        for (const double value : values) set += value == 1;
        CHECK(set == 6);
        CHECK(inner.to_vector() == std::vector<double>(6, 1.0));
    }
    Tensor x = zeros({3}, {DType::u8});
    backend(x.device()).fill(x, -3.5);
    CHECK(x.to_vector() == std::vector<double>{0, 0, 0});
    Tensor y = zeros({2}, {DType::bf16});
    backend(y.device()).fill(y, NAN);
    CHECK(std::isnan(y.to_vector()[1]));
}

TEST_CASE("merge_axes: what can be walked in one") {
    const Tensor x = zeros({2, 1, 3, 4});
    const Tensor* one[] = {&x};
    CHECK(merge_axes(one).sizes == Shape{24});
    const Tensor row = zeros({4}).broadcast_alias("test", {2, 1, 3, 4});
    const Tensor* two[] = {&x, &row};
    const auto axes = merge_axes(two);
    CHECK(axes.sizes == Shape{6, 4});
    CHECK(axes.strides[0] == Strides{4, 1});
    CHECK(axes.strides[1] == Strides{0, 1});
    const Tensor scalar = zeros({});
    const Tensor* none[] = {&scalar};
    CHECK(merge_axes(none).sizes.empty());
}

TEST_CASE("BlockReader: any stretch of any view, in the compute type") {
    std::mt19937 random(11);
    for (int round = 0; round < 300; ++round) {
        Shape shape(random() % 4);
        for (auto& size : shape) size = 1 + static_cast<std::int64_t>(random() % 50);
        const DType dtype = all_dtypes[random() % all_dtypes.size()];
        const Tensor x = random_view(random, shape, dtype, true);
        const Tensor dense = empty(shape, {DType::f64});
        copy(x, dense);
        cpu::BlockReader<double> reader(x);
        for (int k = 0; k < 5; ++k) {
            const auto first = static_cast<std::int64_t>(random() % static_cast<unsigned>(x.count()));
            const std::int64_t n = std::min({x.count() - first, cpu::block_size,
                                             std::int64_t{1} + static_cast<std::int64_t>(random() % 1024)});
            const double* values = reader.read(first, n);
            int wrong = 0;
            for (std::int64_t i = 0; i < n; ++i)
                if (std::memcmp(values + i, dense.data<double>() + first + i, 8) != 0 &&
                    !std::isnan(values[i]))
                    ++wrong;
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("BlockReader: a dense operand of the compute type is not copied") {
    const Tensor x = zeros({40, 50});
    cpu::BlockReader<float> reader(x);
    CHECK(reader.read(100, 1000) == x.data<float>() + 100);
    const Tensor part = x.alias({40, 30}, {50, 1}, 5);
    cpu::BlockReader<float> rows(part);
    CHECK(rows.read(30, 30) == x.data<float>() + 55);
    CHECK(rows.read(40, 30) != x.data<float>() + 65);  // crosses into the next row
    const Tensor none = zeros({0, 3});
    cpu::BlockReader<float> empty_reader(none);
    CHECK_NOTHROW(empty_reader.read(0, 0));
}

TEST_CASE("BlockMap: operands and result of any strides and dtypes, for any number of threads") {
    std::mt19937 random(12);
    for (int round = 0; round < 60; ++round) {
        Shape shape(1 + random() % 3);
        for (auto& size : shape) size = 1 + static_cast<std::int64_t>(random() % 60);
        const Tensor a = random_view(random, shape, DType::u8, true);
        const Tensor b = random_view(random, shape, DType::i32, true);
        const auto left = a.to_vector<std::int64_t>();
        const auto right = b.to_vector<std::int64_t>();
        const cpu::Team team(1 + round % 3);
        Tensor sum = random_view(random, shape, DType::i64, false);
        cpu::BlockMap<std::int64_t, std::int64_t, std::int64_t>::run(
            sum, a, b, [](std::int64_t* y, const std::int64_t* p, const std::int64_t* q, std::int64_t n) {
                for (std::int64_t i = 0; i < n; ++i) y[i] = p[i] + q[i];
            });
        Tensor place = random_view(random, shape, DType::f64, false);
        cpu::BlockMap<double>::run_at(place, [](std::int64_t first, double* y, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<double>(first + i);
        });
        const auto sums = sum.to_vector<std::int64_t>();
        const auto places = place.to_vector<std::int64_t>();
        int wrong = 0;
        for (std::size_t i = 0; i < sums.size(); ++i) {
            if (sums[i] != left[i] + right[i]) ++wrong;
            if (places[i] != static_cast<std::int64_t>(i)) ++wrong;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("copy: long runs, which pass the caches by, come whole wherever they begin") {
    constexpr std::int64_t spare = 200;
    const std::int64_t longest = cpu::streamed_from + spare;
    const Tensor from = Tensor::empty({longest}, {DType::u8}), to = Tensor::empty({longest}, {DType::u8});
    std::mt19937 random(5);
    std::generate_n(from.data<std::uint8_t>(), longest, [&] { return static_cast<std::uint8_t>(random()); });
    for (const auto& [source, target, count] :
         std::vector<std::array<std::int64_t, 3>>{{0, 0, cpu::streamed_from},
                                                  {3, 5, cpu::streamed_from + 1},
                                                  {64, 63, cpu::streamed_from + 127}}) {
        std::memset(to.raw_data(), 0, static_cast<std::size_t>(longest));
        copy(from.alias({count}, {1}, source), to.alias({count}, {1}, target));
        CHECK(std::memcmp(to.data<std::uint8_t>() + target, from.data<std::uint8_t>() + source,
                          static_cast<std::size_t>(count)) == 0);
        for (std::int64_t i = 0; i < target; ++i) REQUIRE(to.data<std::uint8_t>()[i] == 0);
        for (std::int64_t i = target + count; i < longest; ++i) REQUIRE(to.data<std::uint8_t>()[i] == 0);
    }
}
