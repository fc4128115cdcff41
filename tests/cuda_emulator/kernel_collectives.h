#pragma once

// The collective operations of the threads of a block and the lanes of a warp.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace potluck::emulator {

enum class Barrier : std::uint8_t { plain, count, all, any };
/// Waits until all threads of the block have called it with the same kind; returns the sum of their predicates (0 or
/// 1).
int barrier(Barrier kind, bool predicate);

enum class Shuffle : std::uint8_t { index, up, down, exclusive_or };
/// 8 bytes of the lane that `operand` selects, by the rules of the PTX instruction shfl.sync.
std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, unsigned operand, int width);

/// The lanes of `mask` whose predicate is true.
unsigned ballot(unsigned mask, bool predicate);
enum class Fold : std::uint8_t { add, minimum, maximum, bit_and, bit_or, bit_xor };
/// The reduction of 32-bit values over the lanes of `mask`.
unsigned fold(Fold kind, unsigned mask, unsigned value, bool is_signed);
/// The lanes of `mask` with the same bits.
unsigned match(unsigned mask, std::uint64_t bits);
/// Waits for the lanes of `mask`, and orders their accesses to memory.
void synchronize_warp(unsigned mask);
unsigned active_lanes();
[[noreturn]] void trap();

/// The types that CUDA's shuffles accept.
template <class T>
concept Shuffled =
    (std::is_arithmetic_v<T> && sizeof(T) >= 4) || std::same_as<T, __half> || std::same_as<T, __half2> ||
    std::same_as<T, __nv_bfloat16> || std::same_as<T, __nv_bfloat162>;

template <class T>
T shuffle_value(Shuffle kind, unsigned mask, T value, unsigned operand, int width) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle(kind, mask, bits, operand, width);
    std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
    return value;
}

}  // namespace potluck::emulator

inline void __syncthreads() { potluck::emulator::barrier(potluck::emulator::Barrier::plain, false); }
inline int __syncthreads_count(int predicate) {
    return potluck::emulator::barrier(potluck::emulator::Barrier::count, predicate != 0);
}
inline int __syncthreads_and(int predicate) {
    return potluck::emulator::barrier(potluck::emulator::Barrier::all, predicate == 0) == 0 ? 1 : 0;
}
inline int __syncthreads_or(int predicate) {
    return potluck::emulator::barrier(potluck::emulator::Barrier::any, predicate != 0) != 0 ? 1 : 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { potluck::emulator::synchronize_warp(mask); }

template <potluck::emulator::Shuffled T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return potluck::emulator::shuffle_value(potluck::emulator::Shuffle::index, mask, value,
                                            static_cast<unsigned>(lane), width);
}
template <potluck::emulator::Shuffled T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return potluck::emulator::shuffle_value(potluck::emulator::Shuffle::up, mask, value, delta, width);
}
template <potluck::emulator::Shuffled T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return potluck::emulator::shuffle_value(potluck::emulator::Shuffle::down, mask, value, delta, width);
}
template <potluck::emulator::Shuffled T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    return potluck::emulator::shuffle_value(potluck::emulator::Shuffle::exclusive_or, mask, value,
                                            static_cast<unsigned>(lane_mask), width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return potluck::emulator::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
    return potluck::emulator::ballot(mask, predicate != 0) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return potluck::emulator::ballot(mask, predicate == 0) == 0 ? 1 : 0;
}
inline unsigned __activemask() { return potluck::emulator::active_lanes(); }
template <class T>
requires std::is_arithmetic_v<T>
unsigned __match_any_sync(unsigned mask, T value) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return potluck::emulator::match(mask, bits);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::add, mask, value, false);
}
inline int __reduce_add_sync(unsigned mask, int value) {
    return static_cast<int>(
        potluck::emulator::fold(potluck::emulator::Fold::add, mask, static_cast<unsigned>(value), true));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::minimum, mask, value, false);
}
inline int __reduce_min_sync(unsigned mask, int value) {
    return static_cast<int>(
        potluck::emulator::fold(potluck::emulator::Fold::minimum, mask, static_cast<unsigned>(value), true));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::maximum, mask, value, false);
}
inline int __reduce_max_sync(unsigned mask, int value) {
    return static_cast<int>(
        potluck::emulator::fold(potluck::emulator::Fold::maximum, mask, static_cast<unsigned>(value), true));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::bit_and, mask, value, false);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::bit_or, mask, value, false);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
    return potluck::emulator::fold(potluck::emulator::Fold::bit_xor, mask, value, false);
}

[[noreturn]] inline void __trap() { potluck::emulator::trap(); }
