// The functions that kernels call at each load and store. Kernel files are compiled with -fsanitize=thread: the
// compiler then announces every access to memory that may be shared. The thread sanitizer itself is never linked; these
// functions replace it. Their names and arguments are those that GCC emits (gcc/sanitizer.def).

#include "tests/cuda_emulator/checks.h"

using potluck::emulator::check;
using potluck::emulator::check_access;

// clang-format off
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void __tsan_read1(void* p) { check<1, false>(p); }
void __tsan_read2(void* p) { check<2, false>(p); }
void __tsan_read4(void* p) { check<4, false>(p); }
void __tsan_read8(void* p) { check<8, false>(p); }
void __tsan_read16(void* p) { check<16, false>(p); }
void __tsan_write1(void* p) { check<1, true>(p); }
void __tsan_write2(void* p) { check<2, true>(p); }
void __tsan_write4(void* p) { check<4, true>(p); }
void __tsan_write8(void* p) { check<8, true>(p); }
void __tsan_write16(void* p) { check<16, true>(p); }

// For types whose alignment the compiler cannot assume: a GPU accesses them byte by byte, at any address.
void __tsan_unaligned_read2(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 2, false); }
void __tsan_unaligned_read4(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 4, false); }
void __tsan_unaligned_read8(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 8, false); }
void __tsan_unaligned_read16(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 16, false); }
void __tsan_unaligned_write2(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 2, true); }
void __tsan_unaligned_write4(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 4, true); }
void __tsan_unaligned_write8(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 8, true); }
void __tsan_unaligned_write16(void* p) { check_access(reinterpret_cast<std::uintptr_t>(p), 16, true); }
void __tsan_read_range(void* p, std::size_t bytes) { check_access(reinterpret_cast<std::uintptr_t>(p), bytes, false); }
void __tsan_write_range(void* p, std::size_t bytes) { check_access(reinterpret_cast<std::uintptr_t>(p), bytes, true); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// C++ atomics (std::atomic in host code of a kernel file, guards of static variables).
int __tsan_atomic32_load(const int* p, int order) { (void)order; return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
void __tsan_atomic32_store(int* p, int value, int order) { (void)order; __atomic_store_n(p, value, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_fetch_add(int* p, int value, int order) { (void)order; return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_fetch_sub(int* p, int value, int order) { (void)order; return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_exchange(int* p, int value, int order) { (void)order; return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_compare_exchange_strong(int* p, int* expected, int value, int, int) { return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_compare_exchange_weak(int* p, int* expected, int value, int, int) { return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_compare_exchange_val(int* p, int expected, int value, int, int) { __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return expected; }
long __tsan_atomic64_load(const long* p, int order) { (void)order; return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
void __tsan_atomic64_store(long* p, long value, int order) { (void)order; __atomic_store_n(p, value, __ATOMIC_SEQ_CST); }
long __tsan_atomic64_fetch_add(long* p, long value, int order) { (void)order; return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
long __tsan_atomic64_fetch_sub(long* p, long value, int order) { (void)order; return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST); }
long __tsan_atomic64_exchange(long* p, long value, int order) { (void)order; return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST); }
int __tsan_atomic64_compare_exchange_strong(long* p, long* expected, long value, int, int) { return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
int __tsan_atomic64_compare_exchange_weak(long* p, long* expected, long value, int, int) { return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
long __tsan_atomic64_compare_exchange_val(long* p, long expected, long value, int, int) { __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return expected; }
signed char __tsan_atomic8_load(const signed char* p, int order) { (void)order; return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
void __tsan_atomic8_store(signed char* p, signed char value, int order) { (void)order; __atomic_store_n(p, value, __ATOMIC_SEQ_CST); }
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}
// clang-format on
