#pragma once

// Lets a kernel read and write operands of any strides and dtype, without a version for each of them.
//
// A kernel that works element by element (or along rows) is written for three compute types only:
//     double for f64,  float for f32 f16 bf16,  int64 for i64 i32 u8 bool.
// It sees its operands as blocks: at most `block_size` consecutive elements in row-major order. A block that already
// has the right type and layout in memory is passed without a copy; any other block is gathered and converted into a
// small buffer that stays in the L1 cache. Results are written back in the same way.
//
// An element-wise kernel is one call:
//
//     visit_compute(y.dtype(), [&](auto zero) {
//         using T = decltype(zero);
//         BlockMap<T, T, T>::run(y, a, b, [](T* y, const T* a, const T* b, std::int64_t n) {
//             for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
//         });
//     });
//
// The template arguments of BlockMap are the types of the output and of each input as the body sees them:
// BlockMap<bool, T, T> for a comparison, BlockMap<T, bool, T, T> for where. The body must allow y to be the memory of
// an input (same address).
//
// A reduction reads rows: elements [row * n, row * n + n) in row-major order, for any strides:
//
//     BlockReader<T> reader(x);                                  // one per thread: it owns the buffer
//     for (std::int64_t i = 0; i < n; i += block_size) {
//         const std::int64_t length = std::min(block_size, n - i);
//         const T* values = reader.read(row * n + i, length);    // valid until the next read
//         ...
//     }

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/cpu/convert.h"
#include "core/cpu/parallel.h"
#include "core/merged_axes.h"
#include "core/tensor.h"

namespace potluck::cpu {

inline constexpr std::int64_t block_size = 1024;
/// The number of elements that one thread processes at a time in BlockMap.
inline constexpr std::int64_t piece_size = 16 * block_size;

/// Calls `function(T{})` with the compute type of a dtype: double, float or int64.
template <class Function>
decltype(auto) visit_compute(DType dtype, Function&& function) {
    if (dtype == DType::f64) return function(double{});
    if (is_floating(dtype)) return function(float{});
    return function(std::int64_t{});
}

/// The same for kernels without an integer version (their ops accept floating tensors only).
template <class Function>
decltype(auto) visit_floating_compute(DType dtype, Function&& function) {
    if (dtype == DType::f64) return function(double{});
    return function(float{});
}

/// A position in one operand that moves through its elements in row-major order.
class Cursor {
public:
    Cursor(const Shape& sizes, const Strides& strides);

    std::int64_t count() const { return count_; }
    /// Whether elements [first, first + n) are adjacent in memory.
    bool is_dense(std::int64_t first, std::int64_t n) const {
        return n <= 1 || (inner_stride_ == 1 && first % inner_size_ + n <= inner_size_);
    }
    /// Whether all strides are 0, so that every element is the same one.
    bool is_constant() const { return constant_; }
    /// The memory offset of element `index` from the first, in elements.
    std::int64_t offset_of(std::int64_t index) const;
    /// Calls run(offset, stride, length), in order, for the runs of constant stride that make up elements [first, first
    /// + n).
    template <class Run>
    void for_each_run(std::int64_t first, std::int64_t n, Run&& run) {
        if (first != next_) seek(first);
        next_ = first + n;
        while (n > 0) {
            const std::int64_t length = std::min(n, inner_size_ - inner_position_);
            run(outer_offset_ + inner_position_ * inner_stride_, inner_stride_, length);
            n -= length;
            inner_position_ += length;
            if (inner_position_ == inner_size_) next_row();
        }
    }

private:
    void seek(std::int64_t index);
    void next_row();

    Shape outer_sizes_;  // of all axes but the innermost
    Strides outer_strides_;
    std::vector<std::int64_t> position_;  // along the outer axes
    std::int64_t inner_size_ = 1;
    std::int64_t inner_stride_ = 1;
    std::int64_t count_ = 1;
    std::int64_t outer_offset_ = 0;
    std::int64_t inner_position_ = 0;
    std::int64_t next_ = 0;
    bool constant_ = true;
};

/// Reads a tensor of any strides and dtype as blocks of T (double, float, int64 or bool). The object contains a buffer
/// of block_size elements, on the stack of its thread.
template <class T>
class BlockReader {
public:
    explicit BlockReader(const Tensor& x) : BlockReader(x, one_operand(x), 0) {}
    /// Reads operand number `operand` of several that are traversed together: see merge_axes().
    BlockReader(const Tensor& x, const MergedAxes& axes, std::size_t operand)
        : base_(static_cast<const std::byte*>(x.raw_data())),
          dtype_(x.dtype()),
          element_(size_of(x.dtype())),
          cursor_(axes.sizes, axes.strides[operand]) {}

    /// Elements [first, first + n) in row-major order, n <= block_size; valid until the next call.
    const T* read(std::int64_t first, std::int64_t n) {
        if (dtype_ == dtype_of<T>() && cursor_.is_dense(first, n))
            return reinterpret_cast<const T*>(base_) + cursor_.offset_of(first);
        if (cursor_.is_constant()) {
            if (filled_ < n) {
                convert_to(buffer_.data(), base_, dtype_, 0, n);
                filled_ = n;
            }
            return buffer_.data();
        }
        T* to = buffer_.data();
        cursor_.for_each_run(first, n, [&](std::int64_t offset, std::int64_t stride, std::int64_t length) {
            convert_to(to, base_ + offset * element_, dtype_, stride, length);
            to += length;
        });
        return buffer_.data();
    }

private:
    static MergedAxes one_operand(const Tensor& x) {
        const Tensor* operand = &x;
        return merge_axes(std::span(&operand, 1));
    }

    const std::byte* base_;
    DType dtype_;
    std::int64_t element_;
    Cursor cursor_;
    std::int64_t filled_ = 0;  // how much of the buffer is filled with the value of a constant operand
    alignas(64) std::array<T, block_size> buffer_;
};

/// Writes a tensor of any strides and dtype as consecutive blocks of T:
/// `T* to = writer.begin(first, n); ...; writer.end();`
template <class T>
class BlockWriter {
public:
    explicit BlockWriter(Tensor& y) : BlockWriter(y, one_operand(y), 0) {}
    BlockWriter(Tensor& y, const MergedAxes& axes, std::size_t operand)
        : base_(static_cast<std::byte*>(y.raw_data())),
          dtype_(y.dtype()),
          element_(size_of(y.dtype())),
          cursor_(axes.sizes, axes.strides[operand]) {}

    /// Returns where to write elements [first, first + n), n <= block_size. The content is undefined.
    T* begin(std::int64_t first, std::int64_t n) {
        first_ = first;
        if (dtype_ == dtype_of<T>() && cursor_.is_dense(first, n)) {
            buffered_ = 0;
            return reinterpret_cast<T*>(base_) + cursor_.offset_of(first);
        }
        buffered_ = n;
        return buffer_.data();
    }
    /// Stores what was written since begin() in the tensor.
    void end() {
        if (buffered_ == 0) return;
        const T* from = buffer_.data();
        cursor_.for_each_run(first_, buffered_,
                             [&](std::int64_t offset, std::int64_t stride, std::int64_t length) {
                                 convert_from(from, base_ + offset * element_, dtype_, stride, length);
                                 from += length;
                             });
    }

private:
    static MergedAxes one_operand(const Tensor& y) {
        const Tensor* operand = &y;
        return merge_axes(std::span(&operand, 1));
    }

    std::byte* base_;
    DType dtype_;
    std::int64_t element_;
    Cursor cursor_;
    std::int64_t first_ = 0;
    std::int64_t buffered_ = 0;
    alignas(64) std::array<T, block_size> buffer_;
};

/// Element-wise kernels: see the top of this file.
template <class Out, class... In>
struct BlockMap {
    template <class>
    using TensorFor = Tensor;

    /// All tensors have the shape of y. Calls body(Out* y, const In* x..., n) for every block, on all threads.
    template <class Body>
    static void run(Tensor& y, const TensorFor<In>&... x, Body&& body) {
        run_at(y, x..., [&](std::int64_t, auto... arguments) { body(arguments...); });
    }

    /// The same; body also receives the row-major position of the block's first element: body(first, y, x..., n).
    template <class Body>
    static void run_at(Tensor& y, const TensorFor<In>&... x, Body&& body) {
        const std::array<const Tensor*, 1 + sizeof...(In)> operands{&y, &x...};
        const MergedAxes axes = merge_axes(operands);
        parallel_for(y.count(), piece_size, [&](std::int64_t begin, std::int64_t end) {
            run_piece(y, operands, axes, begin, end, body, std::index_sequence_for<In...>{});
        });
    }

private:
    template <class Body, std::size_t... I>
    static void run_piece(Tensor& y, const std::array<const Tensor*, 1 + sizeof...(In)>& operands,
                          const MergedAxes& axes, std::int64_t begin, std::int64_t end, Body& body,
                          std::index_sequence<I...>) {
        run_blocks(begin, end, body, BlockWriter<Out>(y, axes, 0),
                   BlockReader<In>(*operands[I + 1], axes, I + 1)...);
    }

    template <class Body>
    static void run_blocks(std::int64_t begin, std::int64_t end, Body& body, BlockWriter<Out>&& writer,
                           BlockReader<In>&&... readers) {
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t n = std::min(block_size, end - first);
            Out* to = writer.begin(first, n);
            body(first, to, readers.read(first, n)..., n);
            writer.end();
        }
    }
};

}  // namespace potluck::cpu
