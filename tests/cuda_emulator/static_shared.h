#pragma once

// Internal: the addresses of a kernel's static `__shared__` variables. They are thread-local variables of the program
// or library that contains the kernel, and the only thread-local variables in a kernel.

#include <cstddef>
#include <cstdint>

namespace potluck::emulator {

struct StaticShared {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
};
/// Whether the address is in the image of a program or library: its constants and global variables.
bool is_in_a_program(std::uintptr_t address);
/// For this host thread.
StaticShared static_shared_of(const void* kernel);
/// How many bytes of them the kernel needs, counted like nvcc.
std::size_t static_shared_bytes(const void* kernel);

}  // namespace potluck::emulator
