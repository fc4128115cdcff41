// Copies between any strides and any two dtypes, and fills. There are three ways:
//
//   straight   the same dtype and both contiguous in memory order: the runtime's own copy
//   turned     source and target are dense along different axes (a transpose): one block moves a tile of 32 x 32
//   elements
//              through shared memory, so that it reads whole rows of the source and writes whole rows of the target
//   all else   element by element, as in element_map.h: one pack of 16 bytes per thread where the strides allow it
//
// First the axes are sorted by the target's order in memory, so that a copy between two transposed tensors becomes a
// straight one. Elements of equal dtypes are moved as words of their size.

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "core/cpu/convert.h"
#include "core/format.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/convert.h"
#include "cuda/kernels/element_map.h"

namespace potluck::cuda {
namespace {

// Floor: sizeof(From) + sizeof(To) bytes an element.
struct Convert {
    template <int N, class To, class From>
    __device__ void operator()(std::int64_t, Pack<To, N>& y, const Pack<From, N>& x) const {
        for (int i = 0; i < N; ++i) y.values[i] = convert_element<To>(x.values[i]);
    }
};

// Floor: sizeof(Word) bytes an element, written.
template <class Word>
struct Fill {
    Word word;
    template <int N>
    __device__ void operator()(std::int64_t, Pack<Word, N>& y) const {
        for (int i = 0; i < N; ++i) y.values[i] = word;
    }
};

// ---- transposes ----

constexpr int tile = 32;
constexpr int tile_rows = 8;  // of threads: each thread moves 32 / 8 elements

/// Planes of (rows, columns) elements; the source is dense along its rows, the target along its columns.
struct Transpose {
    Layout<2> planes;  // target, source
    std::int64_t rows, columns;
    std::int64_t from_row;   // from one row of the source to the next
    std::int64_t to_column;  // from one column of the target to the next
    std::int64_t row_tiles, column_tiles;
};

// Floor: 2 sizeof(Word) bytes an element. A tile has one column of padding, so that the lanes of a warp can read down a
// column without bank conflicts.
template <class Index, class Word>
__global__ void __launch_bounds__(tile* tile_rows)
    transpose_kernel(const Transpose transpose, Word* to, const Word* from) {
    __shared__ Word words[tile][tile + 1];
    const int lane = static_cast<int>(threadIdx.x);
    const std::int64_t tiles = transpose.planes.count * transpose.row_tiles * transpose.column_tiles;
    for (std::int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const auto plane_tiles = static_cast<Index>(transpose.row_tiles * transpose.column_tiles);
        const auto plane = static_cast<Index>(static_cast<Index>(index) / plane_tiles);
        const auto in_plane = static_cast<Index>(static_cast<Index>(index) - plane * plane_tiles);
        const auto row_tile = static_cast<Index>(in_plane / static_cast<Index>(transpose.column_tiles));
        const std::int64_t row = static_cast<std::int64_t>(row_tile) * tile;
        const std::int64_t column =
            static_cast<std::int64_t>(in_plane - row_tile * static_cast<Index>(transpose.column_tiles)) *
            tile;
        std::int64_t offset[2];
        transpose.planes.offsets(plane, offset);
        const Word* source = from + offset[1] + row * transpose.from_row + column;
        Word* target = to + offset[0] + column * transpose.to_column + row;
        const std::int64_t rows = transpose.rows - row;
        const std::int64_t columns = transpose.columns - column;
        for (int i = static_cast<int>(threadIdx.y); i < tile; i += tile_rows)
            if (i < rows && lane < columns) words[i][lane] = source[i * transpose.from_row + lane];
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.y); i < tile; i += tile_rows)
            if (i < columns && lane < rows) target[i * transpose.to_column + lane] = words[lane][i];
        __syncthreads();
    }
}

/// x without the axes `first` and `second`, at their first entries.
Tensor without_axes(const Tensor& x, std::size_t first, std::size_t second) {
    Shape shape;
    Strides strides;
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis)
        if (axis != first && axis != second) {
            shape.push_back(x.shape()[axis]);
            strides.push_back(x.strides()[axis]);
        }
    return x.alias(shape, strides, x.offset());
}

/// `dense` is the axis along which the source is dense; the target is dense along its last axis.
void copy_turned(cudaStream_t stream, const Tensor& from, Tensor& to, std::size_t dense) {
    const std::size_t inner = to.shape().size() - 1;
    const Tensor target_planes = without_axes(to, dense, inner);
    const Tensor source_planes = without_axes(from, dense, inner);
    Transpose transpose{.planes = layout_of<2>({&target_planes, &source_planes}),
                        .rows = to.shape()[inner],
                        .columns = to.shape()[dense],
                        .from_row = from.strides()[inner],
                        .to_column = to.strides()[dense],
                        .row_tiles = (to.shape()[inner] + tile - 1) / tile,
                        .column_tiles = (to.shape()[dense] + tile - 1) / tile};
    const std::int64_t tiles = transpose.planes.count * transpose.row_tiles * transpose.column_tiles;
    const bool narrow = tiles <= static_cast<std::int64_t>(std::numeric_limits<std::uint32_t>::max());
    visit_word(to.dtype(), [&](auto zero) {
        using Word = decltype(zero);
        launch(narrow ? transpose_kernel<std::uint32_t, Word> : transpose_kernel<std::uint64_t, Word>,
               dim3(blocks_for(tiles, 1)), dim3(tile, tile_rows), 0, stream, transpose, elements_of<Word>(to),
               static_cast<const Word*>(elements_of<Word>(from)));
    });
}

/// The axis along which the source is dense if copying by tiles is worthwhile, else the last one.
std::size_t turned_axis(const Tensor& from, const Tensor& to) {
    constexpr std::int64_t least = 4;  // entries along both axes
    const std::size_t inner = to.shape().size() - 1;
    if (to.strides()[inner] != 1 || from.strides()[inner] == 1 || from.strides()[inner] == 0 ||
        to.shape()[inner] < least)
        return inner;
    for (std::size_t axis = inner; axis-- > 0;)
        if (from.strides()[axis] == 1 && to.shape()[axis] >= least) return axis;
    return inner;
}

// ---- choosing ----

/// Sorts the axes by the target's memory, from the slowest to the fastest, drops those of size 1, and merges
/// neighbouring axes where the strides of both sides allow it.
void put_in_memory_order(Tensor& from, Tensor& to) {
    std::vector<std::size_t> order(to.shape().size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        const auto key = [&](std::size_t axis) {
            return std::pair(std::abs(to.strides()[axis]), std::abs(from.strides()[axis]));
        };
        return key(a) > key(b);
    });
    Shape shape;
    Strides from_strides, to_strides;
    for (const std::size_t axis : order) {
        shape.push_back(to.shape()[axis]);
        from_strides.push_back(from.strides()[axis]);
        to_strides.push_back(to.strides()[axis]);
    }
    const Tensor ordered_from = from.alias(shape, from_strides, from.offset());
    const Tensor ordered_to = to.alias(shape, to_strides, to.offset());
    const std::array<const Tensor*, 2> both{&ordered_from, &ordered_to};
    const MergedAxes merged = merge_axes(both);
    from = from.alias(merged.sizes, merged.strides[0], from.offset());
    to = to.alias(merged.sizes, merged.strides[1], to.offset());
}

/// Both are in memory order.
void copy_ordered(cudaStream_t stream, const Tensor& from, Tensor& to) {
    if (to.ndim() > most_axes) {  // more axes than a kernel supports
        for (std::int64_t i = 0; i < to.shape()[0]; ++i) {
            const auto entry = [i](const Tensor& x) {
                return x.alias(Shape(x.shape().begin() + 1, x.shape().end()),
                               Strides(x.strides().begin() + 1, x.strides().end()),
                               x.offset() + i * x.strides()[0]);
            };
            Tensor part = entry(to);
            copy_ordered(stream, entry(from), part);
        }
        return;
    }
    if (from.dtype() != to.dtype()) {
        visit_device(to.dtype(), [&](auto to_zero) {
            visit_device(from.dtype(), [&](auto from_zero) {
                ElementMap<decltype(to_zero), decltype(from_zero)>::run(stream, Convert{}, to, from);
            });
        });
        return;
    }
    if (from.is_contiguous() && to.is_contiguous()) {
        check(cudaMemcpyAsync(to.raw_data(), from.raw_data(), static_cast<std::size_t>(to.bytes()),
                              cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
        return;
    }
    const std::size_t dense = to.ndim() == 0 ? 0 : turned_axis(from, to);
    if (dense + 1 < to.shape().size()) return copy_turned(stream, from, to, dense);
    visit_word(to.dtype(), [&](auto zero) {
        using Word = decltype(zero);
        ElementMap<Word, Word>::run(stream, Convert{}, to, from);
    });
}

}  // namespace

void copy(KernelDevice& device, const Tensor& from, Tensor& to) {
    if (from.shape() != to.shape())
        throw Error("copy",
                    fmt::format("shapes differ: {} into {}.", pretty(from.shape()), pretty(to.shape())));
    if (to.count() == 0) return;
    Tensor source = from;
    Tensor target = to;
    put_in_memory_order(source, target);
    copy_ordered(device.stream(), source, target);
}

void fill(KernelDevice& device, Tensor& to, const Scalar& value) {
    // One element of the target's dtype; its bytes are repeated.
    std::uint64_t element = 0;
    if (value.is_floating()) {
        const double number = value.to_double();
        cpu::convert(&number, DType::f64, 1, &element, to.dtype(), 1, 1);
    } else {
        const std::int64_t number = value.to_int64();
        cpu::convert(&number, DType::i64, 1, &element, to.dtype(), 1, 1);
    }
    visit_word(to.dtype(), [&](auto zero) {
        using Word = decltype(zero);
        // Little endian, as every machine with a CUDA device is.
        ElementMap<Word>::run(device.stream(), Fill<Word>{static_cast<Word>(element)}, to);
    });
}

}  // namespace potluck::cuda
