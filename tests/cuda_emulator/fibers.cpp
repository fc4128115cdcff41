#include "tests/cuda_emulator/fibers.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "tests/cuda_emulator/state.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace potluck::emulator {

// Each stack follows a guard page.
Stacks stacks;

namespace {

using namespace boost::context::detail;

constexpr std::size_t page = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t stack_bytes = std::size_t{256} << 10;
#else
constexpr std::size_t stack_bytes = std::size_t{64} << 10;
#endif
constexpr std::size_t slot_bytes = stack_bytes + page;
constexpr std::size_t most_stacks = std::size_t{1} << 18;

std::size_t stacks_made = 0;
std::mutex stacks_mutex;
std::vector<char*>& free_stacks() {
    static auto* stacks = new std::vector<char*>;
    return *stacks;
}

char* take_stack() {
    const std::lock_guard lock(stacks_mutex);
    if (!free_stacks().empty()) {
        char* stack = free_stacks().back();
        free_stacks().pop_back();
        return stack;
    }
    if (stacks.begin == 0) {
        void* memory = mmap(nullptr, most_stacks * slot_bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        stacks = {reinterpret_cast<std::uintptr_t>(memory), most_stacks * slot_bytes};
    }
    const std::size_t number = stacks_made++;
    if (number >= most_stacks) throw std::bad_alloc();
    char* stack = reinterpret_cast<char*>(stacks.begin + number * slot_bytes + page);
    if (mprotect(stack, stack_bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    return stack;
}

}  // namespace

bool is_stack_guard(std::uintptr_t address) {
    const std::uintptr_t offset = address - stacks.begin;
    return offset < stacks.bytes && offset % slot_bytes < page;
}

Fiber::Fiber(OfThisThread) {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
    void* lowest = nullptr;
    pthread_attr_getstack(&attributes, &lowest, &stack_bytes);
    stack = static_cast<char*>(lowest);
    pthread_attr_destroy(&attributes);
}

FiberPool::~FiberPool() {
    const std::lock_guard lock(stacks_mutex);
    for (const auto& fiber : fibers_) {
        madvise(fiber->stack, fiber->stack_bytes, MADV_DONTNEED);
        free_stacks().push_back(fiber->stack);
    }
}

void FiberPool::prepare(Fiber& fiber) {
    // Stacks that begin at the same offset within a page would compete for the same cache lines.
    const std::size_t shift = (reinterpret_cast<std::uintptr_t>(fiber.stack) / slot_bytes) % 32 * 128;
    fiber.context = make_fcontext(fiber.stack + fiber.stack_bytes - shift, fiber.stack_bytes - shift, entry_);
    fiber.fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    // Abandoned frames still have their red zones marked.
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
}

Fiber& FiberPool::take() {
    if (!idle_.empty()) {
        Fiber& fiber = *idle_.back();
        idle_.pop_back();
        return fiber;
    }
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = take_stack();
    fiber->stack_bytes = stack_bytes;
    prepare(*fiber);
    fibers_.push_back(std::move(fiber));
    return *fibers_.back();
}

void FiberPool::abandon_all() {
    idle_.clear();
    for (const auto& fiber : fibers_) {
        prepare(*fiber);
        idle_.push_back(fiber.get());
    }
}

void switch_fiber(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
    const transfer_t transfer = jump_fcontext(to.context, &from);
    arrived(transfer, from);
}

void arrived(transfer_t transfer, Fiber& self) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
#else
    (void)self;
#endif
    static_cast<Fiber*>(transfer.data)->context = transfer.fctx;
}

}  // namespace potluck::emulator
