#include "tests/cuda_emulator/shared_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

void release(SharedWord* words, std::size_t capacity) {
    if (words != nullptr) munmap(words, capacity / 4 * sizeof(SharedWord));
}

std::string name_of(const Worker& worker, const SharedRegion& region, std::uintptr_t address) {
    return &region == &worker.dynamic_shared
               ? fmt::format("byte {} of the dynamic shared memory", address - region.begin())
               : std::string("a __shared__ variable");
}

[[noreturn]] void report_race(const Worker& worker, const SharedRegion& region, std::uintptr_t address,
                              bool write, const SharedAccess& other, bool other_writes) {
    const Muted muted;
    const bool several = !other_writes && other.crowd != 0;
    stop(FaultKind::shared_race,
         fmt::format("race in shared memory in {}: this thread {} {}, which {} {} with no barrier between",
                     describe_running(), write ? "writes" : "reads", name_of(worker, region, address),
                     several ? "several threads" : worker.describe_thread(other.thread),
                     other_writes ? "wrote"
                     : several    ? "read"
                                  : "reads"));
}

/// Calls `visit(word, bytes of it, address)` for each word that the access overlaps.
template <class Visit>
void for_each_word(SharedRegion& region, std::uintptr_t address, std::size_t bytes, Visit visit) {
    const std::uintptr_t end = address + bytes;
    while (address < end) {
        const std::uintptr_t offset = address - region.begin();
        const auto first = static_cast<unsigned>(offset % 4);
        const auto count = static_cast<unsigned>(std::min<std::uintptr_t>(4 - first, end - address));
        visit(region.words()[offset / 4], ((1u << count) - 1u) << first, address);
        address += count;
    }
}

[[noreturn]] void report_out_of_bounds(const SharedRegion& region, std::uintptr_t address, std::size_t bytes,
                                       bool write) {
    const Muted muted;
    stop(
        FaultKind::out_of_bounds,
        fmt::format(
            "out of bounds: {} {} {} bytes at byte {} of dynamic shared memory, of which the block has {}",
            describe_running(), write ? "writes" : "reads", bytes, address - region.begin(), region.bytes()));
}

[[noreturn]] void report_misaligned(const SharedRegion& region, std::uintptr_t address, std::size_t bytes,
                                    bool write) {
    const Muted muted;
    stop(FaultKind::misaligned,
         fmt::format(
             "misaligned: {} {} {} bytes at byte {} of dynamic shared memory, which is no multiple of it",
             describe_running(), write ? "writes" : "reads", bytes, address - region.begin()));
}

/// Ends the kernel for an access beyond the end, or one whose address is not a multiple of its size.
__attribute__((always_inline)) inline void check_place(const Worker& worker, const SharedRegion& region,
                                                       std::uintptr_t address, std::size_t bytes,
                                                       bool write) {
    if (address - region.begin() + bytes > region.bytes())
        report_out_of_bounds(region, address, bytes, write);
    if (bytes <= 16 && std::has_single_bit(bytes) && address % bytes != 0 &&
        &region == &worker.dynamic_shared)
        report_misaligned(region, address, bytes, write);
}

[[noreturn]] void report_never_written(const Worker& worker, const SharedRegion& region,
                                       std::uintptr_t address) {
    const Muted muted;
    stop(FaultKind::never_written,
         fmt::format("never written: {} reads {}, which no thread of the block wrote", describe_running(),
                     name_of(worker, region, address)));
}

}  // namespace

SharedRegion::~SharedRegion() { release(words_, capacity_); }

void SharedRegion::watch(std::uintptr_t begin, std::size_t bytes) {
    if (begin != begin_) forget();
    begin_ = begin;
    bytes_ = bytes;
    const std::size_t needed = std::max((bytes + 3) / 4 * 4, most_shared_bytes);
    if (needed <= capacity_) return;
    release(words_, capacity_);
    void* memory = mmap(nullptr, needed / 4 * sizeof(SharedWord), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    words_ = static_cast<SharedWord*>(memory);
    capacity_ = needed;
}

void SharedRegion::forget() {
    if (words_ != nullptr) madvise(words_, capacity_ / 4 * sizeof(SharedWord), MADV_DONTNEED);
}

void check_shared(SharedRegion& region, std::uintptr_t address, std::size_t bytes, bool write) {
    const Worker& worker = *active.worker;
    check_place(worker, region, address, bytes, write);
    if (!worker.announces_accesses()) return;  // most accesses are not known
    const unsigned thread = worker.thread;
    const std::uint32_t block_time = worker.block_time;
    const std::uint32_t warp_time = worker.warps[thread / lanes].time & 0xffffffu;
    const auto same_warp = [&](const SharedAccess& other) { return other.thread / lanes == thread / lanes; };
    const auto is_race = [&](const SharedAccess& other, unsigned touched) {
        if (other.block_time != block_time || (other.bytes & touched) == 0) return false;
        if (other.crowd == 2) return true;
        if (!same_warp(other)) return true;
        return other.warp_time == warp_time && (other.crowd == 1 || other.thread != thread);
    };
    const auto now = [&](unsigned touched) {
        SharedAccess access{};
        access.block_time = block_time & 0xffffffu;
        access.warp_time = warp_time & 0xffffffu;
        access.thread = thread & 0x3ffu;
        access.bytes = touched & 0xfu;
        return access;
    };
    for_each_word(region, address, bytes, [&](SharedWord& word, unsigned touched, std::uintptr_t place) {
        if (is_race(word.write, touched)) report_race(worker, region, place, write, word.write, true);
        if (write) {
            if (is_race(word.read, touched)) report_race(worker, region, place, write, word.read, false);
            word.write = now(touched);
            if (word.written_block != worker.block_serial) {
                word.written_block = worker.block_serial & 0xfffffffu;
                word.written_bytes = 0;
            }
            word.written_bytes = (word.written_bytes | touched) & 0xfu;
            return;
        }
        if (word.written_block != worker.block_serial || (word.written_bytes & touched) != touched)
            report_never_written(worker, region, place);
        SharedAccess& read = word.read;
        const bool is_recent = read.block_time == block_time && (read.bytes & touched) != 0;
        if (!is_recent || (read.crowd == 0 && read.thread == thread)) {
            read = now(touched);
        } else if (read.crowd == 2) {
            // Several warps have already read it: nothing to add.
        } else if (same_warp(read)) {
            const bool is_same_time = read.warp_time == warp_time;
            const unsigned common = read.bytes & touched;
            read = now(is_same_time ? common : touched);
            read.crowd = is_same_time ? 1 : 0;
        } else {
            read.crowd = 2;
            read.bytes = read.bytes & touched & 0xfu;
        }
    });
}

void check_shared_atomic(SharedRegion& region, std::uintptr_t address, std::size_t bytes) {
    const Worker& worker = *active.worker;
    check_place(worker, region, address, bytes, true);
    if (!worker.announces_accesses()) return;
    for_each_word(region, address, bytes, [&](SharedWord& word, unsigned touched, std::uintptr_t place) {
        if (word.written_block != worker.block_serial || (word.written_bytes & touched) != touched)
            report_never_written(worker, region, place);
    });
}

void forget_shared(SharedRegion& region, std::uintptr_t address, std::size_t bytes) {
    check_shared(region, address, bytes, true);
    for_each_word(region, address, bytes, [](SharedWord& word, unsigned touched, std::uintptr_t) {
        word.written_bytes = word.written_bytes & ~touched & 0xfu;
    });
}

}  // namespace potluck::emulator
