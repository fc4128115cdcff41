#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/options.h"
#include "core/scalar.h"
#include "core/storage.h"

namespace potluck {

// In its own namespace, so that argument-dependent lookup for zeros(shape) finds the caller's zeros() only, and not
// ours too.
namespace sizes {

/// Sizes of the axes, outermost first. {} is a scalar (one element); any size 0 makes the tensor empty. A vector that
/// can be printed.
class Shape : public std::vector<std::int64_t> {
public:
    using std::vector<std::int64_t>::vector;
    Shape() = default;
    Shape(std::vector<std::int64_t> sizes) : std::vector<std::int64_t>(std::move(sizes)) {}
};
/// Steps between neighbours along each axis, counted in elements. 0 repeats one element (broadcasting). A vector that can
/// be printed.
class Strides : public std::vector<std::int64_t> {
public:
    using std::vector<std::int64_t>::vector;
    Strides() = default;
    Strides(std::vector<std::int64_t> steps) : std::vector<std::int64_t>(std::move(steps)) {}
};
/// Both print "(2, 3)".
std::ostream& operator<<(std::ostream& stream, const Shape& shape);
std::ostream& operator<<(std::ostream& stream, const Strides& strides);

}  // namespace sizes
using sizes::Shape;
using sizes::Strides;

/// Number of elements. Throws Error for a negative size, or when the product does not fit in 63 bits.
std::int64_t element_count(const Shape& shape);
/// Row-major strides of a shape.
Strides contiguous_strides(const Shape& shape);
/// The common shape under broadcasting: axes are aligned at the end, and size 1 is repeated.
/// Throws Error(op, ...) that names both shapes when they do not fit.
Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b);
/// Converts an axis that may count from the back (-1 is the last) to one that counts from the front.
/// Throws Error(op, ...) when it is out of range.
std::int64_t normalize_axis(std::string_view op, std::int64_t axis, std::int64_t ndim);
/// "(2, 3)".
std::string to_string(const Shape& shape);

struct Node;  // a tensor's place on the tape: autograd/tape.h

namespace detail {
/// What somebody assigns to a tensor without a name, such as a row: the assignment would be lost.
struct AssignedToNoName {
    template <class T>
    AssignedToNoName(const T&,
                     Refused<"write x[0].copy_(y), p.set_grad(y), or name the tensor", sizeof(T)> = {});
};
}  // namespace detail

/// What a factory makes: dtype and device.
struct TensorOptions {
    DType dtype = DType::f32;
    Device device = Device::cpu();
    bool pinned =
        false;  // CPU devices only, scarce: copy_async() to and from a GPU then does not block the host
};

/// An n-dimensional array: a cheap handle (two handles may refer to the same tensor, like shared_ptr) to a shape,
/// strides, a dtype, and a storage that views share.
///
/// The functions that compute with tensors are free functions (autograd/ops.h) and record themselves on the tape.
/// Members describe the tensor, or are shorthands for the most used ops.
///
/// The compiler warns when a returned tensor is discarded, since it was computed for nothing. Assignment makes a handle
/// refer to another tensor, so it needs a named handle: `x[0] = y` is refused; x[0].copy_(y) writes elements.
class [[nodiscard]] Tensor {
public:
    /// No tensor: only defined() and assignment may be used. Represents "none" (an absent bias, a missing gradient).
    Tensor() = default;
    Tensor(const Tensor&) = default;
    Tensor(Tensor&&) noexcept = default;
    Tensor& operator=(const Tensor&) & = default;
    Tensor& operator=(Tensor&&) & noexcept = default;
    Tensor& operator=(const detail::AssignedToNoName&) &&;
    ~Tensor() = default;
    /// New uninitialised memory, row-major. See zeros(), full(), randn() for initialised tensors.
    static Tensor empty(const Shape& shape, TensorOptions options = {});
    /// A view of a storage. Throws Error if it would reach outside the storage.
    static Tensor view_of(std::shared_ptr<Storage> storage, DType dtype, Shape shape, Strides strides,
                          std::int64_t offset);

    bool defined() const { return impl_ != nullptr; }
    /// Whether both handles refer to the same tensor (not: equal elements).
    bool is_same(const Tensor& other) const { return impl_ == other.impl_; }

    const Shape& shape() const { return impl().shape; }
    const Strides& strides() const { return impl().strides; }
    /// Position of the first element in the storage, in elements.
    std::int64_t offset() const { return impl().offset; }
    std::int64_t ndim() const { return static_cast<std::int64_t>(impl().shape.size()); }
    /// Size along an axis; negative axes count from the back.
    std::int64_t size(std::int64_t axis) const;
    /// Number of elements.
    std::int64_t count() const { return impl().count; }
    /// Bytes of the elements (not of the storage).
    std::int64_t bytes() const { return impl().count * size_of(impl().dtype); }
    DType dtype() const { return impl().dtype; }
    Device device() const { return impl().storage->device(); }
    /// Whether the elements are in row-major order without gaps.
    bool is_contiguous() const { return impl().contiguous; }
    const std::shared_ptr<Storage>& storage() const { return impl().storage; }

    /// Pointer to the first element, for kernels and for host code on the CPU. Throws Error when T is not the dtype.
    template <Element T>
    T* data() const {
        check_dtype(dtype_of<T>());
        return static_cast<T*>(raw_data());
    }
    void* raw_data() const;

    /// The value of a tensor with one element, from any device. Throws Error for any other count.
    template <class T = double>
    T item() const {
        const Scalar value = item_scalar();
        if constexpr (std::is_same_v<T, bool>)
            return value.to_bool();
        else if constexpr (std::is_integral_v<T>)
            return static_cast<T>(value.to_int64());
        else
            return static_cast<T>(value.to_double());
    }
    /// All elements in row-major order, converted to T, from any device.
    template <class T = double>
    std::vector<T> to_vector() const;

    // ---- views and copies outside the tape (building blocks of kernels and ops) ----

    /// Another view of the same storage, outside the tape.
    Tensor alias(Shape shape, Strides strides, std::int64_t offset) const;
    /// The same view, outside the tape.
    Tensor detach() const { return alias(shape(), strides(), offset()); }
    /// This view broadcast to `shape` by strides of 0. Throws Error(op, ...) if it does not broadcast.
    Tensor broadcast_alias(std::string_view op, const Shape& shape) const;
    /// Whether no other tensor or handle shares the memory, so that it may be reused in place.
    bool is_unique() const { return impl_.use_count() == 1 && impl_->storage.use_count() == 1; }

    // ---- the tape (defined in autograd/) ----

    /// Whether gradients flow to or through this tensor.
    bool requires_grad() const;
    /// Makes a leaf accumulate gradients (or stop). Floating dtypes only. Returns this tensor.
    Tensor& set_requires_grad(bool requires_grad = true);
    /// The gradient that backward() stored here; an undefined tensor if there is none.
    Tensor grad() const;
    /// Replaces the gradient, or drops it if `gradient` is undefined. Shape and device must be this tensor's.
    void set_grad(const Tensor& gradient);
    /// Computes the gradients of this scalar with respect to all leaves: see potluck::backward() for options.
    void backward() const;
    const std::shared_ptr<Node>& node() const { return impl().node; }
    void set_node(std::shared_ptr<Node> node) const { impl().node = std::move(node); }
    /// Replaces the elements of this tensor, and so of every handle to it, by those of `elements`, which has the same
    /// shape; dtype, device and memory may differ. A leaf continues to accumulate gradients; the result of an op
    /// becomes a leaf. A graph that saved the old elements treats them as changed in place.
    void set_elements(const Tensor& elements) const;

    // ---- shorthands for ops on the tape (defined in autograd/ops/) ----

    Tensor to(DType dtype) const;
    Tensor to(Device device) const;
    Tensor contiguous() const;
    Tensor clone() const;
    /// One size may be -1: it is inferred from the others.
    Tensor reshape(const Shape& shape) const;
    Tensor transpose(std::int64_t first, std::int64_t second) const;
    Tensor permute(const std::vector<std::int64_t>& axes) const;
    Tensor narrow(std::int64_t axis, std::int64_t start, std::int64_t length) const;
    Tensor select(std::int64_t axis, std::int64_t index) const;
    Tensor unsqueeze(std::int64_t axis) const;
    Tensor squeeze(std::int64_t axis) const;
    Tensor expand(const Shape& shape) const;
    Tensor sum() const;
    Tensor mean() const;
    /// Row `index` of the first axis: select(0, index).
    Tensor operator[](std::int64_t index) const;

    // ---- in-place changes (defined in autograd/ops/inplace.cpp) ----
    // They are never recorded: while gradients are being recorded they refuse any tensor on the tape. Other operands
    // are broadcast to this shape and converted to this dtype.

    const Tensor& fill_(const Scalar& value) const;
    const Tensor& zero_() const { return fill_(0); }
    const Tensor& copy_(const Tensor& source) const;
    const Tensor& add_(const Tensor& other, double scale = 1.0) const;
    const Tensor& mul_(const Tensor& other) const;
    const Tensor& mul_(const Scalar& factor) const;

private:
    struct Impl {
        std::shared_ptr<Storage> storage;
        Shape shape;
        Strides strides;
        std::int64_t offset = 0;
        std::int64_t count = 1;
        DType dtype = DType::f32;
        bool contiguous = true;
        mutable std::shared_ptr<Node> node;
    };

    Impl& impl() const;  // throws Error for an undefined tensor
    void check_dtype(DType wanted) const;
    Scalar item_scalar() const;

    std::shared_ptr<Impl> impl_;
};

/// Prints like NumPy, abbreviates long axes, and shows dtype and device if they are not f32 on the CPU.
std::ostream& operator<<(std::ostream& stream, const Tensor& tensor);
std::string to_string(const Tensor& tensor);

}  // namespace potluck
