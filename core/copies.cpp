#include "core/copies.h"

#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/strides.h"

namespace potluck::detail {

Tensor cast(const Tensor& x, DType dtype) {
    if (x.dtype() == dtype) return x;
    Tensor y = Tensor::empty(x.shape(), {dtype, x.device()});
    backend(x.device()).copy(x, y);
    return y;
}

Tensor cast_or_none(const Tensor& x, DType dtype) { return x.defined() ? cast(x, dtype) : x; }

Tensor empty_if(bool wanted, const Shape& shape, const Tensor& like) {
    return wanted ? Tensor::empty(shape, {like.dtype(), like.device()}) : Tensor();
}

Tensor as_floating(const Tensor& x) { return cast(x, floating_result(x.dtype())); }

Tensor copy_of(const Tensor& x) {
    Tensor y = Tensor::empty(x.shape(), {x.dtype(), x.device()});
    backend(x.device()).copy(x, y);
    return y;
}

Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : copy_of(x); }

Tensor reshaped(const Tensor& x, const Shape& shape) {
    if (const auto strides = view_strides(x.shape(), x.strides(), shape))
        return x.alias(shape, *strides, x.offset());
    return copy_of(x).alias(shape, contiguous_strides(shape), 0);
}

Tensor as_rows(const Tensor& x) {
    const Shape leading(x.shape().begin(), x.shape().end() - 1);
    return reshaped(x, {element_count(leading), x.size(-1)});
}

void copy_into(const Tensor& from, Tensor& to) { backend(to.device()).copy(from, to); }

void fill_with(const Scalar& value, Tensor& to) { backend(to.device()).fill(to, value); }

void add_into(const Tensor& x, Tensor& to) { backend(to.device()).add_scaled(x, 1.0, to); }

void read_bytes(const Tensor& x, std::int64_t first, std::int64_t n, void* to) {
    backend(x.device()).copy_to_host(to, static_cast<const std::byte*>(x.raw_data()) + first, n);
}

}  // namespace potluck::detail
