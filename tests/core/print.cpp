#include <doctest/doctest.h>

#include <cmath>
#include <sstream>

#include "core/factories.h"

using namespace potluck;

namespace {

// The expected texts are what NumPy 2.4 prints for the same numbers, followed by our suffix.
std::string text_of(const std::vector<double>& values, const Shape& shape, DType dtype = DType::f32) {
    return to_string(tensor(values, shape, {dtype}));
}

std::string text_of(const std::vector<double>& values, DType dtype = DType::f32) {
    return text_of(values, {static_cast<std::int64_t>(values.size())}, dtype);
}

}  // namespace

TEST_CASE("print: columns are aligned at the decimal point") {
    CHECK(text_of({0, 1, 2, 3, 4, 5}, {2, 3}) == "[[0. 1. 2.]\n [3. 4. 5.]]");
    CHECK(text_of({1.5, -2.25, 1000}) == "[   1.5    -2.25 1000.  ]");
    CHECK(text_of({-0.0, 0}) == "[-0.  0.]");
    CHECK(text_of({0.1 + 0.2, 1 / 3.0}, DType::f64) == "[0.3        0.33333333] (f64)");
    CHECK(text_of({0.1, 0.2, 1 / 3.0}, DType::f16) == "[0.1    0.2    0.3333] (f16)");
    CHECK(text_of({0.1, 0.2, 1 / 3.0}, DType::bf16) == "[0.1   0.2   0.334] (bf16)");
}

TEST_CASE("print: exponents when the numbers differ too much") {
    CHECK(text_of({1, 1e-5, 2.5}) == "[1.0e+00 1.0e-05 2.5e+00]");
    CHECK(text_of({1e7, 1}) == "[1.e+07 1.e+00]");
    CHECK(text_of({1e300, 1e-300}, DType::f64) == "[1.e+300 1.e-300] (f64)");
    CHECK(text_of({-1e-7, NAN}) == "[-1.e-07     nan]");
}

TEST_CASE("print: nan and inf stand right") {
    CHECK(text_of({1, NAN, -HUGE_VAL, HUGE_VAL}) == "[  1.  nan -inf  inf]");
    CHECK(text_of({NAN, NAN}) == "[nan nan]");
    CHECK(text_of({NAN}, Shape{}) == "nan");
    CHECK(text_of({-HUGE_VAL}, Shape{}, DType::f16) == "-inf (f16)");
}

TEST_CASE("print: integers and bools") {
    CHECK(to_string(tensor(std::vector<std::int64_t>{-5, 10, 300}, {3})) == "[ -5  10 300] (i64)");
    CHECK(text_of({1, 0, 0, 1}, {2, 2}, DType::boolean) == "[[ True False]\n [False  True]] (bool)");
    CHECK(text_of({1}, Shape{}, DType::boolean) == "True (bool)");
    CHECK(text_of({7}, Shape{}, DType::u8) == "7 (u8)");
    CHECK(to_string(tensor(std::vector<std::int64_t>{INT64_MIN}, {})) == "-9223372036854775808 (i64)");
}

TEST_CASE("print: scalars in full") {
    CHECK(to_string(tensor(1.0)) == "1.0");
    CHECK(to_string(tensor(0.1)) == "0.1");
    CHECK(to_string(tensor(1e-5)) == "1e-05");
    CHECK(to_string(tensor(2.5e6)) == "2.5e+06");
    CHECK(to_string(tensor(123456789.125, {DType::f64})) == "123456789.125 (f64)");
    CHECK(to_string(tensor(1e16, {DType::f64})) == "1e+16 (f64)");
    CHECK(to_string(tensor(60000, {DType::f16})) == "6e+04 (f16)");
}

TEST_CASE("print: empty and undefined tensors say what they are") {
    CHECK(to_string(zeros({0})) == "[] (shape (0))");
    CHECK(to_string(zeros({2, 0, 3}, {DType::f16})) == "[] (f16, shape (2, 0, 3))");
    CHECK(to_string(Tensor()) == "undefined");
}

TEST_CASE("print: blocks of rows, with a blank line for every further axis") {
    CHECK(to_string(arange(0, 16).alias({2, 2, 2, 2}, {8, 4, 2, 1}, 0)) ==
          "[[[[ 0  1]\n   [ 2  3]]\n\n  [[ 4  5]\n   [ 6  7]]]\n\n\n [[[ 8  9]\n   [10 11]]\n\n  [[12 13]\n  "
          " [14 "
          "15]]]] (i64)");
    CHECK(to_string(arange(0, 2).alias({1, 1, 1, 1, 1, 1, 1, 1, 2}, {1, 1, 1, 1, 1, 1, 1, 1, 1}, 0)) ==
          "[[[[[[[[[0 1]]]]]]]]] (i64)");
}

TEST_CASE("print: long rows are wrapped") {
    CHECK(to_string(arange(0.5, 40.5, 1, {DType::f32})) ==
          "[ 0.5  1.5  2.5  3.5  4.5  5.5  6.5  7.5  8.5  9.5 10.5 11.5 12.5 13.5\n"
          " 14.5 15.5 16.5 17.5 18.5 19.5 20.5 21.5 22.5 23.5 24.5 25.5 26.5 27.5\n"
          " 28.5 29.5 30.5 31.5 32.5 33.5 34.5 35.5 36.5 37.5 38.5 39.5]");
}

TEST_CASE("print: more than 1000 elements are summarised") {
    CHECK(to_string(arange(0, 1200)) == "[   0    1    2 ... 1197 1198 1199] (i64)");
    CHECK(to_string(arange(0, 1000)).find("...") == std::string::npos);
    const Tensor turned = arange(0, 2500).alias({50, 50}, {1, 50}, 0);
    CHECK(to_string(turned) ==
          "[[   0   50  100 ... 2350 2400 2450]\n [   1   51  101 ... 2351 2401 2451]\n [   2   52  102 ... "
          "2352 2402 "
          "2452]\n ...\n [  47   97  147 ... 2397 2447 2497]\n [  48   98  148 ... 2398 2448 2498]\n [  49   "
          "99  149 "
          "... 2399 2449 2499]] (i64)");
    const std::string text = to_string(arange(0, 3 * 9 * 40).alias({3, 9, 40}, {360, 40, 1}, 0));
    CHECK(text.starts_with("[[[   0    1    2 ...   37   38   39]\n  [  40   41   42 ...   77   78   79]\n"));
    CHECK(text.find("]\n  ...\n  [ 240") != std::string::npos);
    CHECK(text.find("319]\n  [ 320  321  322 ...  357  358  359]]\n\n [[ 360") != std::string::npos);
}

TEST_CASE("print: streams take tensors") {
    std::ostringstream stream;
    stream << tensor({1., 2.});
    CHECK(stream.str() == "[1. 2.]");
}
