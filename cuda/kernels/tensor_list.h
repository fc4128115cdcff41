#pragma once

// Many tensors in one launch. A table of tensors travels with the launch, by value in the kernel's parameters, so that no
// copy to the device comes before it. Each tensor is cut into chunks, each chunk is one block's: the block finds its
// tensor by a binary search in the table. In a chunk every thread takes packs of four neighbours, one pack of the whole
// block beside the other, so that a warp reads and writes straight stretches. Dtypes are looked up once for a pack (see
// any_element.h): one launch serves parameters of f32, f16 and bf16.

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/kernel_specs.h"
#include "core/update_control.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/any_element.h"

namespace potluck::cuda::tensor_list {

inline constexpr int threads = 256;
inline constexpr int pack = 4;                     // elements that a thread takes at a time
inline constexpr std::int64_t chunk = 1 << 14;     // elements of a block: 16 packs a thread
inline constexpr int most_tensors = 44;            // of one launch
inline constexpr int most_parameter_bytes = 4096;  // of one launch, on every card

/// One tensor of a launch. What a kernel does not use is left empty.
struct Entry {
    void* parameter = nullptr;
    const void* gradient = nullptr;
    void* first_moment = nullptr;  // of SGD: the momentum
    void* second_moment = nullptr;
    void* rounded = nullptr;
    std::int64_t count = 0;
    RandomKey rounding_key{};
    std::int64_t rounding_first = 0;  // which element of the key's stretch decides element 0
    int first_block = 0;
    DType parameter_dtype = DType::f32, gradient_dtype = DType::f32, rounded_dtype = DType::f32;
    bool packs = false;  // every address, and the place of the random numbers, allows packs
};

struct Table {
    int tensors = 0;
    int blocks = 0;
    Entry entries[most_tensors];
};

/// The chunk of this block: elements [begin, end) of a tensor of the table. Those before `packs_end` come in packs.
struct Chunk {
    int tensor;
    std::int64_t begin, packs_end, end;
};
__device__ inline Chunk chunk_of_block(const Table& table) {
    const int block = static_cast<int>(blockIdx.x);
    int low = 0;
    int high = table.tensors;  // the tensor lies in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.entries[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    const Entry& entry = table.entries[low];
    const std::int64_t begin = (block - entry.first_block) * chunk;
    const std::int64_t end = begin + chunk < entry.count ? begin + chunk : entry.count;
    return {low, begin, entry.packs ? end - end % pack : begin, end};
}

/// Calls body(std::integral_constant<int, N>, first) for all packs of the chunk (N = 4) and for the elements left (N = 1).
template <class Body>
__device__ void for_each_pack(const Chunk& chunk_, Body body) {
    const auto thread = static_cast<std::int64_t>(threadIdx.x);
    for (std::int64_t i = chunk_.begin + thread * pack; i < chunk_.packs_end; i += threads * pack)
        body(std::integral_constant<int, pack>{}, i);
    for (std::int64_t i = chunk_.packs_end + thread; i < chunk_.end; i += threads)
        body(std::integral_constant<int, 1>{}, i);
}

/// Cuts a list of tensors into tables of what one launch takes. Empty tensors are left out.
inline std::vector<Table> tables_of(const std::vector<Entry>& entries) {
    std::vector<Table> tables;
    for (Entry entry : entries) {
        if (entry.count == 0) continue;
        if (tables.empty() || tables.back().tensors == most_tensors) tables.emplace_back();
        Table& table = tables.back();
        entry.first_block = table.blocks;
        table.blocks += static_cast<int>(blocks_for(entry.count, chunk));
        table.entries[table.tensors++] = entry;
    }
    return tables;
}

inline Entry entry_of(const UpdateTensors& tensors) {
    Entry entry;
    const Tensor& parameter = tensors.parameter;
    // The random numbers of a bf16 parameter's pack are one block of the key's stretch.
    entry.packs =
        !parameter.defined() || parameter.dtype() != DType::bf16 || tensors.rounding_first % pack == 0;
    const auto address = [&](const Tensor& x) -> void* {
        if (!x.defined()) return nullptr;
        entry.packs = entry.packs && is_aligned_for_any<pack>(x.raw_data(), x.dtype());
        return x.raw_data();
    };
    entry.parameter = address(parameter);
    entry.gradient = address(tensors.gradient);
    entry.first_moment = address(tensors.first_moment_or_none);
    entry.second_moment = address(tensors.second_moment_or_none);
    entry.rounded = address(tensors.rounded_or_none);
    entry.count = tensors.gradient.count();
    entry.rounding_key = tensors.rounding_key;
    entry.rounding_first = tensors.rounding_first;
    entry.gradient_dtype = tensors.gradient.dtype();
    if (parameter.defined()) entry.parameter_dtype = parameter.dtype();
    if (tensors.rounded_or_none.defined()) entry.rounded_dtype = tensors.rounded_or_none.dtype();
    return entry;
}

/// What stands in the control of an update; nullptr without one.
inline UpdateNumbers* numbers_of(const Tensor& control_or_none) {
    return control_or_none.defined() ? reinterpret_cast<UpdateNumbers*>(elements_of<double>(control_or_none))
                                     : nullptr;
}

}  // namespace potluck::cuda::tensor_list
