#include "core/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <ostream>

#include "core/capture.h"
#include "core/copies.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

bool is_row_major(const Shape& shape, const Strides& strides, std::int64_t count) {
    if (count == 0) return true;
    std::int64_t expected = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        if (shape[axis] == 1) continue;
        if (strides[axis] != expected) return false;
        expected *= shape[axis];
    }
    return true;
}

std::int64_t checked_bytes(const Shape& shape, std::int64_t count, DType dtype) {
    if (count > largest / size_of(dtype))
        throw Error(OpScope::current(),
                    fmt::format("a tensor of shape {} and dtype {} has more than 2^63 - 1 bytes.",
                                pretty(shape), dtype));
    return count * size_of(dtype);
}

/// Whether offset + the farthest element in either direction lies inside [0, capacity), all in elements.
bool reaches_inside(const Shape& shape, const Strides& strides, std::int64_t offset, std::int64_t count,
                    std::int64_t capacity) {
    if (offset < 0 || offset > capacity) return false;
    if (count == 0) return true;
    std::int64_t low = offset;
    std::int64_t high = offset;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        std::int64_t reach = 0;
        std::int64_t& end = strides[axis] < 0 ? low : high;
        if (__builtin_mul_overflow(shape[axis] - 1, strides[axis], &reach) ||
            __builtin_add_overflow(end, reach, &end))
            return false;
    }
    return low >= 0 && high < capacity;
}

}  // namespace

std::int64_t element_count(const Shape& shape) {
    std::int64_t product =
        1;  // product of the sizes that are not 0: strides use those even where the tensor is empty
    bool is_empty = false;
    for (const std::int64_t size : shape) {
        if (size < 0)
            throw Error(OpScope::current(),
                        fmt::format("shape {} has a negative size. Sizes are 0 or more.", pretty(shape)));
        if (size == 0)
            is_empty = true;
        else if (__builtin_mul_overflow(product, size, &product))
            throw Error(OpScope::current(),
                        fmt::format("shape {} has more than 2^63 - 1 elements.", pretty(shape)));
    }
    return is_empty ? 0 : product;
}

Strides contiguous_strides(const Shape& shape) {
    element_count(shape);  // refuses sizes that would overflow below
    Strides strides(shape.size());
    std::int64_t stride = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        strides[axis] = stride;
        stride *= std::max<std::int64_t>(shape[axis], 1);
    }
    return strides;
}

Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b) {
    Shape result(std::max(a.size(), b.size()));
    for (std::size_t back = 1; back <= result.size(); ++back) {
        const std::int64_t size_a = back <= a.size() ? a[a.size() - back] : 1;
        const std::int64_t size_b = back <= b.size() ? b[b.size() - back] : 1;
        if (size_a != size_b && size_a != 1 && size_b != 1)
            throw Error(
                op,
                fmt::format("shapes {} and {} do not broadcast: counted from the end, axis {} has sizes {} "
                            "and {}. They must be equal, or one of them 1.",
                            pretty(a), pretty(b), back, size_a, size_b));
        result[result.size() - back] = size_a == 1 ? size_b : size_a;
    }
    return result;
}

std::int64_t normalize_axis(std::string_view op, std::int64_t axis, std::int64_t ndim) {
    if (axis >= -ndim && axis < ndim) return axis < 0 ? axis + ndim : axis;
    if (ndim == 0) throw Error(op, fmt::format("axis {} of a scalar: a scalar has no axes.", axis));
    throw Error(
        op, fmt::format("axis {} is out of range for {} axes. Give {} to {}.", axis, ndim, -ndim, ndim - 1));
}

std::string to_string(const Shape& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

std::ostream& sizes::operator<<(std::ostream& stream, const Shape& shape) {
    return stream << to_string(shape);
}
std::ostream& sizes::operator<<(std::ostream& stream, const Strides& strides) {
    return stream << fmt::format("({})", fmt::join(strides, ", "));
}

Tensor Tensor::empty(const Shape& shape, TensorOptions options) {
    const std::int64_t count = element_count(shape);
    auto storage =
        std::make_shared<Storage>(options.device, checked_bytes(shape, count, options.dtype), options.pinned);
    Tensor result;
    result.impl_ = std::make_shared<Impl>();
    *result.impl_ = {
        std::move(storage), shape, contiguous_strides(shape), 0, count, options.dtype, true, nullptr};
    return result;
}

Tensor Tensor::view_of(std::shared_ptr<Storage> storage, DType dtype, Shape shape, Strides strides,
                       std::int64_t offset) {
    const char* op = OpScope::current();
    if (storage == nullptr) throw Error(op, "a view needs a storage, and there is none.");
    if (shape.size() != strides.size())
        throw Error(op, fmt::format("a view of shape {} needs {} strides, and {} are given.", pretty(shape),
                                    shape.size(), strides.size()));
    const std::int64_t count = element_count(shape);
    checked_bytes(shape, count, dtype);
    const std::int64_t capacity = storage->bytes() / size_of(dtype);
    if (count == 0 && offset > 0) offset = 0;  // a part of an empty tensor may begin anywhere
    if (!reaches_inside(shape, strides, offset, count, capacity))
        throw Error(
            op, fmt::format("a view of shape {}, strides {}, offset {} reaches outside its storage of {} {} "
                            "elements.",
                            pretty(shape), pretty(strides), offset, capacity, dtype));
    const bool row_major = is_row_major(shape, strides, count);
    Tensor result;
    result.impl_ = std::make_shared<Impl>();
    *result.impl_ = {std::move(storage), std::move(shape), std::move(strides), offset, count, dtype,
                     row_major,          nullptr};
    return result;
}

Tensor Tensor::alias(Shape shape, Strides strides, std::int64_t offset) const {
    return view_of(impl().storage, impl().dtype, std::move(shape), std::move(strides), offset);
}

Tensor Tensor::broadcast_alias(std::string_view op, const Shape& shape) const {
    if (shape == this->shape()) return detach();
    const std::size_t own = this->shape().size();
    bool fits = shape.size() >= own;
    Strides strides(shape.size(), 0);
    for (std::size_t back = 1; fits && back <= own; ++back) {
        const std::int64_t size = this->shape()[own - back];
        fits = size == 1 || size == shape[shape.size() - back];
        if (size != 1) strides[shape.size() - back] = this->strides()[own - back];
    }
    if (!fits)
        throw Error(
            op, fmt::format("shape {} does not stretch to {}: counted from the end, axes must be equal or 1.",
                            pretty(this->shape()), pretty(shape)));
    return alias(shape, std::move(strides), offset());
}

std::int64_t Tensor::size(std::int64_t axis) const {
    return shape()[static_cast<std::size_t>(normalize_axis("size", axis, ndim()))];
}

void* Tensor::raw_data() const {
    const Impl& own = impl();
    return own.storage->data() + own.offset * size_of(own.dtype);
}

Tensor::Impl& Tensor::impl() const {
    if (impl_ == nullptr)
        throw Error(OpScope::current(),
                    "an undefined tensor was used. Assign a tensor first, or ask defined().");
    return *impl_;
}

void Tensor::check_dtype(DType wanted) const {
    if (dtype() != wanted)
        throw Error("data",
                    fmt::format("the tensor has dtype {} and was asked for {} elements. Convert it with "
                                "to(DType).",
                                dtype(), wanted));
}

Scalar Tensor::item_scalar() const {
    if (count() != 1)
        throw Error("item",
                    fmt::format("a tensor of shape {} has {} elements, not 1. Reduce or select first, or use "
                                "to_vector().",
                                pretty(shape()), count()));
    detail::require_readable("item", device());
    std::byte element[8] = {};
    detail::read_bytes(*this, 0, size_of(dtype()), element);
    return visit(dtype(), [&](auto zero) -> Scalar {
        using T = decltype(zero);
        T value;
        std::memcpy(&value, element, sizeof value);
        if constexpr (std::same_as<T, float16> || std::same_as<T, bfloat16>)
            return static_cast<float>(value);
        else
            return value;
    });
}

template <class T>
std::vector<T> Tensor::to_vector() const {
    detail::require_readable("to_vector", device());
    const Tensor dense = detail::as_contiguous(detail::cast(*this, dtype_of<T>()));
    const auto size = static_cast<std::size_t>(count());
    if constexpr (std::same_as<T, bool>) {
        std::vector<std::uint8_t> bytes(size);
        detail::read_bytes(dense, 0, dense.bytes(), bytes.data());
        return {bytes.begin(), bytes.end()};
    } else {
        std::vector<T> values(size);
        detail::read_bytes(dense, 0, dense.bytes(), values.data());
        return values;
    }
}

template std::vector<double> Tensor::to_vector() const;
template std::vector<float> Tensor::to_vector() const;
template std::vector<float16> Tensor::to_vector() const;
template std::vector<bfloat16> Tensor::to_vector() const;
template std::vector<std::int64_t> Tensor::to_vector() const;
template std::vector<std::int32_t> Tensor::to_vector() const;
template std::vector<std::uint8_t> Tensor::to_vector() const;
template std::vector<bool> Tensor::to_vector() const;

}  // namespace potluck
