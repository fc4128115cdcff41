#pragma once

// The traversal of every kernel that works element by element. A kernel is a body; ElementMap passes it the operands:
//
//     struct AddBody {
//         template <int N>
//         __device__ void operator()(std::int64_t first, Pack<float, N>& y, const Pack<float, N>& a,
//                                    const Pack<float, N>& b) const {
//             for (int i = 0; i < N; ++i) y.values[i] = a.values[i] + b.values[i];
//         }
//     };
//     ElementMap<float, float, float>::run(stream, AddBody{}, y, a, b);
//
// One thread processes one pack of adjacent elements at a time, loaded and stored by 16-byte instructions (for the
// widest operand), and the next thread the next pack, so that the accesses of a warp are coalesced. An operand that is
// constant along the innermost axis is loaded once per pack. Where strides or addresses do not allow packs, a thread
// processes single elements. A body can use `first`, the row-major position of the pack's first element.
//
// Floor: every operand is moved once, sizeof(element) bytes an element; a broadcast one only its own elements.

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "cuda/kernels/layout.h"
#include "cuda/kernels/numbers.h"

namespace potluck::cuda {

namespace detail {

inline constexpr int map_threads = 256;

/// A layout in units of packs: strides are still counted in elements, so that one step along the innermost axis is a
/// whole pack (or 0, for an operand that is constant along it).
template <int Operands>
struct PackedLayout {
    Layout<Operands> layout;
    std::int64_t rest = 0;  // elements after the last pack; only with a single axis
    unsigned repeated = 0;  // bit i: operand i is constant within a pack
};

template <int N, class T>
__device__ Pack<T, N> load_pack(const T* from, bool repeated) {
    if (N == 1 || !repeated) return *reinterpret_cast<const Pack<T, N>*>(from);
    Pack<T, N> pack;
    const T value = *from;
    for (int i = 0; i < N; ++i) pack.values[i] = value;
    return pack;
}

template <int N, class Body, class Out, class... In>
__device__ void run_body(const Body& body, std::int64_t first, Out* y, const Pack<In, N>&... x) {
    Pack<Out, N> result;
    body(first, result, x...);
    *reinterpret_cast<Pack<Out, N>*>(y) = result;
}

template <int N, class Body, class Out, class... In>
__device__ void map_one(const Body& body, std::int64_t first, unsigned repeated,
                        const std::int64_t (&offset)[1 + sizeof...(In)], Out* y, const In*... x) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        run_body<N, Body, Out, In...>(body, first, y + offset[0],
                                      load_pack<N>(x + offset[I + 1], (repeated >> (I + 1) & 1u) != 0)...);
    }
    (std::make_integer_sequence<int, static_cast<int>(sizeof...(In))>{});
}

template <class Index, int N, class Body, class Out, class... In>
__global__ void __launch_bounds__(map_threads)
    map_kernel(const __grid_constant__ PackedLayout<1 + sizeof...(In)> packed,
               const __grid_constant__ Body body, Out* y, const In*... x) {
    constexpr int operands = 1 + sizeof...(In);
    std::int64_t offset[operands];
    for (std::int64_t step = global_thread(); step < packed.layout.count; step += global_threads()) {
        packed.layout.offsets(static_cast<Index>(step), offset);
        map_one<N>(body, step * N, packed.repeated, offset, y, x...);
    }
    if (N > 1 && global_thread() < packed.rest) {
        const std::int64_t position = packed.layout.count * N + global_thread();
        for (int operand = 0; operand < operands; ++operand)
            offset[operand] = (packed.repeated >> operand & 1u) != 0 ? 0 : position;
        map_one<1>(body, position, 0, offset, y, x...);
    }
}

/// The traversal in packs of N, if the strides and address of every operand allow it. `pack_bytes` is the size of each
/// operand's pack.
template <int N, int Operands>
bool find_packs(const Layout<Operands>& layout, const std::array<std::uintptr_t, Operands>& addresses,
                const std::array<std::size_t, Operands>& pack_bytes, PackedLayout<Operands>& packed) {
    if (layout.axes == 0) return false;
    const int inner = layout.axes - 1;
    if (inner > 0 && layout.sizes[inner] % N != 0) return false;
    packed = {layout, layout.sizes[inner] % N, 0};
    packed.layout.sizes[inner] /= N;
    packed.layout.count /= N;
    for (int operand = 0; operand < Operands; ++operand) {
        const auto i = static_cast<std::size_t>(operand);
        std::int64_t* strides = packed.layout.strides[operand];
        if (strides[inner] == 0) {
            packed.repeated |= 1u << operand;
            continue;
        }
        if (strides[inner] != 1 || addresses[i] % pack_bytes[i] != 0) return false;
        for (int axis = 0; axis < inner; ++axis)
            if (strides[axis] % N != 0) return false;
        strides[inner] = N;
    }
    return true;
}

}  // namespace detail

/// Element-wise kernels: see the top of this file. Out and In are the element types of y and of each input. (Copies use
/// words of the element's size instead of the dtype.)
template <class Out, class... In>
class ElementMap {
    template <class>
    using TensorFor = Tensor;

public:
    /// Runs `body` over all elements. All tensors have the shape of y, with any strides; y may be one of the inputs.
    /// Positions are divided in type Index if they fit, else in 64 bits. Throws Error if more than most_axes axes
    /// remain after merging.
    template <class Index = std::uint32_t, class Body>
    static void run(cudaStream_t stream, const Body& body, Tensor& y, const TensorFor<In>&... x) {
        if (y.count() == 0) return;
        const auto layout = layout_of<operands>({&y, &x...});
        detail::PackedLayout<operands> packed;
        const bool packs = detail::find_packs<pack>(layout,
                                                    {reinterpret_cast<std::uintptr_t>(y.raw_data()),
                                                     reinterpret_cast<std::uintptr_t>(x.raw_data())...},
                                                    {sizeof(Out) * pack, sizeof(In) * pack...}, packed);
        if (!packs) packed = {layout, 0, 0};
        const bool fits = packed.layout.template fits<Index>();
        const auto start = [&](auto kernel) {
            const unsigned blocks =
                blocks_for(std::max(packed.layout.count, packed.rest), detail::map_threads);
            launch(kernel, dim3(blocks), dim3(detail::map_threads), 0, stream, packed, body,
                   elements_of<Out>(y), static_cast<const In*>(elements_of<In>(x))...);
        };
        if (packs && fits)
            start(detail::map_kernel<Index, pack, Body, Out, In...>);
        else if (packs)
            start(detail::map_kernel<std::uint64_t, pack, Body, Out, In...>);
        else if (fits)
            start(detail::map_kernel<Index, 1, Body, Out, In...>);
        else
            start(detail::map_kernel<std::uint64_t, 1, Body, Out, In...>);
    }

private:
    static constexpr int operands = 1 + sizeof...(In);
    static constexpr int pack = static_cast<int>(16 / std::max({sizeof(Out), sizeof(In)...}));
};

}  // namespace potluck::cuda
