// Gathering, scattering and the lower triangle.
//
// gather and tril: one element per thread in a grid-stride loop. scatter_add: one thread adds everything that belongs
// to one element, in order and (as on the CPU) in f64 or in integers that wrap around, so there are no atomics and the
// bits are the same every time. In short lines a thread searches for the other positions with its index; long lines are
// first sorted by index (radix_sort.h), so that equal indices are adjacent.

#include <algorithm>
#include <bit>
#include <optional>
#include <type_traits>

#include "core/kernel_errors.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/index_check.h"
#include "cuda/kernels/layout.h"
#include "cuda/kernels/numbers.h"
#include "cuda/kernels/radix_sort.h"

namespace potluck::cuda {
namespace {

constexpr int threads = 256;
constexpr std::int64_t short_line = 32;

/// Throws the Error for the index at row-major position `position`.
void tell(const char* op, const Tensor& index, std::int64_t position, const Shape& shape, std::int64_t axis) {
    std::int64_t offset = index.offset();
    std::int64_t rest = position;
    for (std::int64_t i = index.ndim() - 1; i >= 0; --i) {
        offset += rest % index.size(i) * index.strides()[static_cast<std::size_t>(i)];
        rest /= index.size(i);
    }
    const auto value = index.alias({}, {}, offset).item<std::int64_t>();
    const std::int64_t size = shape[static_cast<std::size_t>(axis)];
    if (value < 0 || value >= size)
        throw bad_index(op, "index", index.shape(), position, value, size, entries_along(shape, axis));
}
FaultReporter reporter(const char* op, const Tensor& index, const Tensor& x, std::int64_t axis) {
    return [=, shape = x.shape()](std::int64_t position) { tell(op, index, position, shape, axis); };
}

/// x expanded to `shape` with stride 0 along axis: element [.., i, ..] is the first of the line along which an index
/// then selects.
Tensor lines_of(const Tensor& x, std::int64_t axis, const Shape& shape) {
    Strides strides = x.strides();
    strides[static_cast<std::size_t>(axis)] = 0;
    return x.alias(shape, strides, x.offset());
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

/// Calls function(Unsigned{}) with the unsigned integer of the element's size: for kernels that only move bits.
template <class Function>
void visit_bits(DType dtype, Function&& function) {
    switch (size_of(dtype)) {
        case 1:
            return function(std::uint8_t{});
        case 2:
            return function(std::uint16_t{});
        case 4:
            return function(std::uint32_t{});
        default:
            return function(std::uint64_t{});
    }
}

/// Calls function(Index{}) with the integer type in which positions of the layout are divided.
template <int Operands, class Function>
void visit_index(const Layout<Operands>& layout, Function&& function) {
    if (layout.template fits<std::uint32_t>())
        function(std::uint32_t{});
    else
        function(std::uint64_t{});
}

// ---- gather ----

/// Operands of the layout: the lines of x, the index. Floor: reads the index, reads and writes each element of y.
template <class Bits, class Index>
__global__ void __launch_bounds__(threads)
    gather_kernel(const Layout<2> layout, const Bits* x, std::int64_t step, std::int64_t size,
                  const std::int64_t* index, Bits* y, unsigned long long* fault_slot) {
    for (std::int64_t i = global_thread(); i < layout.count; i += global_threads()) {
        std::int64_t offset[2];
        layout.offsets(static_cast<Index>(i), offset);
        const std::int64_t chosen = index[offset[1]];
        const bool is_bad = chosen < 0 || chosen >= size;
        if (is_bad) atomicMin(fault_slot, static_cast<unsigned long long>(i));
        y[i] = is_bad ? Bits{} : x[offset[0] + chosen * step];
    }
}

// ---- scatter_add ----

/// The new value of one element of y.
template <class T>
class Sum {
public:
    __device__ explicit Sum(T start) : value_(static_cast<Value>(to_compute(start))) {}
    __device__ void add(T term) { value_ += static_cast<Value>(to_compute(term)); }
    __device__ T rounded() const { return from_compute<T>(static_cast<compute_type<T>>(value_)); }

private:
    using Value = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
    Value value_;
};

/// Parameters of both scatter kernels. Operands of the layout, with the axis of the index last: the source, and the
/// first element of each line of y.
template <class T>
struct Scattered {
    Layout<2> layout;
    std::int64_t length;  // of a line of the index
    std::int64_t step;    // between the elements of a line of y
    std::int64_t size;    // of a line of y
    const T* source;
    T* y;
};

/// The thread of the first place with an index adds what stands at all of them. Floor: reads index and source once, reads
/// and writes what is hit.
template <class T, class Index>
__global__ void __launch_bounds__(threads)
    scatter_short_kernel(const Scattered<T> all, const std::int64_t* index) {
    for (std::int64_t i = global_thread(); i < all.layout.count; i += global_threads()) {
        const std::int64_t line = i - i % all.length;
        const std::int64_t chosen = index[i];
        bool first = chosen >= 0 && chosen < all.size;
        for (std::int64_t j = line; j < i; ++j) first = first && index[j] != chosen;
        if (!first) continue;
        std::int64_t offset[2];
        all.layout.offsets(static_cast<Index>(i), offset);
        T* to = all.y + offset[1] + chosen * all.step;
        Sum<T> sum(*to);
        for (std::int64_t j = i; j < line + all.length; ++j) {
            if (index[j] != chosen) continue;
            all.layout.offsets(static_cast<Index>(j), offset);
            sum.add(all.source[offset[0]]);
        }
        *to = sum.rounded();
    }
}

/// The same for lines that were sorted. Floor: reads keys, positions and source once, reads and writes what is hit.
template <class T, class Index>
__global__ void __launch_bounds__(threads)
    scatter_sorted_kernel(const Scattered<T> all, const std::uint64_t* keys, const std::int64_t* positions) {
    for (std::int64_t i = global_thread(); i < all.layout.count; i += global_threads()) {
        const std::int64_t line = i - i % all.length;
        const std::uint64_t key = keys[i];
        if (key >= static_cast<std::uint64_t>(all.size) || (i > line && keys[i - 1] == key)) continue;
        std::int64_t offset[2];
        all.layout.offsets(static_cast<Index>(i), offset);
        T* to = all.y + offset[1] + static_cast<std::int64_t>(key) * all.step;
        Sum<T> sum(*to);
        for (std::int64_t j = i; j < line + all.length && keys[j] == key; ++j) {
            all.layout.offsets(static_cast<Index>(line + positions[j]), offset);
            sum.add(all.source[offset[0]]);
        }
        *to = sum.rounded();
    }
}

// ---- tril ----

/// Floor: reads the triangle, writes everything.
template <class Bits, class Index>
__global__ void __launch_bounds__(threads)
    tril_kernel(const Layout<1> layout, const Bits* x, std::int64_t rows, std::int64_t columns,
                std::int64_t diagonal, Bits* y) {
    for (std::int64_t i = global_thread(); i < layout.count; i += global_threads()) {
        const auto position = static_cast<Index>(i);
        const auto width = static_cast<Index>(columns);
        const auto column = static_cast<std::int64_t>(position % width);
        const auto row = static_cast<std::int64_t>(position / width % static_cast<Index>(rows));
        if (column - row > diagonal) {
            y[i] = 0;
            continue;
        }
        std::int64_t offset[1];
        layout.offsets(position, offset);
        y[i] = x[offset[0]];
    }
}

}  // namespace

void gather(KernelDevice& device, const Tensor& x, std::int64_t axis, const Tensor& index, Tensor& y) {
    check_index_shape("gather", x, axis, index);
    if (index.count() == 0) return;
    if (x.size(axis) == 0) tell("gather", index, 0, x.shape(), axis);
    const cudaStream_t queue = device.stream();
    const Tensor lines = lines_of(x, axis, index.shape());
    const Layout<2> layout = layout_of<2>({&lines, &index});
    visit_bits(x.dtype(), [&](auto bits) {
        using Bits = decltype(bits);
        visit_index(layout, [&](auto zero) {
            launch(&gather_kernel<Bits, decltype(zero)>,
                   blocks_for(layout.count, threads, 32 * device.multiprocessors()), threads, 0, queue,
                   layout, static_cast<const Bits*>(x.raw_data()),
                   x.strides()[static_cast<std::size_t>(axis)], x.size(axis),
                   elements_of<std::int64_t>(index), static_cast<Bits*>(y.raw_data()),
                   device.fault_slot(reporter("gather", index, x, axis)));
        });
    });
}

void scatter_add(KernelDevice& device, std::int64_t axis, const Tensor& index, const Tensor& source,
                 Tensor& y) {
    check_index_shape("scatter_add", y, axis, index);
    if (index.count() == 0) return;
    const cudaStream_t queue = device.stream();
    const std::int64_t count = index.count();
    const std::int64_t length = index.size(axis);
    const bool sorts = length > short_line;
    const unsigned blocks = blocks_for(count, threads, 32 * device.multiprocessors());
    // The indices are the sort keys: a bad index is replaced by the size of the axis, which the kernels ignore.
    const Tensor checked = checked_indices(device, contiguous(device, index), y.size(axis),
                                           reporter("scatter_add", index, y, axis));
    const Tensor chosen = contiguous(device, axis_last(checked, axis));
    const Tensor terms =
        axis_last(source.dtype() == y.dtype() ? source : contiguous(device, source, y.dtype()), axis);
    const Tensor lines = axis_last(lines_of(y, axis, index.shape()), axis);
    const Layout<2> layout = layout_of<2>({&terms, &lines});
    SortedRows sorted;
    if (sorts) {
        const auto largest = static_cast<std::uint64_t>(y.size(axis));
        sorted =
            sort_rows<std::uint64_t>(chosen.alias({count / length, length}, {length, 1}, chosen.offset()),
                                     static_cast<int>(std::bit_width(largest)), queue);
    }
    visit_device(y.dtype(), [&](auto element) {
        using T = decltype(element);
        const Scattered<T> all{layout,
                               length,
                               y.strides()[static_cast<std::size_t>(axis)],
                               y.size(axis),
                               elements_of<T>(terms),
                               elements_of<T>(y)};
        visit_index(layout, [&](auto zero) {
            using Index = decltype(zero);
            if (sorts)
                launch(&scatter_sorted_kernel<T, Index>, blocks, threads, 0, queue, all,
                       elements_of<std::uint64_t>(sorted.keys), elements_of<std::int64_t>(sorted.positions));
            else
                launch(&scatter_short_kernel<T, Index>, blocks, threads, 0, queue, all,
                       elements_of<std::int64_t>(chosen));
        });
    });
}

void tril(KernelDevice& device, const Tensor& x, std::int64_t diagonal, Tensor& y) {
    if (x.count() == 0) return;
    const cudaStream_t queue = device.stream();
    const Layout<1> layout = layout_of<1>({&x});
    visit_bits(x.dtype(), [&](auto bits) {
        using Bits = decltype(bits);
        visit_index(layout, [&](auto zero) {
            launch(&tril_kernel<Bits, decltype(zero)>,
                   blocks_for(layout.count, threads, 32 * device.multiprocessors()), threads, 0, queue,
                   layout, static_cast<const Bits*>(x.raw_data()), x.size(-2), x.size(-1), diagonal,
                   static_cast<Bits*>(y.raw_data()));
        });
    });
}

}  // namespace potluck::cuda
