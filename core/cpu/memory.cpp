#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/free_memory.h"

namespace potluck {
namespace {

constexpr std::int64_t huge_page = std::int64_t{2} << 20;
/// From this size on a block has its own mapping in huge pages: a page fault then covers 2 MiB instead of 4 KiB.
constexpr std::int64_t mapped_from = 2 * huge_page;
/// Linux overcommits memory and kills the process when the memory is used. Requests from this size on are checked
/// against the memory that is really available.
constexpr std::int64_t checked_from = std::int64_t{64} << 20;

std::int64_t mapped_size(std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

void* map_block(std::int64_t bytes) {
    // Ask for one more huge page and trim both ends, so that the block begins on a huge page.
    const std::int64_t size = mapped_size(bytes);
    void* raw = mmap(nullptr, static_cast<std::size_t>(size + huge_page), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    auto* begin = static_cast<std::byte*>(raw);
    const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin) % huge_page);
    const std::int64_t head = past == 0 ? 0 : huge_page - past;
    if (head > 0) munmap(begin, static_cast<std::size_t>(head));
    munmap(begin + head + size, static_cast<std::size_t>(huge_page - head));
    madvise(begin + head, static_cast<std::size_t>(size), MADV_HUGEPAGE);  // a hint; refused on some systems
    return begin + head;
}

}  // namespace

std::int64_t free_memory_of_host() {
    std::ifstream file("/proc/meminfo");
    for (std::string name; file >> name;) {
        std::int64_t kibibytes = 0;
        if (name == "MemAvailable:" && file >> kibibytes) return kibibytes * 1024;
        std::getline(file, name);
    }
    return INT64_MAX;
}

void* CpuBackend::allocate(std::int64_t bytes) {
    if (bytes >= checked_from && bytes > free_memory_of_host()) return nullptr;
    if (bytes >= mapped_from) return map_block(bytes);
    return std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64));
}

void CpuBackend::release(void* data, std::int64_t bytes) noexcept {
    if (bytes >= mapped_from)
        munmap(data, static_cast<std::size_t>(mapped_size(bytes)));
    else
        std::free(data);
}

// Pinning memory needs the GPU runtime.

void* CpuBackend::allocate_pinned(std::int64_t bytes) {
    const Device gpu = best_device();
    return gpu.is_cpu() ? allocate(bytes) : backend(gpu).allocate_pinned(bytes);
}

void CpuBackend::release_pinned(void* data, std::int64_t bytes) noexcept {
    const Device gpu = best_device();
    if (gpu.is_cpu())
        release(data, bytes);
    else
        backend(gpu).release_pinned(data, bytes);
}

void CpuBackend::copy_from_host(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void CpuBackend::copy_to_host(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace potluck
