#pragma once

// How a kernel and its arguments are passed to the emulator.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace potluck::emulator {

/// Whether the memory accesses of this file's kernels are instrumented (see hooks.cpp). Sanitizers cannot be combined,
/// so they are not in a build with the address sanitizer.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool accesses_are_checked = true;
#else
inline constexpr bool accesses_are_checked = false;
#endif

/// The code of each thread: a copy of a function object without parameters. Kernels may read its bytes, which contain
/// their arguments, but no other host memory.
struct KernelBody {
    template <class Function>
    requires(!std::is_same_v<std::remove_cvref_t<Function>, KernelBody>)
        KernelBody(Function function)  // from a lambda
        : closure(std::make_shared<Function>(std::move(function))),
          bytes(sizeof(Function)),
          is_checked(accesses_are_checked),
          run([](const void* object) { (*static_cast<const Function*>(object))(); }) {}

    std::shared_ptr<const void> closure;
    std::size_t bytes;
    bool is_checked;  // whether its accesses are announced
    void (*run)(const void* object);
};

/// Runs `body` once for each thread of the grid, in stream order, or records it while the stream is captured. Refuses
/// what a GPU refuses. `kernel` identifies the kernel; `op` (a string literal) appears in reports.
cudaError_t launch(const void* kernel, const char* op, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, KernelBody body);

/// An entry of the table that compile_kernel.py adds to each kernel file: the bytes of static shared memory that a
/// launch of a kernel needs.
struct StaticSharedBytes {
    const void* kernel;
    std::size_t bytes;
};
/// Registers the table of a program or library. Returns true.
bool add_static_shared(const StaticSharedBytes* begin, const StaticSharedBytes* end);

/// The dynamic shared memory of the running block, aligned to 16 bytes.
void* dynamic_shared_memory();

}  // namespace potluck::emulator
