#include "tests/cuda_emulator/arena.h"

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {

Arena arena;

namespace {

using Time = std::chrono::steady_clock;

constexpr std::uint64_t huge_page = std::uint64_t{2} << 20;

std::uint64_t in_use[most_devices];  // bytes from the start of each range, in whole huge pages
int open_count = 0;
bool is_open = false;
Time::time_point last_close{};
std::chrono::nanoseconds cost_of_closing{};

/// CPU time of this host thread: other activity on the machine does not count.
std::chrono::nanoseconds processor_time() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

void* map(std::uint64_t bytes, int protection) {
    void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
}

void protect(int protection) {
    for (int device = 0; device < most_devices; ++device)
        if (in_use[device] != 0)
            mprotect(reinterpret_cast<void*>(arena.begin + static_cast<std::uint64_t>(device) * arena_bytes),
                     in_use[device], protection);
}

struct sigaction handler_before;

void print(const std::string& text) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// Called for a load or a store at an address that the page tables protect.
void on_bad_access(int signal, siginfo_t* information, void*) {
    const auto address = reinterpret_cast<std::uintptr_t>(information->si_addr);
    if (arena.contains(address))
        print("CUDA emulator: host code used a pointer to device memory without a copy: " +
              describe(address) + ". Copy it with cudaMemcpyAsync first.\n");
    else if (is_stack_guard(address))
        print("CUDA emulator: a kernel's thread ran out of stack. Keep large arrays in shared memory.\n");
    // The instruction is executed again, and the previous handler takes over.
    sigaction(signal, &handler_before, nullptr);
}

/// Test frameworks install and remove their own handlers, which replaces ours: so this is called whenever memory is
/// closed.
void install_handler() {
    struct sigaction now;
    sigaction(SIGSEGV, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bad_access) return;
    handler_before = now;
    struct sigaction ours;
    std::memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = on_bad_access;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

void reserve_arena() {
    const std::uint64_t span = most_devices * arena_bytes;
    // Reserve enough to begin at a multiple of the huge page size: opening and closing a few huge pages is fast.
    const auto begin = reinterpret_cast<std::uintptr_t>(map(span + huge_page, PROT_NONE));
    arena.begin = (begin + huge_page - 1) / huge_page * huge_page;
    if (arena.begin != begin) munmap(reinterpret_cast<void*>(begin), arena.begin - begin);
    if (const std::uint64_t rest = begin + huge_page - arena.begin; rest != 0)
        munmap(reinterpret_cast<void*>(arena.begin + span), rest);
    arena.span = span;
    madvise(reinterpret_cast<void*>(arena.begin), span, MADV_HUGEPAGE);
    arena.shadow = static_cast<std::uint8_t*>(map(span, PROT_READ | PROT_WRITE));
    arena.writes = static_cast<std::uint32_t*>(map(span, PROT_READ | PROT_WRITE));
    for (auto& records : arena.reads)
        records = static_cast<std::uint32_t*>(map(span, PROT_READ | PROT_WRITE));
    arena.kernel_records = static_cast<Arena::KernelRecord*>(map(4 * span, PROT_READ | PROT_WRITE));
}

void extend_memory(int device, std::uint64_t bytes) {
    bytes = (bytes + huge_page - 1) / huge_page * huge_page;
    if (bytes <= in_use[device]) return;
    if (is_open) {
        const std::uintptr_t begin = arena.begin + static_cast<std::uint64_t>(device) * arena_bytes;
        mprotect(reinterpret_cast<void*>(begin + in_use[device]), bytes - in_use[device],
                 PROT_READ | PROT_WRITE);
    }
    in_use[device] = bytes;
}

void drop_pages(std::uintptr_t begin, std::uint64_t bytes) {
    constexpr std::uint64_t page = 4096;
    const std::uintptr_t first = (begin + page - 1) / page * page;
    const std::uintptr_t end = (begin + bytes) / page * page;
    if (first >= end) return;
    const std::uint64_t offset = first - arena.begin;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
    madvise(arena.shadow + offset, end - first, MADV_DONTNEED);
    madvise(arena.writes + offset / 4, end - first, MADV_DONTNEED);
    for (std::uint32_t* records : arena.reads) madvise(records + offset / 4, end - first, MADV_DONTNEED);
    madvise(arena.kernel_records + offset / 4, 4 * (end - first), MADV_DONTNEED);
}

OpenMemory::OpenMemory() {
    if (open_count++ > 0 || is_open) return;
    protect(PROT_READ | PROT_WRITE);
    is_open = true;
}

OpenMemory::~OpenMemory() {
    if (--open_count > 0) return;
    install_handler();
    // Without huge pages, closing gigabytes takes long. Then it is not done after every operation, so that it
    //
    // takes at most a tenth of the time.
    if (cost_of_closing > std::chrono::microseconds(200) && Time::now() - last_close < 10 * cost_of_closing)
        return;
    const auto start = processor_time();
    protect(PROT_NONE);
    is_open = false;
    cost_of_closing = 2 * (processor_time() - start);
    last_close = Time::now();
}

}  // namespace potluck::emulator
