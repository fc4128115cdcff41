#include "core/factories.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "core/backend.h"
#include "core/copies.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/philox.h"

namespace potluck {
namespace {

/// A row-major host array of one dtype as a tensor of any dtype on any device.
Tensor upload(const void* values, DType dtype, const Shape& shape, TensorOptions options) {
    Tensor host = Tensor::empty(shape, {dtype, Device::cpu()});
    backend(host.device()).copy_from_host(host.raw_data(), values, host.bytes());
    host = detail::cast(host, options.dtype);
    if (options.device == Device::cpu() && !options.pinned) return host;
    Tensor result = Tensor::empty(shape, options);
    backend(options.device).copy_from_host(result.raw_data(), host.raw_data(), host.bytes());
    return result;
}

void check_value_count(const char* op, std::size_t given, const Shape& shape) {
    const std::int64_t wanted = element_count(shape);
    if (static_cast<std::int64_t>(given) != wanted)
        throw Error(op, fmt::format("{} values do not fill shape {}, which has {} elements.", given,
                                    pretty(shape), wanted));
}

/// For integer series, which would be meaningless as truth values: bool accepts 0 and 1 only.
void require_in_range(const char* op, std::int64_t value, DType dtype) {
    if (dtype == DType::boolean && value != 0 && value != 1)
        throw Error(op, fmt::format("{} does not fit dtype bool, which holds 0 to 1.", value));
    require_held(op, value, dtype);
}

/// Uploads numbers, which the dtype must be able to represent.
template <class Number>
Tensor upload_held(const Number* values, std::size_t count, const Shape& shape, TensorOptions options) {
    if (!is_floating(options.dtype) && options.dtype != dtype_of<Number>())
        for (std::size_t i = 0; i < count; ++i) require_held("tensor", values[i], options.dtype);
    return upload(values, dtype_of<Number>(), shape, options);
}

void check_floating(const char* op, DType dtype) {
    if (!is_floating(dtype))
        throw Error(op, fmt::format("dtype {} has no fractions. Ask for a floating dtype.", dtype));
}

RandomKey take_numbers(Generator* generator, Device device, std::int64_t count) {
    return (generator == nullptr ? default_generator(device) : *generator).take(count);
}

/// Consecutive random 64-bit numbers that are reserved from a generator.
class Words {
public:
    explicit Words(RandomKey key) : key_(key) {}

    std::uint64_t next() {
        const std::uint64_t block = index_ / 4;
        const auto lane = static_cast<std::size_t>(index_ % 4);
        if (lane == 0) {
            high_ = philox_block(key_, block, 0);
            low_ = philox_block(key_, block, 1);
        }
        ++index_;
        return std::uint64_t{high_[lane]} << 32 | low_[lane];
    }

private:
    RandomKey key_;
    std::uint64_t index_ = 0;
    std::array<std::uint32_t, 4> high_{}, low_{};
};

Tensor arange_floating(double start, double end, double step, TensorOptions options) {
    const double steps = std::ceil((end - start) / step);
    if (!(steps < 0x1p62))
        throw Error("arange",
                    fmt::format("{} to {} by {} is not a finite number of steps.", start, end, step));
    if (steps > 0.0) {
        require_held("arange", start, options.dtype);
        require_held("arange", start + (steps - 1.0) * step, options.dtype);
    }
    const auto count = static_cast<std::int64_t>(std::max(steps, 0.0));
    Tensor values = Tensor::empty({count}, {DType::f64});
    auto* value = values.data<double>();
    for (std::int64_t i = 0; i < count; ++i) value[i] = start + static_cast<double>(i) * step;
    return upload(value, DType::f64, {count}, options);
}

Tensor arange_integer(std::int64_t start, std::int64_t end, std::int64_t step, TensorOptions options) {
    // Distances in unsigned arithmetic: they may exceed 63 bits.
    const auto magnitude = [](std::int64_t from, std::int64_t to) {
        return static_cast<std::uint64_t>(to) - static_cast<std::uint64_t>(from);
    };
    const std::uint64_t distance = start < end ? magnitude(start, end) : magnitude(end, start);
    const std::uint64_t stride = step > 0 ? magnitude(0, step) : magnitude(step, 0);
    const std::uint64_t count = distance / stride + (distance % stride != 0);
    if (count > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        throw Error("arange", fmt::format("{} to {} by {} has more than 2^63 - 1 steps.", start, end, step));
    if (count > 0) {
        const std::uint64_t last =
            static_cast<std::uint64_t>(start) + (count - 1) * static_cast<std::uint64_t>(step);
        require_in_range("arange", start, options.dtype);
        require_in_range("arange", static_cast<std::int64_t>(last), options.dtype);
    }
    const Shape shape{static_cast<std::int64_t>(count)};
    Tensor values = Tensor::empty(shape, {DType::i64});
    auto* value = values.data<std::int64_t>();
    for (std::uint64_t i = 0; i < count; ++i)
        value[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(start) +
                                             i * static_cast<std::uint64_t>(step));
    if (options.dtype == DType::i64 && options.device == Device::cpu() && !options.pinned) return values;
    return upload(value, DType::i64, shape, options);
}

}  // namespace

Tensor empty(const Shape& shape, TensorOptions options) { return Tensor::empty(shape, options); }

Tensor full(const Shape& shape, const Scalar& value, TensorOptions options) {
    require_held("full", value, options.dtype);
    Tensor result = Tensor::empty(shape, options);
    backend(options.device).fill(result, value);
    return result;
}

Tensor zeros(const Shape& shape, TensorOptions options) { return full(shape, 0, options); }

Tensor ones(const Shape& shape, TensorOptions options) { return full(shape, 1, options); }

Tensor empty_like(const Tensor& other) {
    return Tensor::empty(other.shape(), {other.dtype(), other.device()});
}

Tensor zeros_like(const Tensor& other) { return zeros(other.shape(), {other.dtype(), other.device()}); }

Tensor ones_like(const Tensor& other) { return ones(other.shape(), {other.dtype(), other.device()}); }

Tensor arange(const Scalar& start, const Scalar& end, const Scalar& step, TensorOptions options) {
    const OpScope scope("arange");
    const double first = start.to_double();
    const double last = end.to_double();
    const double by = step.to_double();
    if (by == 0.0 || (first < last && by < 0.0) || (first > last && by > 0.0))
        throw Error("arange", fmt::format("from {} steps of {} never reach {}. Change the sign of step.",
                                          first, by, last));
    if (!std::isfinite(first) || !std::isfinite(last) || !std::isfinite(by))
        throw Error("arange", fmt::format("{} to {} by {}: give finite numbers.", first, last, by));
    const bool floating = start.is_floating() || end.is_floating() || step.is_floating();
    if (!floating) return arange_integer(start.to_int64(), end.to_int64(), step.to_int64(), options);
    const auto is_whole = [](double value) { return value == std::floor(value); };
    if (!is_floating(options.dtype) && !(is_whole(first) && is_whole(last) && is_whole(by)))
        throw Error("arange",
                    fmt::format("{} to {} by {} has fractions and dtype {} has none. Pass {{DType::f32}}.",
                                first, last, by, options.dtype));
    return arange_floating(first, last, by, options);
}

Tensor linspace(double start, double end, std::int64_t count, TensorOptions options) {
    const OpScope scope("linspace");
    check_floating("linspace", options.dtype);
    if (count < 0) throw Error("linspace", fmt::format("the count is {}. Give 0 or more.", count));
    if (!std::isfinite(start) || !std::isfinite(end))
        throw Error("linspace", fmt::format("{} to {}: give finite numbers.", start, end));
    element_count({count});
    Tensor values = Tensor::empty({count}, {DType::f64});
    auto* value = values.data<double>();
    const auto last = static_cast<double>(count - 1);
    for (std::int64_t i = 0; i < count; ++i) {
        const double part = count > 1 ? static_cast<double>(i) / last : 0.0;
        value[i] = start * (1.0 - part) + end * part;
    }
    return upload(value, DType::f64, {count}, options);
}

Tensor eye(std::int64_t size, TensorOptions options) {
    const OpScope scope("eye");
    Tensor result = zeros({size, size}, options);
    Tensor diagonal = result.alias({size}, {size + 1}, 0);
    backend(options.device).fill(diagonal, 1);
    return result;
}

Tensor rand(const Shape& shape, TensorOptions options, Generator* generator) {
    const OpScope scope("rand");
    check_floating("rand", options.dtype);
    Tensor result = Tensor::empty(shape, options);
    backend(options.device)
        .uniform(take_numbers(generator, options.device, result.count()), 0.0, 1.0, result);
    return result;
}

Tensor randn(const Shape& shape, TensorOptions options, Generator* generator) {
    const OpScope scope("randn");
    check_floating("randn", options.dtype);
    Tensor result = Tensor::empty(shape, options);
    backend(options.device).normal(take_numbers(generator, options.device, result.count()), 0.0, 1.0, result);
    return result;
}

Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, TensorOptions options,
               Generator* generator) {
    const OpScope scope("randint");
    if (low >= high)
        throw Error("randint", fmt::format("no integer lies in [{}, {}). Give a high above low.", low, high));
    require_in_range("randint", low, options.dtype);
    require_in_range("randint", high - 1, options.dtype);
    Tensor result = Tensor::empty(shape, options);
    backend(options.device)
        .random_integers(take_numbers(generator, options.device, result.count()), low, high, result);
    return result;
}

Tensor randperm(std::int64_t count, Generator* generator) {
    const OpScope scope("randperm");
    if (count < 0)
        throw Error("randperm", fmt::format("a permutation cannot have {} elements. Give 0 or more.", count));
    Tensor result = arange(0, count);
    auto* order = result.data<std::int64_t>();
    Words words(take_numbers(generator, Device::cpu(), count));
    // Fisher-Yates shuffle, from the end; the bias of the remainder is below count / 2^64.
    for (std::int64_t i = count - 1; i > 0; --i)
        std::swap(order[i], order[words.next() % static_cast<std::uint64_t>(i + 1)]);
    return result;
}

template <Element T>
Tensor from_values(std::span<const T> values, const Shape& shape, Device device) {
    check_value_count("from_values", values.size(), shape);
    return upload(values.data(), dtype_of<T>(), shape, {dtype_of<T>(), device});
}

template Tensor from_values(std::span<const double>, const Shape&, Device);
template Tensor from_values(std::span<const float>, const Shape&, Device);
template Tensor from_values(std::span<const float16>, const Shape&, Device);
template Tensor from_values(std::span<const bfloat16>, const Shape&, Device);
template Tensor from_values(std::span<const std::int64_t>, const Shape&, Device);
template Tensor from_values(std::span<const std::int32_t>, const Shape&, Device);
template Tensor from_values(std::span<const std::uint8_t>, const Shape&, Device);
template Tensor from_values(std::span<const bool>, const Shape&, Device);

Tensor detail::tensor_of(std::span<const Scalar> values, const Shape& shape, TensorOptions options) {
    const bool whole = std::none_of(values.begin(), values.end(), std::mem_fn(&Scalar::is_floating));
    if (whole) {
        std::vector<std::int64_t> integers;
        for (const Scalar& value : values) integers.push_back(value.to_int64());
        return upload_held(integers.data(), integers.size(), shape, options);
    }
    std::vector<double> numbers;
    for (const Scalar& value : values) numbers.push_back(value.to_double());
    return upload_held(numbers.data(), numbers.size(), shape, options);
}

namespace {

/// Appends the numbers of a list that stands at `place` among those above it, where the lists are to make `shape`.
void collect(const detail::Nested& list, const Shape& shape, std::vector<std::size_t>& place,
             std::vector<Scalar>& numbers) {
    const auto require = [&](bool fits, const std::string& what, const std::string& first) {
        if (fits) return;
        throw Error("tensor",
                    fmt::format("row {} {} and row {} {}. Rows must be equally long.", fmt::join(place, ", "),
                                what, fmt::join(std::vector<int>(place.size()), ", "), first));
    };
    const std::size_t axis = place.size();
    require(list.is_list() == (axis < shape.size()), list.is_list() ? "is a list" : "is a number",
            list.is_list() ? "is a number" : "is a list");
    if (!list.is_list()) return numbers.push_back(list.number());
    const auto count = static_cast<std::int64_t>(list.list().size());
    require(count == shape[axis], fmt::format("has {} values", count), fmt::format("has {}", shape[axis]));
    place.push_back(0);
    for (const detail::Nested& one : list.list()) {
        collect(one, shape, place, numbers);
        ++place.back();
    }
    place.pop_back();
}

}  // namespace

Tensor detail::tensor_of_list(const Nested& list, TensorOptions options) {
    Shape shape;
    for (const Nested* first = &list; first != nullptr && first->is_list();
         first = first->list().empty() ? nullptr : &first->list().front())
        shape.push_back(static_cast<std::int64_t>(first->list().size()));
    std::vector<Scalar> numbers;
    std::vector<std::size_t> place;
    collect(list, shape, place, numbers);
    return tensor_of(numbers, shape, options);
}

Tensor tensor(const std::vector<double>& values, const Shape& shape, TensorOptions options) {
    check_value_count("tensor", values.size(), shape);
    return upload_held(values.data(), values.size(), shape, options);
}

template <Element T>
Tensor tensor(const std::vector<T>& values, const Shape& shape, TensorOptions options) {
    check_value_count("tensor", values.size(), shape);
    if constexpr (std::same_as<T, bool>) {  // std::vector<bool> packs its elements into bits
        const std::vector<std::uint8_t> bytes(values.begin(), values.end());
        return upload(bytes.data(), DType::u8, shape, options);
    } else if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>) {
        std::vector<double> numbers;
        for (const T value : values) numbers.push_back(static_cast<float>(value));
        return upload_held(numbers.data(), numbers.size(), shape, options);
    } else {
        return upload_held(values.data(), values.size(), shape, options);
    }
}
template Tensor tensor(const std::vector<float>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<float16>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<bfloat16>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<std::int64_t>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<std::int32_t>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<std::uint8_t>&, const Shape&, TensorOptions);
template Tensor tensor(const std::vector<bool>&, const Shape&, TensorOptions);

template <Element T>
Tensor borrow(T* data, const Shape& shape, std::function<void()> release) {
    const std::int64_t count = element_count(shape);
    if (data == nullptr && count > 0) throw Error("borrow", "the memory to borrow is a null pointer.");
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
        throw Error("borrow", fmt::format("the memory is not aligned for {}. Copy it with from_values().",
                                          dtype_of<T>()));
    if (count > std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(sizeof(T)))
        throw Error("borrow", fmt::format("shape {} has more than 2^63 - 1 bytes.", pretty(shape)));
    auto storage = std::make_shared<Storage>(
        Device::cpu(), data, count * static_cast<std::int64_t>(sizeof(T)), std::move(release));
    return Tensor::view_of(std::move(storage), dtype_of<T>(), shape, contiguous_strides(shape), 0);
}

template Tensor borrow(double*, const Shape&, std::function<void()>);
template Tensor borrow(float*, const Shape&, std::function<void()>);
template Tensor borrow(float16*, const Shape&, std::function<void()>);
template Tensor borrow(bfloat16*, const Shape&, std::function<void()>);
template Tensor borrow(std::int64_t*, const Shape&, std::function<void()>);
template Tensor borrow(std::int32_t*, const Shape&, std::function<void()>);
template Tensor borrow(std::uint8_t*, const Shape&, std::function<void()>);
template Tensor borrow(bool*, const Shape&, std::function<void()>);

}  // namespace potluck
