#include "autograd/ops/view.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

/// Infers the -1 in a requested shape and checks the element count.
Shape completed(const char* name, const Tensor& x, const Shape& wanted) {
    detail::require_defined(name, x, "the operand");
    Shape shape = wanted;
    std::int64_t* open = nullptr;
    for (std::int64_t& size : shape) {
        if (size >= 0) continue;
        if (size != -1 || open != nullptr)
            throw Error(
                name,
                fmt::format("the shape {} is not valid: sizes are 0 or more, and one of them may be -1.",
                            pretty(wanted)));
        open = &size;
    }
    if (open != nullptr) {
        *open = 1;
        const std::int64_t rest = element_count(shape);
        if (rest == 0 || x.count() % rest != 0)
            throw Error(name, fmt::format("no size in place of -1 makes {} out of {} with its {} elements.",
                                          pretty(wanted), pretty(x.shape()), x.count()));
        *open = x.count() / rest;
    }
    if (element_count(shape) != x.count())
        throw Error(name,
                    fmt::format("{} has {} elements, but {} has {}. Use -1 for one size to let it follow.",
                                pretty(x.shape()), x.count(), pretty(wanted), element_count(shape)));
    return shape;
}

Tensor on_tape(const char* name, const Tensor& y, const Tensor& x) {
    return record(name, y, {x}, {}, [shape = x.shape()](const Saved&, const Tensor& dy, Gradients& dx) {
        dx.add(0, reshape(dy, shape));
    });
}

std::size_t place(std::int64_t axis) { return static_cast<std::size_t>(axis); }

/// Entries start, start + step, .. along axis, on the tape.
Tensor strided(const char* name, const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length,
               std::int64_t step) {
    return record(name, detail::strided_alias(x, axis, start, length, step), {x}, {},
                  [=, shape = x.shape()](const Saved&, const Tensor& dy, Gradients& dx) {
                      if (is_grad_enabled()) return dx.add(0, detail::spread(dy, shape, axis, start, step));
                      // Adds directly to the part of the gradient that belongs to these entries.
                      Tensor part = detail::strided_alias(dx.buffer(0), axis, start, length, step);
                      detail::add_into(dy, part);
                  });
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& wanted) {
    const OpScope scope("reshape");
    const Shape shape = completed("reshape", x, wanted);
    return on_tape("reshape", detail::reshaped(x, shape), x);
}

Tensor view(const Tensor& x, const Shape& wanted) {
    const Shape shape = completed("view", x, wanted);
    const auto strides = detail::view_strides(x.shape(), x.strides(), shape);
    if (!strides)
        throw Error("view",
                    fmt::format("{} with strides ({}) cannot be seen as {} without a copy. Use reshape().",
                                pretty(x.shape()), fmt::join(x.strides(), ", "), pretty(shape)));
    return on_tape("view", x.alias(shape, *strides, x.offset()), x);
}

Tensor flatten(const Tensor& x, std::int64_t first, std::int64_t last) {
    detail::require_defined("flatten", x, "the operand");
    if (x.ndim() == 0) return reshape(x, {1});
    first = normalize_axis("flatten", first, x.ndim());
    last = normalize_axis("flatten", last, x.ndim());
    if (first > last)
        throw Error("flatten", fmt::format("axis {} comes after axis {}. Swap them.", first, last));
    Shape shape(x.shape().begin(), x.shape().begin() + first);
    shape.push_back(element_count(Shape(x.shape().begin() + first, x.shape().begin() + last + 1)));
    shape.insert(shape.end(), x.shape().begin() + last + 1, x.shape().end());
    return reshape(x, shape);
}

Tensor permute(const Tensor& x, const std::vector<std::int64_t>& axes) {
    detail::require_defined("permute", x, "the operand");
    std::vector<std::int64_t> order;
    std::vector<std::int64_t> inverse(axes.size(), -1);
    bool valid = static_cast<std::int64_t>(axes.size()) == x.ndim();
    for (std::size_t i = 0; valid && i < axes.size(); ++i) {
        const std::int64_t axis = normalize_axis("permute", axes[i], x.ndim());
        valid = inverse[place(axis)] < 0;
        order.push_back(axis);
        inverse[place(axis)] = static_cast<std::int64_t>(i);
    }
    if (!valid)
        throw Error("permute",
                    fmt::format("({}) is not a permutation of the axes of {}. Name every axis once.",
                                fmt::join(axes, ", "), pretty(x.shape())));
    return record(
        "permute", detail::permuted_alias(x, order), {x}, {},
        [inverse](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, permute(dy, inverse)); });
}

Tensor transpose(const Tensor& x, std::int64_t first, std::int64_t second) {
    detail::require_defined("transpose", x, "the operand");
    first = normalize_axis("transpose", first, x.ndim());
    second = normalize_axis("transpose", second, x.ndim());
    std::vector<std::int64_t> order(place(x.ndim()));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::swap(order[place(first)], order[place(second)]);
    return record("transpose", detail::permuted_alias(x, order), {x}, {},
                  [first, second](const Saved&, const Tensor& dy, Gradients& dx) {
                      dx.add(0, transpose(dy, first, second));
                  });
}

Tensor expand(const Tensor& x, const Shape& wanted) {
    detail::require_defined("expand", x, "the operand");
    Shape shape = wanted;
    const std::int64_t leading = static_cast<std::int64_t>(shape.size()) - x.ndim();
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        if (shape[axis] != -1) continue;
        const std::int64_t own = static_cast<std::int64_t>(axis) - leading;
        if (own < 0 || leading < 0)
            throw Error("expand",
                        fmt::format("-1 keeps a size, but axis {} of {} is new to {}. Give its size.", axis,
                                    pretty(wanted), pretty(x.shape())));
        shape[axis] = x.shape()[place(own)];
    }
    element_count(shape);  // throws for negative sizes
    return record("expand", x.broadcast_alias("expand", shape), {x}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });  // add() sums
}

Tensor unsqueeze(const Tensor& x, std::int64_t axis) {
    detail::require_defined("unsqueeze", x, "the operand");
    axis = normalize_axis("unsqueeze", axis, x.ndim() + 1);
    Shape shape = x.shape();
    Strides strides = x.strides();
    const std::int64_t stride = axis < x.ndim() ? x.shape()[place(axis)] * x.strides()[place(axis)] : 1;
    shape.insert(shape.begin() + axis, 1);
    strides.insert(strides.begin() + axis, stride);
    return on_tape("unsqueeze", x.alias(std::move(shape), std::move(strides), x.offset()), x);
}

Tensor squeeze(const Tensor& x, std::int64_t axis) {
    detail::require_defined("squeeze", x, "the operand");
    axis = normalize_axis("squeeze", axis, x.ndim());
    if (x.shape()[place(axis)] != 1)
        throw Error("squeeze",
                    fmt::format("axis {} of {} has size {}, and only size 1 can be dropped. Use select() to "
                                "take one entry.",
                                axis, pretty(x.shape()), x.shape()[place(axis)]));
    Shape shape = x.shape();
    Strides strides = x.strides();
    shape.erase(shape.begin() + axis);
    strides.erase(strides.begin() + axis);
    return on_tape("squeeze", x.alias(std::move(shape), std::move(strides), x.offset()), x);
}

Tensor squeeze(const Tensor& x) {
    detail::require_defined("squeeze", x, "the operand");
    Shape shape;
    Strides strides;
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis) {
        if (x.shape()[axis] == 1) continue;
        shape.push_back(x.shape()[axis]);
        strides.push_back(x.strides()[axis]);
    }
    return on_tape("squeeze", x.alias(std::move(shape), std::move(strides), x.offset()), x);
}

Tensor narrow(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length) {
    detail::require_defined("narrow", x, "the operand");
    axis = normalize_axis("narrow", axis, x.ndim());
    const std::int64_t size = x.shape()[place(axis)];
    if (start < 0 || length < 0 || length > size || start > size - length)
        throw Error("narrow", fmt::format("{} entries from {} reach outside of axis {} of {}, which has {}.",
                                          length, start, axis, pretty(x.shape()), size));
    return strided("narrow", x, axis, start, length, 1);
}

Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index) {
    detail::require_defined("select", x, "the operand");
    axis = normalize_axis("select", axis, x.ndim());
    const std::int64_t size = x.shape()[place(axis)];
    if (index < -size || index >= size)
        throw Error("select", fmt::format("index {} is outside of axis {} of {}, which has {} entries.",
                                          index, axis, pretty(x.shape()), size));
    if (index < 0) index += size;
    const Tensor entry = detail::strided_alias(x, axis, index, 1, 1);
    Shape shape = entry.shape();
    Strides strides = entry.strides();
    shape.erase(shape.begin() + axis);
    strides.erase(strides.begin() + axis);
    return record("select", entry.alias(std::move(shape), std::move(strides), entry.offset()), {x}, {},
                  [axis, index, whole = x.shape()](const Saved&, const Tensor& dy, Gradients& dx) {
                      const Tensor entry = unsqueeze(dy, axis);
                      if (is_grad_enabled()) return dx.add(0, detail::spread(entry, whole, axis, index, 1));
                      Tensor part = detail::strided_alias(dx.buffer(0), axis, index, 1, 1);
                      detail::add_into(entry, part);
                  });
}

Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step) {
    detail::require_defined("slice", x, "the operand");
    axis = normalize_axis("slice", axis, x.ndim());
    if (step < 1) throw Error("slice", fmt::format("the step is {}, but it must be 1 or more.", step));
    const std::int64_t size = x.shape()[place(axis)];
    const auto cut = [size](std::int64_t at) {
        return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
    };
    start = cut(start);
    end = cut(end);
    const std::int64_t length = end > start ? (end - start - 1) / step + 1 : 0;
    // With a single entry the step does not matter, and a huge step could overflow the stride.
    return strided("slice", x, axis, start, length, length > 1 ? step : 1);
}

std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis) {
    detail::require_defined("split", x, "the operand");
    axis = normalize_axis("split", axis, x.ndim());
    const std::int64_t whole = x.shape()[place(axis)];
    std::int64_t left = whole;
    for (const std::int64_t size : sizes) {
        if (size < 0 || size > left) {
            left = -1;
            break;
        }
        left -= size;
    }
    if (left != 0)
        throw Error("split", fmt::format("the sizes ({}) do not sum to {}, the size of axis {} of {}.",
                                         fmt::join(sizes, ", "), whole, axis, pretty(x.shape())));
    std::vector<Tensor> pieces;
    std::int64_t start = 0;
    for (const std::int64_t size : sizes) {
        pieces.push_back(strided("split", x, axis, start, size, 1));
        start += size;
    }
    return pieces;
}

std::vector<Tensor> split(const Tensor& x, std::int64_t size, std::int64_t axis) {
    detail::require_defined("split", x, "the operand");
    axis = normalize_axis("split", axis, x.ndim());
    if (size < 1)
        throw Error("split", fmt::format("the size of a piece is {}, but it must be 1 or more.", size));
    const std::int64_t whole = x.shape()[place(axis)];
    std::vector<std::int64_t> sizes;
    for (std::int64_t start = 0; start < whole; start += std::min(size, whole - start))
        sizes.push_back(std::min(size, whole - start));
    if (sizes.empty()) sizes.push_back(0);
    return split(x, sizes, axis);
}

// ---- shorthands ----

Tensor Tensor::reshape(const Shape& shape) const { return potluck::reshape(*this, shape); }
Tensor Tensor::transpose(std::int64_t first, std::int64_t second) const {
    return potluck::transpose(*this, first, second);
}
Tensor Tensor::permute(const std::vector<std::int64_t>& axes) const { return potluck::permute(*this, axes); }
Tensor Tensor::narrow(std::int64_t axis, std::int64_t start, std::int64_t length) const {
    return potluck::narrow(*this, axis, start, length);
}
Tensor Tensor::select(std::int64_t axis, std::int64_t index) const {
    return potluck::select(*this, axis, index);
}
Tensor Tensor::unsqueeze(std::int64_t axis) const { return potluck::unsqueeze(*this, axis); }
Tensor Tensor::squeeze(std::int64_t axis) const { return potluck::squeeze(*this, axis); }
Tensor Tensor::expand(const Shape& shape) const { return potluck::expand(*this, shape); }
Tensor Tensor::operator[](std::int64_t index) const { return potluck::select(*this, 0, index); }

}  // namespace potluck
