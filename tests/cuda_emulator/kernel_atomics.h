#pragma once

// Atomic functions, fences and loads with cache hints. Thread blocks run on several host threads, so the atomics are
// real.

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace potluck::emulator {

/// Checks an atomic access like a plain one, except that it does not race with other atomics.
void check_atomic(const void* address, std::size_t bytes);

/// Orders all accesses of this thread. Kernels with fences are not checked for races in device memory.
void fence();

/// Computes `*address = combine(*address)` atomically; returns the value before.
template <class T, class Combine>
T atomic_update(T* address, Combine combine) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    using Bits = std::conditional_t<sizeof(T) == 4, unsigned, unsigned long long>;
    check_atomic(address, sizeof(T));
    auto* bits = reinterpret_cast<Bits*>(address);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
    for (;;) {
        T value;
        std::memcpy(static_cast<void*>(&value), &before, sizeof(T));
        const T after = combine(value);
        Bits after_bits;
        std::memcpy(&after_bits, &after, sizeof(T));
        if (__atomic_compare_exchange_n(bits, &before, after_bits, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return value;
    }
}

/// The integer types of CUDA's atomics.
template <class T>
concept AtomicInteger = std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, long long>;

}  // namespace potluck::emulator

template <class T>
requires(potluck::emulator::AtomicInteger<T> && !std::is_same_v<T, long long>) || std::is_same_v<T, float> ||
    std::is_same_v<T, double> T atomicAdd(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address,
                                            [&](T before) { return static_cast<T>(before + value); });
}
inline int atomicSub(int* address, int value) {
    return potluck::emulator::atomic_update(address, [&](int before) { return before - value; });
}
inline unsigned atomicSub(unsigned* address, unsigned value) {
    return potluck::emulator::atomic_update(address, [&](unsigned before) { return before - value; });
}
template <potluck::emulator::AtomicInteger T>
T atomicMin(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address,
                                            [&](T before) { return value < before ? value : before; });
}
template <potluck::emulator::AtomicInteger T>
T atomicMax(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address,
                                            [&](T before) { return before < value ? value : before; });
}
template <potluck::emulator::AtomicInteger T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address, [&](T before) { return before & value; });
}
template <potluck::emulator::AtomicInteger T>
T atomicOr(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address, [&](T before) { return before | value; });
}
template <potluck::emulator::AtomicInteger T>
T atomicXor(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address, [&](T before) { return before ^ value; });
}
template <class T>
requires(potluck::emulator::AtomicInteger<T> && !std::is_same_v<T, long long>) || std::is_same_v<T, float> T
    atomicExch(T* address, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address, [&](T) { return value; });
}
template <class T>
requires(potluck::emulator::AtomicInteger<T> && !std::is_same_v<T, long long>) T
    atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
    return potluck::emulator::atomic_update(address,
                                            [&](T before) { return before == compare ? value : before; });
}
/// (before >= limit) ? 0 : before + 1.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return potluck::emulator::atomic_update(
        address, [&](unsigned before) { return before >= limit ? 0u : before + 1u; });
}

inline void __threadfence() { potluck::emulator::fence(); }
inline void __threadfence_block() { potluck::emulator::fence(); }
inline void __threadfence_system() { potluck::emulator::fence(); }

// Loads and stores with cache hints are plain ones here.
template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcg(const T* address) {
    return *address;
}
template <class T>
T __ldca(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
T __ldlu(const T* address) {
    return *address;
}
template <class T>
T __ldcv(const T* address) {
    return *address;
}
template <class T>
void __stwb(T* address, T value) {
    *address = value;
}
template <class T>
void __stcg(T* address, T value) {
    *address = value;
}
template <class T>
void __stcs(T* address, T value) {
    *address = value;
}
template <class T>
void __stwt(T* address, T value) {
    *address = value;
}
