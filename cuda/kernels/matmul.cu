// Products of integers. A block of 16 x 16 threads computes one tile of 16 x 16 elements of y, one element per thread:
// it iterates along the inner axis in steps of 16 and each time loads one tile of a and one of b into shared memory,
// from where every element is read 16 times. The grid has one block per tile of y (in x) and per matrix (in z).
//
// With these tiles a is read n / 16 times and b m / 16 times. Integer products are for indices and counts, not for
// training, so this is fast enough.

#include "cuda/kernels/matmul.h"

#include <algorithm>

#include "cuda/kernels/layout.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {
namespace {

constexpr int tile = 16;

/// Sizes and strides, in elements, of one product.
struct Product {
    std::int64_t m, n, k;
    std::int64_t a_row, a_column, b_row, b_column;
    std::int64_t column_tiles;
    bool accumulate;
};

// Unsigned arithmetic wraps around where signed would be undefined.
// Floor: m n k multiplications in 64 bits; reads a and b once each and writes y once ((m k + k n + m n) sizeof(T) bytes).
template <class T>
__global__ void __launch_bounds__(tile* tile)
    multiply(const T* a, const T* b, T* y, Product p, Layout<2> batches) {
    __shared__ T a_tile[tile][tile + 1];  // padding avoids bank conflicts
    __shared__ T b_tile[tile][tile + 1];
    const int i = static_cast<int>(threadIdx.y), j = static_cast<int>(threadIdx.x);
    const std::int64_t tile_index = blockIdx.x;
    const std::int64_t row = tile_index / p.column_tiles * tile + i;
    const std::int64_t column = tile_index % p.column_tiles * tile + j;
    for (std::int64_t batch = blockIdx.z; batch < batches.count; batch += gridDim.z) {
        std::int64_t offset[2];
        batches.offsets(batch, offset);
        const T* a_matrix = a + offset[0];
        const T* b_matrix = b + offset[1];
        std::uint64_t sum = 0;
        for (std::int64_t first = 0; first < p.k; first += tile) {
            a_tile[i][j] =
                row < p.m && first + j < p.k ? a_matrix[row * p.a_row + (first + j) * p.a_column] : T{0};
            b_tile[i][j] = first + i < p.k && column < p.n
                               ? b_matrix[(first + i) * p.b_row + column * p.b_column]
                               : T{0};
            __syncthreads();
            for (int inner = 0; inner < tile; ++inner)
                sum += static_cast<std::uint64_t>(a_tile[i][inner]) *
                       static_cast<std::uint64_t>(b_tile[inner][j]);
            __syncthreads();
        }
        if (row < p.m && column < p.n) {
            T& target = y[(batch * p.m + row) * p.n + column];
            if (p.accumulate) sum += static_cast<std::uint64_t>(target);
            target = static_cast<T>(sum);
        }
    }
}

/// The batch axes alone, at the first element of each matrix.
Tensor batch_axes(const Tensor& x) {
    return x.alias(Shape(x.shape().begin(), x.shape().end() - 2),
                   Strides(x.strides().begin(), x.strides().end() - 2), x.offset());
}

}  // namespace

void integer_matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate, cudaStream_t stream) {
    const auto axis = static_cast<std::size_t>(y.ndim() - 2);
    Product p{y.size(-2),
              y.size(-1),
              a.size(-1),
              a.strides()[axis],
              a.strides()[axis + 1],
              b.strides()[axis],
              b.strides()[axis + 1],
              (y.size(-1) + tile - 1) / tile,
              accumulate};
    const Tensor a_batches = batch_axes(a), b_batches = batch_axes(b);
    const Layout<2> batches = layout_of<2>({&a_batches, &b_batches});
    const std::int64_t tiles = (p.m + tile - 1) / tile * p.column_tiles;
    const dim3 grid(static_cast<unsigned>(tiles), 1,
                    static_cast<unsigned>(std::min<std::int64_t>(batches.count, 65535)));
    visit_device(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
            launch(multiply<T>, grid, dim3(tile, tile), 0, stream, elements_of<T>(a), elements_of<T>(b),
                   elements_of<T>(y), p, batches);
    });
}

}  // namespace potluck::cuda
