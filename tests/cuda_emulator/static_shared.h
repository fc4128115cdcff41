#pragma once

// Internal: where the static `__shared__` variables of a kernel lie. They are thread-local variables of the program or
// library that holds the kernel, and nothing else in a kernel is.

#include <cstddef>
#include <cstdint>

namespace potluck::emulator {

struct StaticShared {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
};
/// Whether the address lies in a program or library as it was loaded: its constants and global variables.
bool is_in_a_program(std::uintptr_t address);
/// For this host thread.
StaticShared static_shared_of(const void* kernel);
/// How many bytes of it the kernel takes, as nvcc counts.
std::size_t static_shared_bytes(const void* kernel);

}  // namespace potluck::emulator
