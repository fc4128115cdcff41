#pragma once

// How a kernel and its arguments come to the emulator.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace potluck::emulator {

/// Whether the memory accesses of the kernels of this file are seen (see hooks.cpp). Sanitizers cannot be mixed, so in a
/// build with the address sanitizer they are not.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool accesses_are_checked = true;
#else
inline constexpr bool accesses_are_checked = false;
#endif

/// What each thread runs: a copy of a function object without parameters. Kernels may read its bytes, for there their
/// arguments lie; other memory of the host they may not.
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

/// Runs `body` once for each thread of the grid, in stream order, or records it while the stream is captured.
/// Refuses what a card refuses. `kernel` identifies the kernel, `op` (a string literal) is named in reports.
cudaError_t launch(const void* kernel, const char* op, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, KernelBody body);

/// A line of the table that compile_kernel.py adds to each kernel file: bytes of the static shared memory that a launch of
/// a kernel takes.
struct StaticSharedBytes {
    const void* kernel;
    std::size_t bytes;
};
/// Makes the table of a program or library known. Returns true.
bool add_static_shared(const StaticSharedBytes* begin, const StaticSharedBytes* end);

/// The dynamic shared memory of the running block, aligned to 16 bytes.
void* dynamic_shared_memory();

}  // namespace potluck::emulator
