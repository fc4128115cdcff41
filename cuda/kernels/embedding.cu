// Selecting rows of a table, and adding gradients to them.
//
// Forward: a block is blockDim.x threads along a row and blockDim.y rows high; where the addresses allow it a thread
// moves 16 bytes. Backward: the positions are sorted by their id (radix_sort.h), so that those of the same id are
// adjacent and in order. Then each (row of the table, column) belongs to one thread, which adds its gradients in that
// order and in f64, and rounds once: no atomics, the same bits every time, and the same as on the CPU.

#include <bit>
#include <optional>

#include "core/format.h"
#include "core/kernel_errors.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/index_check.h"
#include "cuda/kernels/numbers.h"
#include "cuda/kernels/radix_sort.h"
#include "cuda/kernels/table_offset.h"

namespace potluck::cuda {
namespace {

/// Threads along a row of `width` units, and enough rows to fill a block of 256.
dim3 row_shape(std::int64_t width) {
    unsigned along = 1;
    while (along < 256 && along < width) along *= 2;
    return {along, 256 / along};
}

/// Throws the Error for the id at `position`.
void tell(const Tensor& ids, std::int64_t position, std::int64_t rows) {
    const auto id = ids.alias({}, {}, ids.offset() + position).item<std::int64_t>();
    if (id < 0 || id >= rows)
        throw bad_index("embedding", "id", ids.shape(), position, id, rows,
                        fmt::format("the {} rows of the weight", rows));
}
FaultReporter reporter(const Tensor& ids, std::int64_t rows) {
    return [ids, rows](std::int64_t position) { tell(ids, position, rows); };
}

/// Unit is any type of that size: only bits are moved. Strides and width count units. Floor: reads the ids, reads and
/// writes each element of y once.
template <class Unit>
__global__ void __launch_bounds__(256)
    embedding_kernel(const Unit* weight, TableStrides strides, std::int64_t rows, const std::int64_t* ids,
                     std::int64_t count, std::int64_t width, Unit* y, unsigned long long* fault_slot) {
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < count;
         i += static_cast<std::int64_t>(gridDim.x) * blockDim.y) {
        const std::int64_t id = ids[i];
        if (id < 0 || id >= rows) {
            if (threadIdx.x == 0) atomicMin(fault_slot, static_cast<unsigned long long>(i));
            for (std::int64_t column = threadIdx.x; column < width; column += blockDim.x)
                y[i * width + column] = Unit{};
            continue;
        }
        for (std::int64_t column = threadIdx.x; column < width; column += blockDim.x)
            y[i * width + column] = weight[table_offset(id, column, strides)];
    }
}

template <class Unit>
void embedding(KernelDevice& backend, const Tensor& weight, const Tensor& ids, Tensor& y) {
    const std::int64_t count = ids.count();
    const std::int64_t element = size_of(weight.dtype());
    const auto unit = static_cast<std::int64_t>(sizeof(Unit));
    const std::int64_t width = weight.size(1) * element / unit;
    const TableStrides strides{weight.strides()[0] * element / unit,
                               unit == element ? weight.strides()[1] : 1};
    const dim3 block = row_shape(width);
    launch(&embedding_kernel<Unit>, blocks_for(count, block.y), block, 0, backend.stream(),
           static_cast<const Unit*>(weight.raw_data()), strides, weight.size(0),
           elements_of<std::int64_t>(ids), count, width, static_cast<Unit*>(y.raw_data()),
           backend.fault_slot(reporter(ids, weight.size(0))));
}

/// Whether rows can be moved 16 bytes at a time.
bool moves_in_packs(const Tensor& weight, const Tensor& y) {
    const std::int64_t element = size_of(weight.dtype());
    const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
    return weight.strides()[1] == 1 && weight.size(1) * element % 16 == 0 &&
           weight.strides()[0] * element % 16 == 0 && is_aligned(weight.raw_data()) &&
           is_aligned(y.raw_data());
}

constexpr int added_at_once = 8;  // gradients that a thread loads before it adds them, to overlap the loads

/// The threads at the first place of an id add all gradients of its row. Floor: reads dy once, reads and writes the rows
/// that occur, one addition an element.
template <class T, class Sum>
__global__ void __launch_bounds__(256)
    embedding_backward_kernel(const std::uint64_t* ids, const std::int64_t* positions, std::int64_t count,
                              std::int64_t rows, const T* dy, TableStrides dy_strides, std::int64_t width,
                              Sum* dweight, TableStrides dweight_strides) {
    const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (place >= count) return;
    const std::uint64_t id = ids[place];
    if (id >= static_cast<std::uint64_t>(rows) || (place > 0 && ids[place - 1] == id)) return;
    for (std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
         column < width; column += static_cast<std::int64_t>(gridDim.y) * blockDim.x) {
        Sum* to = dweight + table_offset(static_cast<std::int64_t>(id), column, dweight_strides);
        auto sum = static_cast<double>(to_compute(*to));
        bool more = true;
        for (std::int64_t i = place; more; i += added_at_once) {
            bool same[added_at_once];
            double values[added_at_once];
            for (int j = 0; j < added_at_once; ++j) {
                same[j] = i + j < count && ids[i + j] == id;
                values[j] = same[j] ? static_cast<double>(
                                          to_compute(dy[table_offset(positions[i + j], column, dy_strides)]))
                                    : 0.0;
            }
            for (int j = 0; j < added_at_once; ++j)
                if (same[j]) sum += values[j];
            more = same[added_at_once - 1];
        }
        *to = from_compute<Sum>(static_cast<compute_type<Sum>>(sum));
    }
}

}  // namespace

void embedding(KernelDevice& device, const Tensor& weight, const Tensor& ids, Tensor& y) {
    if (ids.count() == 0) return;
    const Tensor indices = contiguous(device, ids, DType::i64);
    if (moves_in_packs(weight, y)) {
        embedding<uint4>(device, weight, indices, y);
    } else {
        switch (size_of(weight.dtype())) {
            case 1:
                embedding<std::uint8_t>(device, weight, indices, y);
                break;
            case 2:
                embedding<std::uint16_t>(device, weight, indices, y);
                break;
            case 4:
                embedding<std::uint32_t>(device, weight, indices, y);
                break;
            default:
                embedding<std::uint64_t>(device, weight, indices, y);
        }
    }
}

void embedding_backward(KernelDevice& device, const Tensor& ids, const Tensor& dy, Tensor& dweight) {
    const std::int64_t count = ids.count();
    const std::int64_t rows = dweight.size(0);
    const std::int64_t width = dweight.size(1);
    if (count == 0) return;
    const cudaStream_t queue = device.stream();
    const Tensor indices = contiguous(device, ids, DType::i64);
    const bool widens = potluck::is_half(dy.dtype()) && dweight.dtype() == DType::f32;
    const Tensor gradients =
        widens || dy.dtype() == dweight.dtype() ? dy : contiguous(device, dy, dweight.dtype());
    // The ids are the sort keys: a bad id is replaced by `rows`, which the kernel ignores.
    const Tensor checked = checked_indices(device, indices, rows, reporter(indices, rows));
    if (width == 0) return;
    const SortedRows sorted =
        sort_rows<std::uint64_t>(checked.alias({1, count}, {count, 1}, checked.offset()),
                                 static_cast<int>(std::bit_width(static_cast<std::uint64_t>(rows))), queue);
    const dim3 block = row_shape(width);
    const dim3 grid(blocks_for(count, block.y), blocks_for(width, block.x, 65535));
    visit_device_floating(gradients.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const auto add_to = [&](auto* sums) {
            launch(&embedding_backward_kernel<T, std::remove_pointer_t<decltype(sums)>>, grid, block, 0,
                   queue, elements_of<std::uint64_t>(sorted.keys),
                   elements_of<std::int64_t>(sorted.positions), count, rows, elements_of<T>(gradients),
                   TableStrides{gradients.strides()[0], gradients.strides()[1]}, width, sums,
                   TableStrides{dweight.strides()[0], dweight.strides()[1]});
        };
        if constexpr (is_half<T>) {
            if (dweight.dtype() == DType::f32) return add_to(elements_of<float>(dweight));
        }
        add_to(elements_of<T>(dweight));
    });
}

}  // namespace potluck::cuda
