#include <type_traits>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/cpu/indices.h"
#include "core/kernel_errors.h"

namespace potluck::cpu {

void check_indices(std::string_view op, std::string_view what, const Tensor& indices, std::int64_t size,
                   std::string_view of_what) {
    parallel_for(indices.count(), piece_size, [&](std::int64_t begin, std::int64_t end) {
        BlockReader<std::int64_t> reader(indices);
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            const std::int64_t* values = reader.read(first, n);
            bool bad = false;
            for (std::int64_t i = 0; i < n; ++i)
                bad |= static_cast<std::uint64_t>(values[i]) >= static_cast<std::uint64_t>(size);
            if (!bad) continue;
            std::int64_t i = 0;
            while (values[i] >= 0 && values[i] < size) ++i;
            throw bad_index(op, what, indices.shape(), first + i, values[i], size, of_what);
        }
    });
}

namespace {

/// x with stride 0 along `axis`: element [.., i, ..] is the first of the line along which an index then selects.
Tensor lines_of(const Tensor& x, std::int64_t axis, const Shape& shape) {
    Strides strides = x.strides();
    strides[static_cast<std::size_t>(axis)] = 0;
    return x.alias(shape, strides, x.offset());
}

/// Element is an unsigned integer with the size of the dtype: gathering only moves bits.
template <class Element>
void gather_elements(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) {
    const Tensor lines = lines_of(x, axis, index.shape());
    const Tensor* operand = &lines;
    const MergedAxes walk = merge_axes(std::span(&operand, 1));
    const std::int64_t step = x.strides()[static_cast<std::size_t>(axis)];
    const auto* from = static_cast<const Element*>(x.raw_data());
    auto* to = static_cast<Element*>(y.raw_data());
    parallel_for(index.count(), piece_size, [&](std::int64_t begin, std::int64_t end) {
        BlockReader<std::int64_t> reader(index);
        Cursor cursor(walk.sizes, walk.strides[0]);
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            const std::int64_t* chosen = reader.read(first, n);
            Element* out = to + first;
            cursor.for_each_run(first, n, [&](std::int64_t offset, std::int64_t stride, std::int64_t length) {
                for (std::int64_t i = 0; i < length; ++i)
                    out[i] = from[offset + i * stride + chosen[i] * step];
                out += length;
                chosen += length;
            });
        }
    });
}

/// The view in which `axis` is the last axis.
Tensor axis_last(const Tensor& x, std::int64_t axis) {
    Shape shape = x.shape();
    Strides strides = x.strides();
    const auto place = static_cast<std::ptrdiff_t>(axis);
    std::rotate(shape.begin() + place, shape.begin() + place + 1, shape.end());
    std::rotate(strides.begin() + place, strides.begin() + place + 1, strides.end());
    return x.alias(shape, strides, x.offset());
}

/// One thread fills a whole line along axis, in order. A line of a half type, or one whose elements are hit many times,
/// is first accumulated in f64 (integers: i64).
template <class T>
void add_lines(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) {
    using Sum = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;  // unsigned: wraps around
    using Stored = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;
    const Tensor chosen_lines = axis_last(index, axis);
    const Tensor source_lines = axis_last(source, axis);
    const std::int64_t length = chosen_lines.size(-1);
    const std::int64_t size = y.size(axis);
    const std::int64_t step = y.strides()[static_cast<std::size_t>(axis)];
    // The first element of each line of y that the index covers.
    const Shape line_shape(chosen_lines.shape().begin(), chosen_lines.shape().end() - 1);
    Strides line_strides = axis_last(y, axis).strides();
    line_strides.pop_back();
    auto* base = static_cast<std::byte*>(y.raw_data());
    const std::int64_t element = size_of(y.dtype());
    const bool direct = y.dtype() == dtype_of<T>() && length <= size;

    const std::int64_t lines = index.count() / length;
    parallel_for(
        lines, std::max<std::int64_t>(1, piece_size / length), [&](std::int64_t begin, std::int64_t end) {
            BlockReader<std::int64_t> indices(chosen_lines);
            BlockReader<T> values(source_lines);
            const Cursor places(line_shape, line_strides);
            std::vector<Stored> buffer(direct ? 0 : static_cast<std::size_t>(size));
            auto* sums = reinterpret_cast<Sum*>(buffer.data());
            for (std::int64_t line = begin; line < end; ++line) {
                std::byte* line_base = base + places.offset_of(line) * element;
                if (!direct) convert_to(buffer.data(), line_base, y.dtype(), step, size);
                for (std::int64_t first = 0; first < length; first += block_size) {
                    const std::int64_t n = std::min(block_size, length - first);
                    const std::int64_t* chosen = indices.read(line * length + first, n);
                    const T* add = values.read(line * length + first, n);
                    if (direct) {
                        auto* to =
                            reinterpret_cast<std::conditional_t<std::is_integral_v<T>, std::uint64_t, T>*>(
                                line_base);
                        for (std::int64_t i = 0; i < n; ++i)
                            to[chosen[i] * step] += static_cast<std::remove_pointer_t<decltype(to)>>(add[i]);
                    } else {
                        for (std::int64_t i = 0; i < n; ++i) sums[chosen[i]] += static_cast<Sum>(add[i]);
                    }
                }
                if (!direct) convert_from(buffer.data(), line_base, y.dtype(), step, size);
            }
        });
}

}  // namespace

void gather(const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) {
    check_index_shape("gather", x, axis, index);
    check_indices("gather", "index", index, x.size(axis), entries_along(x.shape(), axis));
    if (index.count() == 0) return;
    switch (size_of(x.dtype())) {
        case 1:
            return gather_elements<std::uint8_t>(x, axis, index, y);
        case 2:
            return gather_elements<std::uint16_t>(x, axis, index, y);
        case 4:
            return gather_elements<std::uint32_t>(x, axis, index, y);
        default:
            return gather_elements<std::uint64_t>(x, axis, index, y);
    }
}

void scatter_add(std::int64_t axis, const Tensor& index, const Tensor& source, Tensor& y) {
    check_index_shape("scatter_add", y, axis, index);
    check_indices("scatter_add", "index", index, y.size(axis), entries_along(y.shape(), axis));
    if (index.count() == 0) return;
    visit_compute(y.dtype(), [&](auto zero) { add_lines<decltype(zero)>(axis, index, source, y); });
}

void tril(const Tensor& x, std::int64_t diagonal, Tensor& y) {
    if (x.count() == 0) return;
    const std::int64_t rows = x.size(-2);
    const std::int64_t columns = x.size(-1);
    const std::int64_t step = x.strides().back();
    const std::int64_t element = size_of(x.dtype());
    const auto* from = static_cast<const std::byte*>(x.raw_data());
    auto* to = static_cast<std::byte*>(y.raw_data());
    const Shape row_shape(x.shape().begin(), x.shape().end() - 1);
    const Strides row_strides(x.strides().begin(), x.strides().end() - 1);
    // The first column above the triangle moves with the row, whatever the size of diagonal.
    const std::int64_t below = std::clamp(diagonal, -rows, columns);
    parallel_for(
        x.count() / columns, std::max<std::int64_t>(1, piece_size / columns),
        [&](std::int64_t begin, std::int64_t end) {
            const Cursor cursor(row_shape, row_strides);
            for (std::int64_t row = begin; row < end; ++row) {
                const std::int64_t kept = std::clamp<std::int64_t>(row % rows + below + 1, 0, columns);
                std::byte* line = to + row * columns * element;
                convert(from + cursor.offset_of(row) * element, x.dtype(), step, line, x.dtype(), 1, kept);
                std::fill(line + kept * element, line + columns * element, std::byte{0});
            }
        });
}

}  // namespace potluck::cpu
