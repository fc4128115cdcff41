#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"

namespace potluck {

Tensor empty(const Shape& shape, TensorOptions options = {});
Tensor zeros(const Shape& shape, TensorOptions options = {});
Tensor ones(const Shape& shape, TensorOptions options = {});
Tensor full(const Shape& shape, const Scalar& value, TensorOptions options = {});
/// New memory with the shape, dtype and device of `other`.
Tensor empty_like(const Tensor& other);
Tensor zeros_like(const Tensor& other);
Tensor ones_like(const Tensor& other);
/// start, start + step, ... up to but not including end. Throws Error when step is 0 or leads away from end.
Tensor arange(const Scalar& start, const Scalar& end, const Scalar& step = 1,
              TensorOptions options = {DType::i64});
/// `count` evenly spaced numbers from start to end, both included.
Tensor linspace(double start, double end, std::int64_t count, TensorOptions options = {});
/// The identity matrix (size, size).
Tensor eye(std::int64_t size, TensorOptions options = {});

/// Uniform in [0, 1).
Tensor rand(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// Normal with mean 0 and standard deviation 1.
Tensor randn(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// Integers uniform in [low, high). Throws Error when low >= high.
Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, TensorOptions options = {DType::i64},
               Generator* generator = nullptr);
/// A random order of 0 .. count-1 (i64, CPU).
Tensor randperm(std::int64_t count, Generator* generator = nullptr);

/// Copies values (row-major) into a new tensor of T's dtype. Throws Error when the counts differ.
template <Element T>
Tensor from_values(std::span<const T> values, const Shape& shape, Device device = Device::cpu());

namespace detail {
/// Integers keep all 64 bits until they are converted to the dtype.
Tensor tensor_of(std::span<const Scalar> values, const Shape& shape, TensorOptions options);

/// A number, or a list of such, in any depth.
class Nested {
public:
    template <std::convertible_to<Scalar> Number>
    Nested(Number number) : number_(number) {}
    Nested(std::initializer_list<Nested> list) : list_(list), is_list_(true) {}

    const Scalar& number() const { return number_; }
    const std::vector<Nested>& list() const { return list_; }
    bool is_list() const { return is_list_; }

private:
    Scalar number_ = 0;
    std::vector<Nested> list_;
    bool is_list_ = false;
};
Tensor tensor_of_list(const Nested& list, TensorOptions options);
}  // namespace detail

/// tensor(3.5), tensor({1, 2}), tensor({{1, 2}, {3, 4}}), and so on: f32, whole numbers too. Throws Error for lists side by
/// side that are not equally long.
template <class Number>
requires std::is_arithmetic_v<Number> Tensor tensor(Number value, TensorOptions options = {}) {
    const Scalar scalar = value;
    return detail::tensor_of({&scalar, 1}, {}, options);
}
inline Tensor tensor(std::initializer_list<detail::Nested> list, TensorOptions options = {}) {
    return detail::tensor_of_list(list, options);
}
/// The values of a vector, in row-major order of `shape`, or as one axis if no shape is given. The dtype is that of the
/// elements, except that double gives f32, the default everywhere.
Tensor tensor(const std::vector<double>& values, const Shape& shape, TensorOptions options = {});
template <Element T>
Tensor tensor(const std::vector<T>& values, const Shape& shape, TensorOptions options = {dtype_of<T>()});
template <Element T>
Tensor tensor(const std::vector<T>& values) {
    return tensor(values, {static_cast<std::int64_t>(values.size())});
}
template <Element T, std::size_t N>
Tensor tensor(const std::array<T, N>& values) {
    return tensor(std::vector<T>(values.begin(), values.end()));
}

/// A tensor over the caller's memory (row-major, CPU), without a copy; `release` runs when the last view is destroyed.
template <Element T>
Tensor borrow(T* data, const Shape& shape, std::function<void()> release = {});

}  // namespace potluck
