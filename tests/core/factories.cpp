#include "core/factories.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

using namespace potluck;

using Values = std::vector<double>;
using Integers = std::vector<std::int64_t>;

TEST_CASE("zeros, ones, full: every dtype") {
    for (const DType dtype :
         {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64, DType::i32, DType::u8}) {
        CHECK(zeros({2, 2}, {dtype}).to_vector() == Values{0, 0, 0, 0});
        CHECK(ones({2}, {dtype}).to_vector() == Values{1, 1});
        CHECK(full({3}, 7, {dtype}).to_vector() == Values{7, 7, 7});
        CHECK(full({3}, 7, {dtype}).dtype() == dtype);
    }
    CHECK(full({2}, 7, {DType::boolean}).to_vector() == Values{1, 1});
    CHECK(full({}, -1.5).item() == -1.5);
    CHECK(zeros({0, 4}).count() == 0);
    CHECK(full({1}, std::numeric_limits<std::int64_t>::max(), {DType::i64}).item<std::int64_t>() ==
          std::numeric_limits<std::int64_t>::max());
    CHECK(std::isnan(full({1}, NAN).item()));
}

TEST_CASE("full: a number that the dtype cannot hold is refused") {
    CHECK_THROWS_WITH_AS(full({2}, 300, {DType::u8}), doctest::Contains("[full] 300 does not fit dtype u8"),
                         Error);
    CHECK_THROWS_AS(full({2}, -1, {DType::u8}), Error);
    CHECK_THROWS_AS(full({2}, 3e9, {DType::i32}), Error);
    CHECK_THROWS_AS(full({2}, NAN, {DType::i64}), Error);
    CHECK(std::isinf(full({1}, 1e30, {DType::f16}).item()));  // as any rounding to f16
}

TEST_CASE("..._like: shape, dtype and device of the other") {
    const Tensor x = zeros({2, 3}, {DType::bf16});
    CHECK(ones_like(x).dtype() == DType::bf16);
    CHECK(ones_like(x).to_vector() == Values(6, 1.0));
    CHECK(zeros_like(x).shape() == x.shape());
    CHECK(empty_like(x.alias({3, 2}, {1, 3}, 0)).is_contiguous());
}

TEST_CASE("arange: integers") {
    CHECK(arange(0, 5).to_vector<std::int64_t>() == Integers{0, 1, 2, 3, 4});
    CHECK(arange(0, 5).dtype() == DType::i64);
    CHECK(arange(2, 9, 3).to_vector<std::int64_t>() == Integers{2, 5, 8});
    CHECK(arange(5, 0, -2).to_vector<std::int64_t>() == Integers{5, 3, 1});
    CHECK(arange(3, 3).count() == 0);
    const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
    const std::int64_t highest = std::numeric_limits<std::int64_t>::max();
    CHECK(arange(lowest, highest, highest).to_vector<std::int64_t>() == Integers{lowest, -1, highest - 1});
    CHECK(arange(highest, lowest, lowest).to_vector<std::int64_t>() == Integers{highest, -1});
    CHECK(arange(250, 256, 1, {DType::u8}).to_vector<std::int64_t>().back() == 255);
    CHECK_THROWS_WITH_AS(arange(0, 257, 1, {DType::u8}), doctest::Contains("256 does not fit dtype u8"),
                         Error);
    CHECK_THROWS_WITH_AS(arange(0, 5, 0), doctest::Contains("[arange]"), Error);
    CHECK_THROWS_AS(arange(0, 5, -1), Error);
    CHECK_THROWS_AS(arange(5, 0), Error);
}

TEST_CASE("arange: fractions") {
    CHECK(arange(0, 1, 0.25, {DType::f32}).to_vector() == Values{0, 0.25, 0.5, 0.75});
    CHECK(arange(0.0, 3.0).to_vector() == Values{0, 1, 2});
    CHECK(arange(0.0, 1.05, 0.5, {DType::f64}).to_vector() == Values{0, 0.5, 1.0});
    CHECK_THROWS_WITH_AS(arange(0.0, 1.0, 0.1), doctest::Contains("has fractions and dtype i64 has none"),
                         Error);
    CHECK_THROWS_AS(arange(0.0, HUGE_VAL, 1.0, {DType::f32}), Error);
    CHECK_THROWS_AS(arange(0.0, NAN, 1.0, {DType::f32}), Error);
}

TEST_CASE("linspace: both ends exactly") {
    CHECK(linspace(0, 1, 5).to_vector() == Values{0, 0.25, 0.5, 0.75, 1});
    CHECK(linspace(2, 7, 1).to_vector() == Values{2});
    CHECK(linspace(2, 7, 0).count() == 0);
    const auto values = linspace(0.1, 0.7, 100, {DType::f64}).to_vector();
    CHECK(values.front() == 0.1);
    CHECK(values.back() == 0.7);
    CHECK(std::is_sorted(values.begin(), values.end()));
    CHECK_THROWS_AS(linspace(0, 1, -1), Error);
    CHECK_THROWS_AS(linspace(0, 1, 3, {DType::i64}), Error);
}

TEST_CASE("eye: the identity, of any size") {
    CHECK(eye(3).to_vector() == Values{1, 0, 0, 0, 1, 0, 0, 0, 1});
    CHECK(eye(0).count() == 0);
    CHECK(eye(1, {DType::i32}).item() == 1);
    CHECK_THROWS_AS(eye(-1), Error);
}

TEST_CASE("tensor, from_values: values in, values out") {
    CHECK(tensor({1.5, -2.0}).to_vector() == Values{1.5, -2});
    CHECK(tensor({{1., 2.}, {3., 4.}}).shape() == Shape{2, 2});
    CHECK(tensor({1., 2.}, {2}).to_vector() == Values{1, 2});
    CHECK(tensor({1, 2}, {2, 1}).dtype() == DType::f32);
    CHECK(tensor({{1., 2.}, {3., 4.}}).to_vector() == Values{1, 2, 3, 4});
    CHECK(tensor(Values{1, 2, 3, 4, 5, 6}, {2, 3}, {DType::f16}).dtype() == DType::f16);
    CHECK(tensor(Integers{1, 2, 3}, {3}).dtype() == DType::i64);
    CHECK(tensor(3.5, {DType::f64}).item() == 3.5);
    const std::array<bool, 3> flags{true, false, true};
    CHECK(from_values<bool>(flags, {3}).to_vector<bool>() == std::vector<bool>{true, false, true});
    CHECK(from_values<float>({}, {0, 2}).count() == 0);
    CHECK_THROWS_WITH_AS(
        tensor(Values{1, 2, 3}, {2, 2}),
        doctest::Contains("[tensor] 3 values do not fill shape (2, 2), which has 4 elements"), Error);
    CHECK_THROWS_WITH_AS(tensor({{1., 2.}, {3.}}), doctest::Contains("row 1 has 1 values and row 0 has 2"),
                         Error);
    CHECK_THROWS_AS(from_values<bool>(flags, {2}), Error);
}

TEST_CASE("borrow: the caller's memory, no copy") {
    std::vector<std::int64_t> numbers{1, 2, 3, 4};
    const Tensor x = borrow(numbers.data(), {2, 2});
    numbers[3] = 40;
    CHECK(x.to_vector<std::int64_t>() == Integers{1, 2, 3, 40});
    CHECK_THROWS_AS(borrow<float>(nullptr, {2}), Error);
    CHECK(borrow<float>(nullptr, {0}).count() == 0);
    alignas(8) std::array<std::byte, 16> bytes{};
    CHECK_THROWS_WITH_AS(borrow(reinterpret_cast<float*>(bytes.data() + 1), {2}),
                         doctest::Contains("not aligned"), Error);
}

TEST_CASE("random factories: shapes, ranges, and the generator they use") {
    Generator generator(1);
    CHECK(rand({0}).count() == 0);
    CHECK(rand({}).ndim() == 0);
    CHECK(randn({3, 5}, {DType::f16}).dtype() == DType::f16);
    CHECK_THROWS_AS(rand({2}, {DType::i64}), Error);
    CHECK_THROWS_AS(randn({2}, {DType::boolean}), Error);
    const auto dice = randint(1, 7, {1000}, {DType::i64}, &generator).to_vector<std::int64_t>();
    for (std::int64_t side = 1; side <= 6; ++side) CHECK(std::count(dice.begin(), dice.end(), side) > 100);
    CHECK(*std::min_element(dice.begin(), dice.end()) == 1);
    CHECK(*std::max_element(dice.begin(), dice.end()) == 6);
    CHECK_THROWS_WITH_AS(randint(3, 3, {1}), doctest::Contains("no integer lies in [3, 3)"), Error);
    CHECK_THROWS_AS(randint(0, 257, {1}, {DType::u8}), Error);
    CHECK_NOTHROW(randint(0, 256, {1}, {DType::u8}));
    const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
    CHECK_NOTHROW(randint(lowest, std::numeric_limits<std::int64_t>::max(), {9}));
}

TEST_CASE("randperm: every number once, in an order that the seed decides") {
    Generator first(5);
    Generator again(5);
    Generator other(6);
    const auto order = randperm(1000, &first).to_vector<std::int64_t>();
    CHECK(order == randperm(1000, &again).to_vector<std::int64_t>());
    CHECK(order != randperm(1000, &other).to_vector<std::int64_t>());
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    Integers wanted(1000);
    std::iota(wanted.begin(), wanted.end(), 0);
    CHECK(sorted == wanted);
    CHECK(order != wanted);
    CHECK(randperm(0).count() == 0);
    CHECK(randperm(1).item<int>() == 0);
    CHECK_THROWS_AS(randperm(-1), Error);
    CHECK_THROWS_AS(linspace(0, INFINITY, 3), Error);
    CHECK_THROWS_AS(linspace(NAN, 1, 3), Error);
    // Each of the 6 permutations of 3 items is equally frequent: 1000 +- 5 standard deviations of 29.
    std::array<int, 9> seen{};
    for (int i = 0; i < 6000; ++i) {
        const auto three = randperm(3, &first).to_vector<std::int64_t>();
        ++seen[static_cast<std::size_t>(three[0] * 3 + three[1])];
    }
    for (const std::size_t index : {1U, 2U, 3U, 5U, 6U, 7U}) CHECK(std::abs(seen[index] - 1000) < 145);
}

TEST_CASE("tensor: braces mean what they look like, one column and one element too") {
    CHECK(tensor({{1}, {2}, {3}}).shape() == Shape{3, 1});
    CHECK(tensor({{1}, {2}, {3}}).to_vector() == Values{1, 2, 3});
    CHECK(tensor({{5}}).shape() == Shape{1, 1});
    CHECK(tensor({{1.}}).shape() == Shape{1, 1});
    CHECK(tensor({{1., 2}}).shape() == Shape{1, 2});
    CHECK(tensor({{1, 2.5}, {3, 4}}).to_vector() == Values{1, 2.5, 3, 4});
    CHECK(tensor({5}).shape() == Shape{1});
    CHECK(tensor({5.}).shape() == Shape{1});
    CHECK(tensor({1, 2.5}).to_vector() == Values{1, 2.5});
    CHECK(tensor({}).shape() == Shape{0});
    CHECK(tensor(5).shape() == Shape{});
    CHECK(tensor(true).item() == 1.0);
    CHECK(tensor(5).dtype() == DType::f32);
    CHECK(tensor({{1}, {2}}, {DType::i64}).dtype() == DType::i64);
    CHECK(tensor({{true}, {false}}, {DType::boolean}).to_vector() == Values{1, 0});
    CHECK_THROWS_WITH_AS(tensor({{1, 2}, {3}}), doctest::Contains("row 1 has 1 values"), Error);
    // Variables, and integers that no double can represent.
    const std::int64_t large = (std::int64_t{1} << 53) + 1;
    const float half = 0.5F;
    CHECK(tensor({large, large}, {DType::i64})[1].item<std::int64_t>() == large);
    CHECK(tensor({{large}, {1}}, {DType::i64})[0].item<std::int64_t>() == large);
    CHECK(tensor(large, {DType::i64}).item<std::int64_t>() == large);
    CHECK(tensor({half, half}).to_vector() == Values{0.5, 0.5});
    CHECK_THROWS_AS(tensor({300}, {DType::u8}), Error);
    CHECK_THROWS_AS(tensor({{1}, {-1}}, {DType::u8}), Error);
    CHECK_THROWS_AS(tensor(large, {DType::i32}), Error);
}

TEST_CASE("tensor: lists of any depth, and what does not fit together") {
    CHECK(tensor({{{1}, {2}}, {{3}, {4}}}).shape() == Shape{2, 2, 1});
    CHECK(tensor({{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}}).to_vector() ==
          std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8});
    CHECK(tensor({{{{true}}}}, {DType::u8}).shape() == Shape{1, 1, 1, 1});
    CHECK(tensor({{{}, {}}}).shape() == Shape{1, 2, 0});
    const Tensor array = tensor(std::array<float, 3>{1.5F, 2.5F, 3.5F});
    CHECK(array.dtype() == DType::f32);
    CHECK(array.to_vector() == std::vector<double>{1.5, 2.5, 3.5});
    CHECK_THROWS_WITH_AS(tensor({{{1, 2}, {3}}}),
                         doctest::Contains("row 0, 1 has 1 values and row 0, 0 has 2"), Error);
    CHECK_THROWS_WITH_AS(tensor({{1, 2}, {3, {4}}}), doctest::Contains("row 1, 1 is a list"), Error);
    CHECK_THROWS_WITH_AS(tensor({{1, 2}, 3}), doctest::Contains("row 1 is a number"), Error);
}

TEST_CASE("tensor: a vector of any element type, in its dtype") {
    const auto check = [](const auto& values, DType dtype) {
        const Tensor x = tensor(values);
        CHECK(x.dtype() == dtype);
        CHECK(x.shape() == Shape{3});
        CHECK(x.to_vector() == Values{1, 0, 1});
        CHECK(tensor(values, {3, 1}).shape() == Shape{3, 1});
        CHECK(tensor(values, {3, 1}).dtype() == dtype);
        CHECK(tensor(values, {3}, {DType::f64}).dtype() == DType::f64);
        CHECK_THROWS_AS(tensor(values, {2}), Error);
    };
    check(std::vector<double>{1, 0, 1}, DType::f32);
    check(std::vector<float>{1, 0, 1}, DType::f32);
    check(std::vector<float16>{float16(1.0F), float16(0.0F), float16(1.0F)}, DType::f16);
    check(std::vector<bfloat16>{bfloat16(1.0F), bfloat16(0.0F), bfloat16(1.0F)}, DType::bf16);
    check(std::vector<std::int64_t>{1, 0, 1}, DType::i64);
    check(std::vector<std::int32_t>{1, 0, 1}, DType::i32);
    check(std::vector<std::uint8_t>{1, 0, 1}, DType::u8);
    check(std::vector<bool>{true, false, true}, DType::boolean);
    CHECK(tensor(std::vector<float>{}).shape() == Shape{0});
}

TEST_CASE("strides, dtypes and devices are printed by name") {
    std::ostringstream text;
    text << zeros({2, 3}).strides() << " " << Strides{} << " " << DType::bf16 << " " << Device::cpu() << " "
         << Device::cuda(1);
    CHECK(text.str() == "(3, 1) () bf16 cpu cuda:1");
}

TEST_CASE("shape: is printed, and is a vector") {
    std::ostringstream stream;
    stream << zeros({2, 3}).shape() << Shape{} << Shape{4};
    CHECK(stream.str() == "(2, 3)()(4)");
    const std::vector<std::int64_t> sizes = zeros({2, 3}).shape();
    CHECK(zeros(sizes).shape() == Shape{2, 3});
    CHECK(zeros({2, 3}).shape() == sizes);
    CHECK(Shape(3, 7) == Shape{7, 7, 7});
}
